"""What a trial says: times, metrics, steps, and ranges that are the same in all trials of a run."""

from dataclasses import replace
from datetime import datetime

import optuna
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.storages import InMemoryStorage
from random_runs import HP_CONFIG, make_run, timed

from evo_grpo.record.lineage import Lineage
from evo_grpo.record.trials import Space
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter


def recorded(records, hp_config=HP_CONFIG):
    lineage = Lineage(InMemoryStorage(), "run", hp_config)
    lineage.record_all(records)
    return lineage


def test_a_trial_starts_and_ends_with_its_round():
    records = timed(make_run(size=3, rounds=2))
    for trial in recorded(records).trials():
        record = records[trial.user_attrs["round"]]
        assert trial.datetime_start == datetime.fromtimestamp(record.started)
        assert trial.datetime_complete == datetime.fromtimestamp(record.ended)
        assert trial.duration.total_seconds() == 9.5


def test_the_mean_of_survivors_comes_after_the_last_round():
    from evo_grpo.types import Member, Mutation, Score, Slot

    records = timed(make_run(size=3, rounds=2))
    lineage, last = recorded(records), records[-1]
    parents = [agent.member for agent in last.agents[:2]]
    mean = Member(99, Slot(3), parents[0], 2, Mutation("mean"), parents[1])
    lineage.record_mean(mean, last, Score(0.5, 0.1, 8))
    trial = lineage.trials()[-1]
    assert trial.datetime_start == trial.datetime_complete == datetime.fromtimestamp(last.ended)


def test_metrics_are_attributes_and_what_is_not_finite_is_left_out():
    (record,) = timed(make_run(size=2, rounds=1))
    metrics = {"reward": 0.5, "kl": float("nan"), "round": 7.0}
    agents = (replace(record.agents[0], metrics=metrics), *record.agents[1:])
    said = recorded([replace(record, agents=agents)]).trials()[0].user_attrs
    assert (said["train/reward"], said["train/tokens"]) == (0.5, 100)
    assert "train/kl" not in said
    # An environment may count whatever it likes: it hides nothing.
    assert (said["round"], said["train/round"]) == (0, 7.0)


def test_steps_are_numbered_through_the_run():
    records = timed(make_run(size=2, rounds=3))
    for trial in recorded(records).trials():
        first = 3 * trial.user_attrs["round"]
        assert trial.intermediate_values == {first: 0.25, first + 2: 0.75}


def test_records_without_times_have_the_trials_that_they_always_had():
    for trial in recorded(make_run(size=2, rounds=2)).trials():
        assert trial.intermediate_values == {}
        assert not [name for name in trial.user_attrs if name.startswith("train/")]


def begun(*hparams, mutable=None):
    (record,) = timed(make_run(size=len(hparams), rounds=1))
    agents = tuple(replace(a, hparams=h) for a, h in zip(record.agents, hparams, strict=True))
    return Space(mutable or HyperparameterConfig()).begun_with(replace(record, agents=agents))


def test_what_has_no_bounds_has_one_range_in_all_trials():
    agents = [Hparams(lr=1e-3, beta=0.0), Hparams(lr=1e-4, beta=0.02, group_size=4)]
    space = begun(*agents)
    ranges = [space.parameters(one)[1] for one in agents]
    assert ranges[0] == ranges[1]
    assert ranges[0]["lr"] == FloatDistribution(1e-4, 1e-3, log=True)
    assert ranges[0]["beta"] == FloatDistribution(0.0, 0.02)
    assert ranges[0]["group_size"] == IntDistribution(4, 8, log=True)


def test_a_value_outside_widens_a_range_but_never_changes_its_scale():
    """Optuna's databases refuse a parameter whose scale changes, and would never take the trial."""
    space = begun(Hparams(lr=1e-3), Hparams(lr=1e-2))
    params, ranges = space.parameters(Hparams(lr=5e-4))  # halved below its first range
    assert params["lr"] == 5e-4
    assert ranges["lr"] == FloatDistribution(5e-4, 1e-2, log=True)
    positive = begun(
        Hparams(lr=1e-3, beta=0.05), mutable=HyperparameterConfig(beta=RLParameter(0.01, 0.1))
    )
    params, ranges = positive.parameters(Hparams(lr=1e-3, beta=0.0))
    assert "beta" not in params
    assert "beta" not in ranges
    both = begun(Hparams(lr=1e-3, beta=0.0), Hparams(lr=1e-3, beta=0.05))
    assert both.parameters(Hparams(lr=1e-3, beta=0.05))[1]["beta"].log is False


def test_importances_find_the_hyperparameter_that_matters():
    records = timed(make_run(size=6, rounds=8))
    records = [
        replace(
            record,
            agents=tuple(
                replace(agent, score=replace(agent.score, mean=-abs(agent.hparams.beta - 0.03)))
                for agent in record.agents
            ),
        )
        for record in records
    ]
    study = recorded(records).study
    assert next(iter(optuna.importance.get_param_importances(study))) == "beta"
    # What other evaluators look at: parameters with one range in all trials.
    kept = optuna.search_space.intersection_search_space(study.get_trials())
    assert set(kept) == {"lr", "beta", "clip_coef", "group_size"}


def test_what_differs_from_the_start_is_in_the_importances_without_mutating():
    records = timed(make_run(size=4, rounds=2))
    records = [
        replace(
            record,
            agents=tuple(
                replace(agent, hparams=agent.hparams.replace(beta=0.01 * agent.agent))
                for agent in record.agents
            ),
        )
        for record in records
    ]
    study = recorded(records, HyperparameterConfig()).study
    kept = optuna.search_space.intersection_search_space(study.get_trials())
    assert kept["beta"] == FloatDistribution(0.0, 0.03)

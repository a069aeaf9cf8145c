"""Optuna's side of a run: one trial per agent and round, parents that exist, failures as FAIL."""

import json
from dataclasses import replace
from datetime import datetime

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState
from random_runs import HP_CONFIG, make_run, timed, with_scores
from shown_run import agent as recorded
from shown_run import two_rounds

from evo_grpo.errors import CheckpointError
from evo_grpo.record.database import open_study
from evo_grpo.record.family import ancestry
from evo_grpo.record.lineage import Lineage, Space
from evo_grpo.record.records import RoundRecord
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter
from evo_grpo.types import Mutation, Score

PROPERTY = settings(max_examples=25)


def opened(records=(), hp_config=HP_CONFIG, storage=None):
    lineage = Lineage(open_study(storage or InMemoryStorage(), "population"), hp_config)
    for record in records:
        lineage.record(record)
    return lineage


def by_place(trials):
    return {(t.user_attrs["agent"], t.user_attrs["round"]): t for t in trials}


@PROPERTY
@given(size=st.integers(2, 6), rounds=st.integers(1, 6), seed=st.integers(0, 1000))
def test_parent_links_are_closed(size, rounds, seed):
    records = make_run(size, rounds, seed, failures=0.3)
    trials = opened(records).study.trials
    assert len(trials) == size * rounds
    for record in records:
        for agent in record.agents:
            trial = by_place(trials)[agent.agent, agent.round]
            attributes = trial.user_attrs
            if agent.round == 0:
                assert attributes["parent_trial"] is None
                assert attributes["op"] == "init"
                continue
            parent = trials[attributes["parent_trial"]]
            assert parent.number == attributes["parent_trial"]
            assert parent.user_attrs["round"] == agent.round - 1
            if parent.user_attrs["member"] == agent.member:
                assert parent.user_attrs["agent"] == agent.agent
                assert (attributes["op"], attributes["mutated"]) == ("continue", {})
            else:
                assert parent.user_attrs["member"] == agent.parent
                assert attributes["op"] in {"clone", "mutate"}
            # What the link says is all that changed on the way.
            values = Hparams(**parent.user_attrs["hparams"])
            for name, (old, new) in attributes["mutated"].items():
                assert values.get(name) == old
                values = values.with_value(name, new)
            assert values == agent.hparams == Hparams(**attributes["hparams"])


def test_a_trial_has_the_attributes_that_others_rely_on():
    records = make_run(4, 3)
    lineage = opened(records)
    agent = records[2].agents[1]
    trial = by_place(lineage.study.trials)[1, 2]
    assert trial.state == TrialState.COMPLETE
    assert trial.values == [agent.score.mean]
    expected = {
        "agent": 1,
        "member": agent.member,
        "parent": agent.parent,
        "round": 2,
        "adapter_sha256": agent.adapter_sha256,
        "checkpoint": "checkpoints/round-0002/agent-01",
        "seed": 35,
        "fitness_se": 0.05,
        "reason": "",
    }
    assert expected.items() <= trial.user_attrs.items()
    assert {"parent_trial", "op", "mutated", "hparams"} <= set(trial.user_attrs)
    assert lineage.study.direction == optuna.study.StudyDirection.MAXIMIZE
    best = max((a for r in records for a in r.agents), key=lambda a: a.score.mean)
    assert lineage.study.best_value == best.score.mean


def test_parameters_lie_in_their_ranges():
    lineage = opened(make_run(4, 1))
    for trial in lineage.study.trials:
        assert trial.distributions == {
            "lr": FloatDistribution(1e-5, 1e-2, log=True),
            "beta": FloatDistribution(0.0, 0.1),
            "clip_coef": FloatDistribution(0.1, 0.4, log=True),
            "group_size": IntDistribution(2, 16, log=True),
        }
        assert set(trial.params) == set(trial.distributions)


def one_trial(hparams, hp_config=None):
    (record,) = make_run(size=2, rounds=1)
    agent = replace(record.agents[0], hparams=hparams)
    return opened([replace(record, agents=(agent,))], hp_config).study.trials[0]


def test_a_clip_pair_is_two_parameters():
    pair = Hparams(lr=1e-3, clip_coef=(0.8, 1.28))
    trial = one_trial(pair, HP_CONFIG)
    assert (trial.params["clip_low"], trial.params["clip_high"]) == (0.8, 1.28)
    assert "clip_coef" not in trial.params
    assert trial.distributions["clip_low"].low == 0.6
    assert trial.distributions["clip_high"].high == 1.4
    json.dumps(trial.user_attrs)
    ends = HyperparameterConfig(clip_low=RLParameter(0.5, 0.9), clip_high=RLParameter(1.1, 1.5))
    trial = one_trial(Hparams(clip_coef=0.2), ends)
    assert (trial.params["clip_low"], trial.params["clip_high"]) == (0.8, 1.2)
    assert trial.distributions["clip_high"] == FloatDistribution(1.1, 1.5, log=True)


def test_what_does_not_mutate_and_what_lies_outside_is_recorded_too():
    config = HyperparameterConfig(
        beta=RLParameter(0.01, 0.1),
        batch_size=RLParameter(4, 64),
        max_grad_norm=RLParameter(0.1, 1.0),
        top_k=RLParameter(0, 50),
    )
    hparams = Hparams(lr=1e-3, beta=0.0, group_size=6, batch_size=None, max_grad_norm=None, top_k=0)
    trial = one_trial(hparams, config)
    assert trial.params == {"lr": 1e-3, "beta": 0.0, "clip_coef": 0.2, "group_size": 6, "top_k": 0}
    assert trial.distributions["lr"] == FloatDistribution(1e-3, 1e-3, log=True)
    assert trial.distributions["beta"] == FloatDistribution(0.0, 0.1)
    assert trial.distributions["top_k"] == IntDistribution(0, 50)


def test_a_failed_agent_is_a_trial_in_state_fail():
    first, second = make_run(size=3, rounds=2)
    for broken in (None, float("nan"), float("inf")):
        lineage = opened([with_scores(first, [0.5, broken, 0.25])])
        states = [trial.state for trial in lineage.study.trials]
        assert states == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE]
        assert lineage.study.trials[1].values is None
        assert set(lineage.study.trials[1].params) == set(lineage.study.trials[0].params)
        lineage.record(second)
        assert lineage.study.best_value >= 0.5
    failed = replace(first.agents[0], state="failed", score=None, reason="loss is nan")
    trials = opened([replace(first, agents=(failed,))]).study.trials
    assert trials[0].user_attrs["reason"] == "loss is nan"


def test_a_new_trial_of_another_writer_is_seen():
    records = make_run(size=2, rounds=2)
    storage = InMemoryStorage()
    ours = opened(records[:1], storage=storage)
    opened(records[1:], storage=storage)
    ours.record(records[1])
    assert len(ours.study.trials) == 4


def test_of_a_trial_that_was_added_twice_the_first_counts():
    """Optuna adds it again where a server does not confirm it."""
    first, second = make_run(size=2, rounds=2)
    lineage = opened([first])
    lineage.study.add_trial(lineage.study.trials[0])
    added = lineage.record(second)
    assert [trial.number for trial in added] == [3, 4]
    assert {trial.user_attrs["parent_trial"] for trial in added} <= {0, 1}
    assert not lineage.conflicts_with(first)
    assert lineage.conflicts_with(with_scores(first, [0.1, 0.2]))


def test_a_missing_round_is_named():
    lineage = opened()
    with pytest.raises(
        CheckpointError, match=r"as the parent trial of agent 0 in round 2.*in order"
    ):
        lineage.record(make_run(size=2, rounds=2)[1])
    assert lineage.study.trials == []


@pytest.mark.parametrize("op", ["restore", "steer-restore"])
def test_a_restored_member_goes_on_from_the_round_in_which_its_parent_was_the_best(op):
    first, second = two_rounds()
    fallen = replace(second.agents[1], score=Score(0.1, 0.05, 64))
    second = replace(second, agents=(second.agents[0], fallen))
    back = Mutation(op, {"lr": (1e-3, 5e-4)})
    third = RoundRecord(2, (recorded(1, 3, 2, 0.6, parent=0, mutation=back),), {})
    # The best of member 0 was its second round; in the third it has left.
    lineage = opened([first, second, third], None)
    trial = lineage.study.trials[-1]
    assert trial.user_attrs["op"] == op
    assert trial.user_attrs["mutated"] == {"lr": [1e-3, 5e-4]}
    parent = lineage.study.trials[trial.user_attrs["parent_trial"]].user_attrs
    assert (parent["member"], parent["round"]) == (0, 1)
    assert [one.round for one in ancestry([first, second, third], 3)] == [0, 1, 2]


def ended_with_mean(rounds, **changes):
    """The summary of a run that a mean of agents of its last round won."""
    parents = [agent.member for agent in rounds[-1].agents[:2]]
    best = {"kind": "mean", "member": 99, "parents": parents}
    compared = {"kind": "mean", "validation": {"mean": 0.8, "se": 0.05, "n": 64}}
    return {"best": best, "candidates": [compared], "rounds": len(rounds), **changes}


def test_a_mean_is_a_trial_of_its_own_with_both_parents_after_the_last_round():
    rounds = timed(two_rounds())
    lineage = opened(rounds, None)
    unread = {"candidates": [{"kind": "mean", "validation": None}]}
    lineage.record_mean(ended_with_mean(rounds, **unread), rounds[-1])  # nothing was compared
    assert len(lineage.study.trials) == 4
    for _ in range(2):  # the log may be read again
        lineage.record_mean(ended_with_mean(rounds), rounds[-1])
    assert len(lineage.study.trials) == 5
    trial = lineage.study.trials[-1]
    attributes = trial.user_attrs
    assert trial.values == [0.8]
    assert (attributes["op"], attributes["round"], attributes["member"]) == ("mean", 2, 99)
    assert (attributes["parent"], attributes["second_parent"]) == (0, 2)
    assert lineage.study.trials[attributes["parent_trial"]].user_attrs["member"] == 0
    ended = datetime.fromtimestamp(rounds[-1].ended)
    assert trial.datetime_start == trial.datetime_complete == ended


def test_a_trial_has_the_times_and_the_step_rewards_of_its_round():
    records = timed(make_run(size=3, rounds=2))
    for trial in opened(records).study.trials:
        record = records[trial.user_attrs["round"]]
        assert trial.datetime_start == datetime.fromtimestamp(record.started)
        assert trial.datetime_complete == datetime.fromtimestamp(record.ended)
        assert trial.duration.total_seconds() == 9.5
        first = 3 * record.round  # steps are numbered through the run
        assert trial.intermediate_values == {first: 0.25, first + 2: 0.75}


def test_metrics_are_attributes_and_what_is_not_finite_is_left_out():
    (record,) = timed(make_run(size=2, rounds=1))
    metrics = {"reward": 0.5, "kl": float("nan"), "round": 7.0}
    agents = (replace(record.agents[0], metrics=metrics), *record.agents[1:])
    said = opened([replace(record, agents=agents)]).study.trials[0].user_attrs
    assert (said["train/reward"], said["train/tokens"]) == (0.5, 100)
    assert "train/kl" not in said
    # An environment may count whatever it likes: it hides nothing.
    assert (said["round"], said["train/round"]) == (0, 7.0)


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


def changed(records, change):
    """The records with fields of each agent replaced by what `change(agent)` returns."""
    return [
        replace(record, agents=tuple(replace(one, **change(one)) for one in record.agents))
        for record in records
    ]


def test_importances_find_the_hyperparameter_that_matters():
    records = changed(
        timed(make_run(size=6, rounds=8)),
        lambda agent: {"score": replace(agent.score, mean=-abs(agent.hparams.beta - 0.03))},
    )
    study = opened(records).study
    assert next(iter(optuna.importance.get_param_importances(study))) == "beta"
    # What other evaluators look at: parameters with one range in all trials.
    kept = optuna.search_space.intersection_search_space(study.get_trials())
    assert set(kept) == {"lr", "beta", "clip_coef", "group_size"}


def test_choices_are_a_category_of_which_another_value_is_no_member():
    config = HyperparameterConfig(group_size=RLParameter(choices=[4, 8]))
    trial = one_trial(Hparams(group_size=8), config)
    assert trial.params["group_size"] == 8
    assert trial.distributions["group_size"] == CategoricalDistribution((4, 8))
    assert "group_size" not in one_trial(Hparams(group_size=6), config).params

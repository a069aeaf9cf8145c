"""Optuna's side of a run: one trial per agent and round, parents that exist, failures as FAIL."""

import json
from dataclasses import replace
from datetime import datetime
from itertools import pairwise

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState
from random_runs import HP_CONFIG, make_run, timed
from shown_run import agent as recorded
from shown_run import two_rounds

from evo_grpo.errors import CheckpointError
from evo_grpo.record.family import ancestry
from evo_grpo.record.lineage import Lineage, Space
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.study import open_study
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter
from evo_grpo.types import Mutation, Score

PROPERTY = settings(max_examples=25)


def opened(hp_config=None, storage=None):
    return Lineage(open_study(storage or InMemoryStorage(), "population"), hp_config)


def record_all(lineage, records):
    for record in records:
        lineage.record(record)


def by_place(trials):
    return {(t.user_attrs["agent"], t.user_attrs["round"]): t for t in trials}


@pytest.fixture(scope="module")
def play():
    # The factory itself, which hypothesis may call many times: it holds no state.
    from random_runs import HP_CONFIG, make_run

    def record(*arguments, **options):
        records = make_run(*arguments, **options)
        lineage = opened(HP_CONFIG)
        record_all(lineage, records)
        return records, lineage

    return record


@PROPERTY
@given(size=st.integers(2, 6), rounds=st.integers(1, 6), seed=st.integers(0, 1000))
def test_parent_links_are_closed(play, size, rounds, seed):
    records, lineage = play(size, rounds, seed, failures=0.3)
    trials = lineage.study.trials
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


def test_a_trial_has_the_attributes_that_others_rely_on(play):
    records, lineage = play(4, 3)
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


def test_parameters_lie_in_their_ranges(play):
    _, lineage = play(4, 1)
    for trial in lineage.study.trials:
        assert trial.distributions == {
            "lr": FloatDistribution(1e-5, 1e-2, log=True),
            "beta": FloatDistribution(0.0, 0.1),
            "clip_coef": FloatDistribution(0.1, 0.4, log=True),
            "group_size": IntDistribution(2, 16, log=True),
        }
        assert set(trial.params) == set(trial.distributions)


def one_trial(make_run, hparams, hp_config=None, **changes):
    (record,) = make_run(size=2, rounds=1)
    agent = replace(record.agents[0], hparams=hparams, **changes)
    lineage = opened(hp_config)
    lineage.record(replace(record, agents=(agent,)))
    return lineage.study.trials[0]


def test_a_clip_pair_is_two_parameters(make_run, hp_config):
    pair = Hparams(lr=1e-3, clip_coef=(0.8, 1.28))
    trial = one_trial(make_run, pair, hp_config)
    assert (trial.params["clip_low"], trial.params["clip_high"]) == (0.8, 1.28)
    assert "clip_coef" not in trial.params
    assert trial.distributions["clip_low"].low == 0.6
    assert trial.distributions["clip_high"].high == 1.4
    json.dumps(trial.user_attrs)
    ends = HyperparameterConfig(clip_low=RLParameter(0.5, 0.9), clip_high=RLParameter(1.1, 1.5))
    trial = one_trial(make_run, Hparams(clip_coef=0.2), ends)
    assert (trial.params["clip_low"], trial.params["clip_high"]) == (0.8, 1.2)
    assert trial.distributions["clip_high"] == FloatDistribution(1.1, 1.5, log=True)


def test_what_does_not_mutate_and_what_lies_outside_is_recorded_too(make_run):
    config = HyperparameterConfig(
        beta=RLParameter(0.01, 0.1),
        batch_size=RLParameter(4, 64),
        max_grad_norm=RLParameter(0.1, 1.0),
        top_k=RLParameter(0, 50),
    )
    hparams = Hparams(lr=1e-3, beta=0.0, group_size=6, batch_size=None, max_grad_norm=None, top_k=0)
    trial = one_trial(make_run, hparams, config)
    assert trial.params == {"lr": 1e-3, "beta": 0.0, "clip_coef": 0.2, "group_size": 6, "top_k": 0}
    assert trial.distributions["lr"] == FloatDistribution(1e-3, 1e-3, log=True)
    assert trial.distributions["beta"] == FloatDistribution(0.0, 0.1)
    assert trial.distributions["top_k"] == IntDistribution(0, 50)


def test_a_failed_agent_is_a_trial_in_state_fail(make_run, with_scores, hp_config):
    first, second = make_run(size=3, rounds=2)
    for broken in (None, float("nan"), float("inf")):
        lineage = opened(hp_config)
        lineage.record(with_scores(first, [0.5, broken, 0.25]))
        states = [trial.state for trial in lineage.study.trials]
        assert states == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE]
        assert lineage.study.trials[1].values is None
        assert set(lineage.study.trials[1].params) == set(lineage.study.trials[0].params)
        lineage.record(second)
        assert lineage.study.best_value >= 0.5
    failed = replace(first.agents[0], state="failed", score=None, reason="loss is nan")
    lineage = opened(hp_config)
    lineage.record(replace(first, agents=(failed,)))
    assert lineage.study.trials[0].user_attrs["reason"] == "loss is nan"


def test_a_new_trial_of_another_writer_is_seen(make_run, hp_config):
    records = make_run(size=2, rounds=2)
    storage = InMemoryStorage()
    ours = opened(hp_config, storage)
    ours.record(records[0])
    opened(hp_config, storage).record(records[1])
    ours.record(records[1])
    assert len(ours.study.trials) == 4


def test_a_missing_round_is_named(make_run, hp_config):
    records = make_run(size=2, rounds=2)
    lineage = opened(hp_config)
    with pytest.raises(
        CheckpointError, match=r"as the parent trial of agent 0 in round 2.*in order"
    ):
        lineage.record(records[1])
    assert lineage.study.trials == []


def test_a_survivor_that_mutated_goes_on_from_its_former_self(make_run, hp_config):
    first, second = make_run(size=2, rounds=2)
    hparams = first.agents[0].hparams.with_value("lr", 2e-3)
    mutation = Mutation("mutate", {"lr": (first.agents[0].hparams.lr, 2e-3)})
    child = replace(second.agents[0], member=7, parent=0, hparams=hparams, mutation=mutation)
    lineage = opened(hp_config)
    record_all(lineage, [first, replace(second, agents=(child,))])
    attributes = lineage.study.trials[-1].user_attrs
    assert attributes["parent_trial"] == 0
    assert attributes["op"] == "mutate"
    assert attributes["mutated"] == {"lr": [first.agents[0].hparams.lr, 2e-3]}


def test_a_parent_that_lives_on_is_met_in_the_round_before_the_birth(play):
    for seed in range(10):
        records, lineage = play(4, 4, seed)
        trials = lineage.study.trials
        for before, record in pairwise(records):
            for agent in record.agents:
                number = by_place(trials)[agent.agent, agent.round].user_attrs["parent_trial"]
                assert trials[number].user_attrs["member"] in {a.member for a in before.agents}


@pytest.mark.parametrize("op", ["restore", "steer-restore"])
def test_a_restored_member_goes_on_from_the_round_in_which_its_parent_was_the_best(op):
    first, second = two_rounds()
    fallen = replace(second.agents[1], score=Score(0.1, 0.05, 64))
    second = replace(second, agents=(second.agents[0], fallen))
    back = Mutation(op, {"lr": (1e-3, 5e-4)})
    third = RoundRecord(2, (recorded(1, 3, 2, 0.6, parent=0, mutation=back),), {})
    lineage = opened()
    # The best of member 0 was its second round; in the third it has left.
    record_all(lineage, [first, second, third])
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


def test_a_mean_is_a_trial_of_its_own_with_both_parents():
    rounds = two_rounds()
    lineage = opened()
    record_all(lineage, rounds)
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


def filled(records, hp_config=HP_CONFIG):
    lineage = Lineage(open_study(InMemoryStorage(), "run"), hp_config)
    for record in records:
        lineage.record(record)
    return lineage


def test_a_trial_starts_and_ends_with_its_round():
    records = timed(make_run(size=3, rounds=2))
    for trial in filled(records).study.trials:
        record = records[trial.user_attrs["round"]]
        assert trial.datetime_start == datetime.fromtimestamp(record.started)
        assert trial.datetime_complete == datetime.fromtimestamp(record.ended)
        assert trial.duration.total_seconds() == 9.5


def test_the_mean_of_survivors_comes_after_the_last_round():
    records = timed(make_run(size=3, rounds=2))
    lineage, last = filled(records), records[-1]
    lineage.record_mean(ended_with_mean(records), last)
    trial = lineage.study.trials[-1]
    assert trial.datetime_start == trial.datetime_complete == datetime.fromtimestamp(last.ended)


def test_metrics_are_attributes_and_what_is_not_finite_is_left_out():
    (record,) = timed(make_run(size=2, rounds=1))
    metrics = {"reward": 0.5, "kl": float("nan"), "round": 7.0}
    agents = (replace(record.agents[0], metrics=metrics), *record.agents[1:])
    said = filled([replace(record, agents=agents)]).study.trials[0].user_attrs
    assert (said["train/reward"], said["train/tokens"]) == (0.5, 100)
    assert "train/kl" not in said
    # An environment may count whatever it likes: it hides nothing.
    assert (said["round"], said["train/round"]) == (0, 7.0)


def test_steps_are_numbered_through_the_run():
    records = timed(make_run(size=2, rounds=3))
    for trial in filled(records).study.trials:
        first = 3 * trial.user_attrs["round"]
        assert trial.intermediate_values == {first: 0.25, first + 2: 0.75}


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
    study = filled(records).study
    assert next(iter(optuna.importance.get_param_importances(study))) == "beta"
    # What other evaluators look at: parameters with one range in all trials.
    kept = optuna.search_space.intersection_search_space(study.get_trials())
    assert set(kept) == {"lr", "beta", "clip_coef", "group_size"}


def test_what_differs_from_the_start_is_in_the_importances_without_mutating():
    records = changed(
        timed(make_run(size=4, rounds=2)),
        lambda agent: {"hparams": agent.hparams.replace(beta=0.01 * agent.agent)},
    )
    study = filled(records, HyperparameterConfig()).study
    kept = optuna.search_space.intersection_search_space(study.get_trials())
    assert kept["beta"] == FloatDistribution(0.0, 0.03)


def test_choices_are_a_category_of_which_another_value_is_no_member(make_run):
    config = HyperparameterConfig(group_size=RLParameter(choices=[4, 8]))
    trial = one_trial(make_run, Hparams(group_size=8), config)
    assert trial.params["group_size"] == 8
    assert trial.distributions["group_size"] == CategoricalDistribution((4, 8))
    assert "group_size" not in one_trial(make_run, Hparams(group_size=6), config).params

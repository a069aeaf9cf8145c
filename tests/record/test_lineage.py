"""Optuna's side of a run: one trial per agent and round, parents that exist, failures as FAIL."""

import json
import logging
import time
from dataclasses import replace
from itertools import pairwise

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState
from shown_run import agent as recorded
from shown_run import two_rounds

from evo_grpo.errors import CheckpointError
from evo_grpo.record.family import ancestry
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.run_dir import RunDir
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter
from evo_grpo.types import Member, Mutation, Score, Slot

PROPERTY = settings(derandomize=True, deadline=None, max_examples=25)


def by_place(trials):
    return {(t.user_attrs["agent"], t.user_attrs["round"]): t for t in trials}


@pytest.fixture(scope="module")
def play():
    # The factory itself, which hypothesis may call many times: it holds no state.
    from random_runs import HP_CONFIG, make_run

    def record(*arguments, **options):
        records = make_run(*arguments, **options)
        lineage = Lineage(InMemoryStorage(), "population", HP_CONFIG)
        lineage.record_all(records)
        return records, lineage

    return record


@PROPERTY
@given(size=st.integers(2, 6), rounds=st.integers(1, 6), seed=st.integers(0, 1000))
def test_parent_links_are_closed(play, size, rounds, seed):
    records, lineage = play(size, rounds, seed, failures=0.3)
    trials = lineage.trials()
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
            values = Hparams.from_dict(parent.user_attrs["hparams"])
            for name, (old, new) in attributes["mutated"].items():
                assert values.get(name) == old
                values = values.with_value(name, new)
            assert values == agent.hparams == Hparams.from_dict(attributes["hparams"])


def test_a_trial_has_the_attributes_that_others_rely_on(play):
    records, lineage = play(4, 3)
    agent = records[2].agents[1]
    trial = by_place(lineage.trials())[1, 2]
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
    for trial in lineage.trials():
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
    lineage = Lineage(InMemoryStorage(), "population", hp_config)
    lineage.record(replace(record, agents=(agent,)))
    return lineage.trials()[0]


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
        lineage = Lineage(InMemoryStorage(), "population", hp_config)
        lineage.record(with_scores(first, [0.5, broken, 0.25]))
        states = [trial.state for trial in lineage.trials()]
        assert states == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE]
        assert lineage.trials()[1].values is None
        assert set(lineage.trials()[1].params) == set(lineage.trials()[0].params)
        lineage.record(second)
        assert lineage.study.best_value >= 0.5
    failed = replace(first.agents[0], state="failed", score=None, reason="loss is nan")
    lineage = Lineage(InMemoryStorage(), "population", hp_config)
    lineage.record(replace(first, agents=(failed,)))
    assert lineage.trials()[0].user_attrs["reason"] == "loss is nan"


def test_a_round_recorded_twice_leaves_one_trial_each(tmp_path, make_run, hp_config):
    records = make_run(size=3, rounds=3)
    journal = tmp_path / "journal.log"
    lineage = Lineage(journal, "population", hp_config)
    # A crash in the middle of a round: some of its agents have a trial, some have none.
    lineage.record(records[0])
    lineage.record(replace(records[1], agents=records[1].agents[:1]))
    again = Lineage(str(journal), "population", hp_config)
    again.record_all(records)
    again.record_all(records)
    trials = Lineage(journal, "population", hp_config).trials()
    assert sorted(by_place(trials)) == sorted((a, r) for a in range(3) for r in range(3))
    assert len(trials) == 9


def test_all_trials_are_asked_for_once_when_a_long_run_goes_on(make_run, hp_config, monkeypatch):
    """Asked for every round, they would make a resume slower with the square of its rounds."""
    records = make_run(size=3, rounds=12, failures=0.2)
    storage = InMemoryStorage()
    Lineage(storage, "population", hp_config).record_all(records[:-1])
    lineage = Lineage(storage, "population", hp_config)
    get_trials, asked = lineage.study.get_trials, []

    def counted(*arguments, **options):
        asked.append(1)
        return get_trials(*arguments, **options)

    monkeypatch.setattr(lineage.study, "get_trials", counted)
    lineage.record_all(records[:-1])
    assert len(asked) == 1
    lineage.record(records[-1])
    assert len(asked) == 2
    assert len(lineage.trials()) == 36


def test_a_run_holds_an_outline_of_its_trials_and_the_journal_has_them_whole(
    tmp_path, make_run, hp_config
):
    """Held whole, they would be most of what a long run's memory grows by."""
    records = make_run(size=3, rounds=4, failures=0.2)
    whole = Lineage(InMemoryStorage(), "population", hp_config)
    whole.record_all(records)
    lineage = Lineage(tmp_path / "journal.log", "population", hp_config)
    lineage.record_all(records)
    for ours in (lineage, Lineage(tmp_path / "journal.log", "population", hp_config)):
        for held, read, expected in zip(
            ours.study.get_trials(), ours.trials(), whole.trials(), strict=True
        ):
            assert (held.number, held.state, held.value) == (
                expected.number,
                expected.state,
                expected.value,
            )
            assert set(held.user_attrs) == {"agent", "round", "member"}
            assert (held.params, held.distributions) == ({}, {})
            assert (read.user_attrs, read.params, read.distributions) == (
                expected.user_attrs,
                expected.params,
                expected.distributions,
            )


def test_a_new_trial_of_another_writer_is_seen(make_run, hp_config):
    records = make_run(size=2, rounds=2)
    storage = InMemoryStorage()
    ours = Lineage(storage, "population", hp_config)
    ours.record(records[0])
    Lineage(storage, "population", hp_config).record(records[1])
    ours.record(records[1])
    assert len(ours.trials()) == 4


def test_records_read_back_from_a_run_give_the_same_trials(tmp_path, make_run, hp_config):
    records = make_run(size=3, rounds=3, failures=0.4)
    with RunDir.create(tmp_path / "run", "population", "name: x\n") as run:
        Lineage(run.journal, "population", hp_config).record_all(records)
        for record in records:
            run.append_round(record)
    fresh = Lineage(InMemoryStorage(), "population", hp_config)
    with RunDir.open(tmp_path / "run") as run:
        fresh.record_all(run.rounds())
        kept = Lineage(run.journal, "population", hp_config).trials()
    for one, other in zip(kept, fresh.trials(), strict=True):
        assert (one.user_attrs, one.params, one.values) == (
            other.user_attrs,
            other.params,
            other.values,
        )


@PROPERTY
@given(size=st.integers(2, 4), rounds=st.integers(1, 5), seed=st.integers(0, 1000))
def test_what_was_recorded_does_not_differ(play, size, rounds, seed):
    records, lineage = play(size, rounds, seed, failures=0.3)
    assert lineage.differing(records) == []
    last = records[-1]
    assert Lineage(InMemoryStorage(), "other").differing(records) == [
        (agent.agent, agent.round) for record in records[:-1] for agent in record.agents
    ]
    other = replace(last.agents[0], tokens=7, seed=last.agents[0].seed + 1)
    changed = [*records[:-1], replace(last, agents=(other, *last.agents[1:]))]
    assert lineage.differing(changed) == [(other.agent, other.round)]


def test_a_missing_round_is_named(make_run, hp_config):
    records = make_run(size=2, rounds=2)
    lineage = Lineage(InMemoryStorage(), "population", hp_config)
    with pytest.raises(CheckpointError, match=r"in round 1, since agent 0 of round 2.*record_all"):
        lineage.record(records[1])
    assert lineage.trials() == []


def test_a_torn_journal_line_is_dropped_and_written_again(tmp_path, make_run, hp_config):
    records = make_run(size=2, rounds=2)
    journal = tmp_path / "journal.log"
    Lineage(journal, "population", hp_config).record_all(records)
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-30])
    lineage = Lineage(journal, "population", hp_config)
    assert len(lineage.trials()) == 3
    lineage.record_all(records)
    assert len(Lineage(journal, "population", hp_config).trials()) == 4


def test_a_damaged_journal_is_named_with_the_way_out(tmp_path, make_run, hp_config):
    journal = tmp_path / "journal.log"
    Lineage(journal, "population", hp_config).record_all(make_run(size=2, rounds=2))
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:2], b"{broken\n", *lines[3:]]))
    with pytest.raises(CheckpointError, match=r"journal.log: .*damaged.*anew from rounds"):
        Lineage(journal, "population", hp_config)


def test_a_lock_whose_process_died_is_not_waited_for_without_end(
    tmp_path, make_run, hp_config, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (record,) = make_run(size=2, rounds=1)
    # The folder was moved after the death of its process: the link points to nothing.
    (tmp_path / "journal.log.lock").symlink_to(tmp_path / "gone" / "journal.log")
    start = time.monotonic()
    lineage = Lineage("journal.log", "population", hp_config)
    lineage.record(record)
    assert time.monotonic() - start < 3
    # It points to the journal, and nobody is there to remove it.
    monkeypatch.setattr("evo_grpo.record.journal._GRACE_SECONDS", 3)
    (tmp_path / "journal.log.lock").symlink_to(tmp_path / "journal.log")
    lineage = Lineage("journal.log", "again", hp_config)
    lineage.record(record)
    assert len(lineage.trials()) == 2


def test_optuna_says_nothing_and_its_logging_stays_as_it_was(tmp_path, make_run, capfd, hp_config):
    logger = logging.getLogger("optuna")
    before = (logger.level, list(logger.handlers), [list(h.filters) for h in logger.handlers])
    for _ in range(2):  # made, and opened again
        Lineage(tmp_path / "journal.log", "population", hp_config).record_all(make_run(rounds=2))
    after = (logger.level, list(logger.handlers), [list(h.filters) for h in logger.handlers])
    assert before == after
    assert capfd.readouterr() == ("", "")


def test_a_survivor_that_mutated_goes_on_from_its_former_self(make_run, hp_config):
    first, second = make_run(size=2, rounds=2)
    hparams = first.agents[0].hparams.with_value("lr", 2e-3)
    mutation = Mutation("mutate", {"lr": (first.agents[0].hparams.lr, 2e-3)})
    child = replace(second.agents[0], member=7, parent=0, hparams=hparams, mutation=mutation)
    lineage = Lineage(InMemoryStorage(), "population", hp_config)
    lineage.record_all([first, replace(second, agents=(child,))])
    attributes = lineage.trials()[-1].user_attrs
    assert attributes["parent_trial"] == 0
    assert attributes["op"] == "mutate"
    assert attributes["mutated"] == {"lr": [first.agents[0].hparams.lr, 2e-3]}


def test_a_parent_that_lives_on_is_met_in_the_round_before_the_birth(play):
    for seed in range(10):
        records, lineage = play(4, 4, seed)
        trials = lineage.trials()
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
    lineage = Lineage(InMemoryStorage(), "one")
    # The best of member 0 was its second round; in the third it has left.
    lineage.record_all([first, second, third])
    trial = lineage.trials()[-1]
    assert trial.user_attrs["op"] == op
    assert trial.user_attrs["mutated"] == {"lr": [1e-3, 5e-4]}
    parent = lineage.trials()[trial.user_attrs["parent_trial"]].user_attrs
    assert (parent["member"], parent["round"]) == (0, 1)
    assert [one.round for one in ancestry([first, second, third], 3)] == [0, 1, 2]


def test_a_mean_is_a_trial_of_its_own_with_both_parents():
    rounds = two_rounds()
    lineage = Lineage(InMemoryStorage(), "one")
    lineage.record_all(rounds)
    mean = Member(3, Slot(4), 2, 2, Mutation("mean"), 0)
    for _ in range(2):  # a resume records it again
        lineage.record_mean(mean, rounds[-1], Score(0.8, 0.05, 64))
    assert len(lineage.trials()) == 5
    trial = lineage.trials()[-1]
    attributes = trial.user_attrs
    assert trial.values == [0.8]
    assert (attributes["op"], attributes["round"]) == ("mean", 2)
    assert (attributes["parent"], attributes["second_parent"]) == (2, 0)
    assert lineage.trials()[attributes["parent_trial"]].user_attrs["member"] == 2
    lineage.record_mean(replace(mean, id=9), rounds[-1], None)  # nothing was compared
    assert len(lineage.trials()) == 5

"""The final comparison: who takes part, how a mean is made, and which one is judged."""

import json
import math
from dataclasses import replace

import pytest
import torch
from small_run import SETTINGS, small, stopped_and_resumed

from evo_grpo import run
from evo_grpo.errors import RunFailedError
from evo_grpo.population.steps import RunWriter
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.observer import Observer
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.record.summary import read_summary
from evo_grpo.training import judge
from evo_grpo.training.assemble import prepare
from evo_grpo.training.judge import (
    Choice,
    Finalist,
    best_finalist,
    candidates_summary,
    choose,
    finalists,
)
from evo_grpo.training.run import play_rounds
from evo_grpo.types import Decision, Member, Score, Slot


def played(**changes):
    """A finished population of two relatives, with its archive."""
    config = small(
        population__size=2,
        population__rounds=2,
        evolve__archive=True,
        evolve__selection="none",
        evolve__exploration="none",
        **changes,
    )
    prepared, rounds = prepare(config), []
    slots = play_rounds(prepared, prepared.slots, rounds, writer=RunWriter(), observer=Observer())
    assert slots == prepared.slots
    return config, prepared, rounds


def behind_its_archive():
    """The same, where fresh draws have left the best agent of the first round in the archive."""
    _, prepared, rounds = played()
    *earlier, last = rounds
    kept = earlier[0].agents[0].member
    return prepared, [*earlier, replace(last, archived=(0, kept))]


def tensors(cohort, slot):
    return [p.detach().clone() for p in cohort.slots.parameters(cohort.agents[slot].adapter)]


def test_best_archive_and_mean_of_relatives_take_part():
    _, prepared, rounds = played()
    cohort = prepared.cohort
    # A copy of member 0 that trained on; and a better past.
    first, second = rounds[-1].agents
    child = AgentRecord(
        **{**vars(second), "member": 7, "parent": first.member, "score": Score(0.2, 0.1, 6)}
    )
    parent = AgentRecord(**{**vars(first), "score": Score(0.5, 0.1, 6)})
    earlier = AgentRecord(**{**vars(rounds[0].agents[0]), "score": Score(0.9, 0.1, 6)})
    cohort.agents[second.agent].member = Member(7, second.agent, first.member, 1)
    staying = tuple(cohort.agents[one.agent].member for one in (first, second))
    records = [
        RoundRecord(0, (earlier, rounds[0].agents[1]), {}),
        RoundRecord(1, (parent, child), {}, members=staying),
    ]
    free = cohort.next_member
    found = finalists(cohort, records)
    assert [one.kind for one in found] == ["last", "archive", "mean"]
    last, archive, mean = found
    assert (last.slot, last.fitness) == (first.agent, 0.5)
    assert archive.slot == cohort.archive.slot
    assert (archive.agent, archive.fitness) == (earlier.agent, 0.9)
    assert mean.agent is None
    assert (mean.member.parent, mean.member.second_parent) == (first.member, 7)
    assert mean.member.mutation.op == "mean"
    assert mean.member.id == free
    pairs = zip(
        tensors(cohort, mean.slot),
        tensors(cohort, first.agent),
        tensors(cohort, second.agent),
        strict=True,
    )
    for middle, one, other in pairs:
        assert torch.allclose(middle, (one + other) / 2)
        assert not torch.equal(one, other)


def test_the_mean_of_a_resumed_run_is_that_of_one_that_was_not_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(judge, "founder_of", lambda rounds, member: 0)
    fitness = {**SETTINGS["evolve"]["fitness"], "final_samples": 1}
    config = small(population__rounds=2, evolve__fitness=fitness, evolve__significance=0.5)
    whole = run(config, out=tmp_path / "whole")
    resumed = stopped_and_resumed(config, tmp_path / "run", ("learn", 1))
    members = []
    for folder in (whole, resumed):
        best = json.loads((folder / "summary.json").read_text())["best"]
        assert best["kind"] == "mean"
        attributes = json.loads((folder / best["checkpoint"] / "attributes.json").read_text())
        members.append(attributes["member"])
    assert members[0] == members[1]


def test_agents_without_a_common_ancestor_have_no_mean():
    prepared, rounds = behind_its_archive()
    assert [one.kind for one in finalists(prepared.cohort, rounds)] == ["last", "archive"]


def test_an_archive_that_the_best_agent_has_entered_is_no_finalist_of_its_own():
    _, prepared, rounds = played()
    assert rounds[-1].archived == (1, rounds[-1].agents[0].member)
    assert [one.kind for one in finalists(prepared.cohort, rounds)] == ["last"]


def test_the_best_on_validation_is_taken_and_the_first_of_equals():
    prepared, rounds = behind_its_archive()
    settings = prepared.round_settings
    fitness = settings.evolve.fitness.replace(final_samples=2)
    settings = replace(settings, evolve=settings.evolve.replace(fitness=fitness))
    found = finalists(prepared.cohort, rounds)
    twice = [found[0], found[0]]
    choice = choose(replace(prepared, round_settings=settings), twice)
    assert choice.best is twice[0]
    assert choice.scores[0] == choice.scores[1]
    assert 2 * 6 * 2 <= choice.tokens <= 2 * 6 * 2 * 4  # two finalists, six prompts, two samples
    choice = choose(prepared, found)
    assert (choice.best, set(choice.scores)) == (found[0], {None}), "0 samples compare nothing"
    assert choice.tokens == 0


def test_a_finalist_that_cannot_be_told_from_the_winner_ties():
    _, prepared, rounds = played()
    (one,) = finalists(prepared.cohort, rounds[:1])
    near, far = replace(one, kind="archive"), replace(one, kind="mean")
    prompts = {"won": (1.0,) * 6, "near": (1.0,) * 5 + (0.0,), "far": (0.0,) * 6}
    scores = [Score(sum(p) / 6, 0.1, 6, p) for p in prompts.values()]
    found = candidates_summary([one, near, far], Choice(one, scores))
    assert [candidate["tie"] for candidate in found] == [None, True, False]
    # Neither the choice, one-sided and at `evolve.significance`, nor a greater mean is a claim.
    found = candidates_summary([one, far], Choice(far, [scores[2], scores[2]]))
    assert [candidate["tie"] for candidate in found] == [True, None]
    found = candidates_summary([one, far], Choice(far, [scores[0], scores[2]]))
    assert [candidate["tie"] for candidate in found] == [True, None], "the winner is behind it"
    four = Score(4 / 6, 0.1, 6, (1.0,) * 4 + (0.0,) * 2)
    found = candidates_summary([one, near], Choice(near, [scores[2], four]))
    assert best_finalist([one, near], [scores[2], four], 0.1) == 1
    assert found[0]["tie"] is True
    assert [c["tie"] for c in candidates_summary([one, near], Choice(one, [None, None]))] == [
        None,
        None,
    ]


def test_a_mean_wins_unless_another_finalist_is_significantly_better_and_the_archive_comes_last():
    def finalist(kind):
        return Finalist(kind, Slot(0), Member(0, Slot(0)), Slot(0), 0.5, None)

    def score(right):
        return Score(right / 40, 0.1, 40, (1.0,) * right + (0.0,) * (40 - right))

    def winner(*right, level=0.1):
        return best_finalist(three, [score(r) for r in right], level)

    last, archive, mean = range(3)
    three = [finalist(kind) for kind in ("last", "archive", "mean")]
    assert winner(20, 20, 20) == mean
    assert winner(21, 22, 19) == mean
    assert winner(30, 31, 20) == last, "the archive is ahead of the mean, but not of the last"
    assert winner(20, 30, 20) == archive
    assert winner(30, 40, 20) == archive
    assert winner(20, 21, 19, level=None) == archive
    assert best_finalist(three[:2], [score(20), score(21)], 0.1) == last
    lost = Score(float("nan"), float("nan"), 0, ())
    assert best_finalist(three, [lost, score(3), lost], 0.1) == archive
    assert best_finalist(three[1:2], [score(3)], 0.1) == 0


def test_a_last_round_in_which_all_failed_leaves_the_archive_or_says_so():
    _, prepared, rounds = played()
    failed = [
        AgentRecord(**{**vars(agent), "score": None, "state": "failed"})
        for agent in rounds[1].agents
    ]
    records = [rounds[0], RoundRecord(1, tuple(failed), {})]
    assert [one.kind for one in finalists(prepared.cohort, records)] == ["archive"]
    prepared.cohort.archive = None
    with pytest.raises(RunFailedError, match="expected an agent with a finite fitness"):
        finalists(prepared.cohort, records)


def test_the_best_of_the_last_round_takes_no_part_where_it_collapsed():
    _, prepared, rounds = played()
    first, second = rounds[-1].agents
    best = AgentRecord(**{**vars(first), "score": Score(0.9, 0.1, 6)})
    collapsed = Decision("collapsed", first.agent, None, math.nan, math.nan, 0, "it collapsed")
    last = replace(rounds[-1], agents=(best, second), decisions=(collapsed,))
    records = [rounds[0], last]
    found = finalists(prepared.cohort, records)
    assert [(one.kind, one.agent) for one in found] == [
        ("last", second.agent),
        ("archive", first.agent),
    ]


def test_a_mean_that_wins_is_saved_and_recorded(tmp_path, monkeypatch):
    def means_win(prepared, candidates):
        scores = [Score(float(one.kind == "mean"), 0.1, 6, (0.0,) * 6) for one in candidates]
        return Choice(candidates[-1], scores)

    monkeypatch.setattr("evo_grpo.training.judge.choose", means_win)
    config = small(
        population__size=2,
        evolve__exploration="none",
        evolve__archive=True,
        population__init=[{"lr": 1e-2}, {"lr": 1e-4}],
        evolve__hyperparameters={"lr": {"min": 1e-5, "max": 1e-1}},
        evolve__significance=None,
    )
    folder = run(config, out=tmp_path / "run")
    best = read_summary(folder)["best"]
    rounds = read_rounds(folder)
    assert best["kind"] == "mean"
    assert best["checkpoint"] == "checkpoints/mean"
    assert len(best["parents"]) == 2
    assert set(best["parents"]) == {agent.member for agent in rounds[-1].agents}
    saved = json.loads((folder / best["checkpoint"] / "attributes.json").read_text())
    assert saved["member"]["second_parent"] == best["parents"][1]
    assert (folder / best["checkpoint"] / "actor" / "adapter_model.safetensors").is_file()

"""summary.json as it was written, or an error that names the field."""

import copy
import json
from dataclasses import replace

import pytest
from shown_run import SUMMARY, candidate, mean_won, two_rounds

from evo_grpo.errors import CheckpointError
from evo_grpo.record.story import rivals_text
from evo_grpo.record.summary import (
    gain_interval,
    gain_sign,
    read_summary,
    rivals_of,
    winner_of,
    winning_lines,
)


def changed(path, value):
    summary = copy.deepcopy(SUMMARY)
    place = summary
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return summary


def test_there_is_none_before_the_end(tmp_path):
    assert read_summary(tmp_path) is None


@pytest.mark.parametrize("summary", [SUMMARY, mean_won(), changed(("best", "se"), None)])
def test_it_comes_back(tmp_path, summary):
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert read_summary(tmp_path) == summary


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is not JSON"),
        ("{", "it is not JSON"),
        ("[" * 3000, "it is not JSON"),
        ("[]", r"a mapping, got \[\]"),
        ("null", "a mapping, got None"),
        ("{}", "split: field required"),
        (json.dumps(changed(("base",), [])), "base: .*got \\[\\]"),
        (json.dumps(changed(("best", "member"), "2")), "best.member: .*valid integer, got '2'"),
        (json.dumps(changed(("best", "kind"), "first")), "best.kind: input should be .*'first'"),
        (json.dumps(changed(("best", "agent"), None)), "best: expected an agent"),
        (json.dumps(changed(("best", "checkpoint"), "../x")), "below the folder, got '../x'"),
        (json.dumps(changed(("files",), {"/etc/passwd": ""})), "below the folder"),
        (json.dumps(changed(("candidates", 0, "tie"), "no")), r"candidates\[0\].tie: .*got 'no'"),
    ],
)
def test_damage_is_named_with_its_field(tmp_path, text, message):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"summary.json: .*{message}.*; delete it, then"):
        read_summary(tmp_path)


@pytest.mark.parametrize(("better", "sign"), [(4, 0), (6, 1), (-6, -1)])
def test_a_gain_is_claimed_by_the_test_and_not_by_its_interval(better, sign):
    """Four of 256 prompts have p = 1/8, and a Student interval that excludes zero."""
    rewards = [float(n < abs(better)) for n in range(256)]
    scores = [{"mean": sum(r) / 256, "se": 0.01, "n": 256, "per_prompt": r} for r in
              (rewards, [0.0] * 256)]  # fmt: skip
    names = ("best", "base") if better > 0 else ("base", "best")
    gain = better / 256
    summary = {**SUMMARY, **dict(zip(names, scores, strict=True)), "gain": gain, "gain_se": 0.006}
    assert gain_interval(summary)[0] > 0 or better < 0
    assert gain_sign(summary) == sign


def played(lines):
    return [[(one.round, one.agent) for one in line] for line in lines]


def test_a_line_leads_from_the_first_round_to_the_winner():
    rounds = two_rounds()
    assert played(winning_lines(rounds, SUMMARY["best"])) == [[(0, 0), (1, 1)]]
    assert played(winning_lines(rounds, mean_won()["best"])) == [
        [(0, 0), (1, 1)],
        [(0, 0), (1, 0)],
    ]
    # That of the best ever ends where it was the best.
    first = rounds[0].agents[0]
    better = replace(first, score=replace(first.score, mean=0.9))
    rounds[0] = replace(rounds[0], agents=(better, rounds[0].agents[1]))
    best = {**SUMMARY["best"], "kind": "archive", "agent": 0, "member": 0}
    assert played(winning_lines(rounds, best)) == [[(0, 0)]]
    winner = winner_of(rounds, {**SUMMARY, "best": best})
    assert (winner.name, winner.fitness.mean) == ("agent 0 as it was after round 1", 0.9)


def test_a_winner_has_its_scores_each_with_its_prompts():
    winner = winner_of(two_rounds(), SUMMARY)
    assert (winner.name, winner.member) == ("agent 1", 2)
    assert (winner.fitness.mean, winner.fitness.n) == (0.75, 64)
    assert winner.final is None
    assert (winner.test.mean, winner.test.se, winner.test.n) == (0.807, 0.02, 256)
    assert rivals_of(two_rounds(), SUMMARY) == ()
    winner = winner_of(two_rounds(), mean_won())
    assert (winner.name, winner.fitness) == ("the mean of agents 1 and 0", None)
    assert (winner.final.mean, winner.final.n) == (0.72, 64)
    assert winner_of([], None) is None
    leader = winner_of(two_rounds(), None)
    assert (leader.kind, leader.agent, leader.test, leader.final) == ("last", 1, None, None)


ARCHIVE = candidate("archive", 0, 0, [], 0.8, tie=True)


@pytest.mark.parametrize(
    ("candidates", "text"),
    [
        (
            mean_won()["candidates"],
            "0.70 (agent 1, a tie) and 0.60 (agent 0 as it was after round 2)",
        ),
        # The best ever may be the same member as the best of the last round.
        (
            [candidate("last", 1, 2, [0], 0.7), candidate("archive", 1, 2, [0], 0.6, tie=True)],
            "0.60 (agent 1 as it was after round 2, a tie)",
        ),
        (
            [candidate("last", 1, 2, [0], 0.7), ARCHIVE],
            "0.80 (agent 0 as it was after round 2, not significantly ahead)",
        ),
        (
            [candidate("last", 1, 2, [0], 0.7), candidate("mean", None, 3, [2, 0], None)],
            "no finite score (the mean of agents 1 and 0)",
        ),
    ],
)
def test_finalists_that_lost_are_named_with_their_scores(candidates, text):
    summary = mean_won() if len(candidates) == 3 else SUMMARY
    summary = {**summary, "candidates": candidates}
    rivals = rivals_of(two_rounds(), summary)
    assert rivals_text(winner_of(two_rounds(), summary), rivals) == text

"""The winner of a run, from its records and its summary."""

from dataclasses import replace

from shown_run import SUMMARY, candidate, mean_won, two_rounds

from evo_grpo.record.winner import finalist_name, other_finalists, winning_lines


def played(lines):
    return [[(one.round, one.agent) for one in line] for line in lines]


def test_a_line_leads_from_the_first_round_to_the_winner():
    rounds = two_rounds()
    assert played(winning_lines(rounds, SUMMARY["best"])) == [[(0, 0), (1, 1)]]
    assert played(winning_lines(rounds, mean_won()["best"])) == [
        [(0, 0), (1, 1)],
        [(0, 0), (1, 0)],
    ]


def test_the_line_of_the_best_ever_ends_where_it_was_the_best():
    rounds = two_rounds()
    first = rounds[0].agents[0]
    better = replace(first, score=replace(first.score, mean=0.9))
    rounds[0] = replace(rounds[0], agents=(better, rounds[0].agents[1]))
    best = {**SUMMARY["best"], "kind": "archive", "agent": 0, "member": 0}
    assert played(winning_lines(rounds, best)) == [[(0, 0)]]
    assert finalist_name(rounds, best) == "agent 0 as it was after round 1"


def test_finalists_are_compared_where_there_are_several():
    rounds = two_rounds()
    assert finalist_name(rounds, SUMMARY["best"]) == "agent 1"
    assert other_finalists(rounds, SUMMARY) is None
    own, others = other_finalists(rounds, mean_won())
    assert own["mean"] == 0.72
    assert others == "0.70 (agent 1, a tie) and 0.60 (agent 0 as it was after round 2)"


def test_the_best_ever_may_be_the_same_member_as_the_best_of_the_last_round():
    rounds = two_rounds()
    candidates = [candidate("last", 1, 2, [0], 0.7), candidate("archive", 1, 2, [0], 0.6, tie=True)]
    own, others = other_finalists(rounds, {**SUMMARY, "candidates": candidates})
    assert own["mean"] == 0.7
    assert others == "0.60 (agent 1 as it was after round 2, a tie)"


def test_a_best_ever_that_is_ahead_and_did_not_win_is_explained():
    candidates = [candidate("last", 1, 2, [0], 0.7), candidate("archive", 0, 0, [], 0.8, tie=True)]
    _, others = other_finalists(two_rounds(), {**SUMMARY, "candidates": candidates})
    assert others == "0.80 (agent 0 as it was after round 2, not significantly ahead)"


def test_a_finalist_without_a_finite_score_is_said_to_have_none():
    candidates = [candidate("last", 1, 2, [0], 0.7), candidate("mean", None, 3, [2, 0], None)]
    _, others = other_finalists(two_rounds(), {**SUMMARY, "candidates": candidates})
    assert others == "no finite score (the mean of agents 1 and 0)"

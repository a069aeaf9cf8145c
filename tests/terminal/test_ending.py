"""What a run ends with, in sentences."""

import io
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.console import Console
from shown_run import SUMMARY, agent, candidate, mean_won, two_rounds

from evo_grpo.record.winner import winning_lines
from evo_grpo.schema.hparams import Hparams
from evo_grpo.terminal.ending import ending, result_line, schedule_line, show_ending
from evo_grpo.types import Mutation


def sentences(summary, rounds=None):
    return [str(line) for line in ending(rounds or two_rounds(), summary)]


def test_the_winner_alone():
    won, optimistic, share, test, schedule = sentences(SUMMARY)
    assert won == "agent 1 won: it was the best of the last round, at 0.75"
    assert optimistic.startswith("a winner's validation score is optimistic")
    # Agent 1's last round, and the first of agent 0, which it was copied from.
    assert share == (
        "the winner's line of ancestors trained on 50% of all training tokens (2,000 of 4,000)"
    )
    assert test == "base 0.33 -> best 0.81 ± 0.02 (+0.48 ± 0.03) on 256 test prompts"
    assert schedule == "schedule: lr 0.001 → 0.0012"


def test_a_mean_has_two_lines_of_ancestors_and_ties():
    won, _, share, *_ = sentences(mean_won())
    assert won == (
        "the mean of agents 1 and 0 won the final comparison: 0.72 against 0.70 (agent 1, a tie) "
        "and 0.60 (agent 0 as it was after round 2) on 64 validation prompts"
    )
    # Both rounds of agent 0 and the last of agent 1: what they share counts once.
    assert "75% of all training tokens (3,000 of 4,000)" in share


def test_the_best_ever_counts_up_to_its_best_round():
    rounds = two_rounds()
    better = replace(rounds[0].agents[0], score=replace(rounds[0].agents[0].score, mean=0.9))
    rounds[0] = replace(rounds[0], agents=(better, rounds[0].agents[1]))
    best = {**SUMMARY["best"], "kind": "archive", "agent": 0, "member": 0, "parents": []}
    candidates = [candidate("last", 1, 2, [0], 0.7), candidate("archive", 0, 0, [], 0.8)]
    won, _, share, *_ = sentences({**SUMMARY, "best": best, "candidates": candidates}, rounds)
    assert won.startswith("agent 0 as it was after round 1 won the final comparison: 0.80 against")
    assert "25% of all" in share
    assert [[one.round for one in line] for line in winning_lines(rounds, best)] == [[0]]


def test_a_run_that_was_not_judged_names_the_best_by_validation():
    best, optimistic = sentences(None)
    assert best == "agent 1 is the best by validation: 0.75"
    assert optimistic.startswith("a winner's")


def test_errors_that_are_not_known_are_left_out():
    best = {**SUMMARY["best"], "se": None, "n": 1}
    text = result_line({**SUMMARY, "best": best, "gain_se": None})
    assert text == "base 0.33 -> best 0.81 (+0.48) on 1 test prompt"


@pytest.mark.parametrize(
    ("lrs", "text"),
    [
        ([1e-3, 1e-3], "schedule: lr 0.001, which never moved"),
        ([1e-3, 8.5e-4, 8.5e-4], "schedule: lr 0.001 → 0.00085"),
        (
            [1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3, 7e-3],
            "schedule: lr 0.001 → 0.002 → 0.003 → 0.004 → … → 0.007",
        ),
    ],
)
def test_a_schedule_shows_what_moved(lrs, text):
    line = [agent(0, 0, 0, 0.5, hparams=Hparams(lr=lrs[0]))]
    for number, (old, new) in enumerate(pairwise(lrs), start=1):
        changes = {"lr": (old, new)} if old != new else {}
        line.append(
            agent(0, 0, number, 0.5, hparams=Hparams(lr=new), mutation=Mutation("mutate", changes))
        )
    assert schedule_line(line, ["lr"]) == text


def test_a_schedule_names_a_clip_range_once_and_nothing_where_nothing_may_mutate():
    moved = Mutation("mutate", {"clip_high": (1.2, 1.3)})
    line = [
        agent(0, 0, 0, 0.5, hparams=Hparams(lr=1e-3, clip_coef=(0.8, 1.2))),
        agent(0, 1, 1, 0.5, hparams=Hparams(lr=1e-3, clip_coef=(0.8, 1.3)), mutation=moved),
    ]
    assert schedule_line(line, ["clip_low", "clip_high"]) == "schedule: clip 0.8:1.2 → 0.8:1.3"
    assert schedule_line(line[:1], []) == "schedule: no hyperparameter may mutate"


def test_a_terminal_wraps_between_words_and_a_pipe_does_not():
    terminal = Console(file=io.StringIO(), force_terminal=True, width=50, color_system=None)
    show_ending(terminal, two_rounds(), mean_won(), "runs/one")
    lines = terminal.file.getvalue().splitlines()
    assert all(len(line.rstrip()) <= 50 for line in lines)
    pipe = Console(file=io.StringIO(), width=50)
    show_ending(pipe, two_rounds(), mean_won(), "runs/one")
    assert sentences(mean_won())[0] in pipe.file.getvalue().splitlines()

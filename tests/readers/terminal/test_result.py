"""The leaderboard as a table, the family as a tree."""

import io
from dataclasses import replace

import pytest
from rich.console import Console
from shown_replay import BETTER, ROUNDS, replay, schedule
from shown_run import SUMMARY, agent, comparison, mean_won, two_rounds

from evo_grpo.readers.terminal.result import (
    TROUBLES_SHOWN,
    cell,
    family_tree,
    leaderboard_table,
    schedule_table,
    schedule_title,
    show_arms,
    show_ending,
    show_next,
)
from evo_grpo.record.arms import comparison_arms
from evo_grpo.record.leaderboard import leaderboard_rows
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.view import RunView
from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Member, Mutation, Score, Slot


def scored(slot: int, round: int, fitness: float | None, prompts: tuple[float, ...]):
    made = agent(slot, slot, round, fitness)
    return made if made.score is None else replace(made, score=Score(fitness, 0.042, 6, prompts))


def rows(width: int) -> list[str]:
    """Four agents: the first and its tie, one that is behind, one that left after round 1."""
    good, near, far = (1.0,) * 6, (1.0,) * 5 + (0.0,), (0.0,) * 6
    first = [scored(0, 0, 0.5, good), scored(1, 0, 0.4, near), scored(2, 0, 0.2, far)]
    last = [scored(0, 1, 0.86, good), scored(1, 1, 0.8, near), scored(2, 1, 0.1, far)]
    rounds = [
        RoundRecord(0, (*first, scored(3, 0, 0.9, good)), {}),
        RoundRecord(1, tuple(last), {}),
    ]
    console = Console(file=io.StringIO(), width=width)
    console.print(leaderboard_table(leaderboard_rows(rounds), width))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 200])
def test_ties_errors_and_those_that_left_are_told(width: int):
    header, first, tie, behind, left = rows(width)
    assert header.split()[:2] == ["rank", "agent"]
    assert not {"round", "left", "tie", "fitness_se"} & set(header.split())
    assert first.split()[:2] == ["1", "0"]
    assert "0.86 ±0.04" in first
    assert tie.split()[:3] == ["2", "tie", "1"]
    assert behind.split()[:2] == ["3", "2"]
    # It was better than the others are now, and still comes last: it has not trained since.
    assert left.split()[:2] == ["4", "3"]
    assert left.endswith("left after round 1")
    assert ("member" in header) == (width >= 120)
    assert ("checkpoint" in header) == (width >= 200)


def branches(rounds, summary=None) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    console.print(family_tree(RunView("run", rounds, summary=summary)))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_mean_that_won_is_the_last_branch_and_the_best():
    lines = branches(two_rounds(), mean_won())
    assert lines[0] == "run: 3 members in 2 rounds"
    assert lines[-1] == (
        "└── member 3  mean of members 2 and 0 (agents 1 and 0), final comparison  0.720  "
        "winner, test 0.807"
    )
    assert sum("winner" in line for line in lines) == 1


def test_the_winner_of_the_summary_is_the_best():
    def best(summary):
        lines = branches(two_rounds(), summary)
        (line,) = [line for line in lines if line.endswith("best") or "winner" in line]
        return line

    assert best(None).endswith("best")
    assert "member 2 " in best(None)
    assert best(SUMMARY).endswith("winner, test 0.807")
    archive = {**SUMMARY["best"], "kind": "archive", "agent": 0, "member": 0, "parents": []}
    assert "member 0 " in best({**SUMMARY, "best": archive})
    assert "winner after round 2, test 0.807" in best({**SUMMARY, "best": archive})


@pytest.mark.parametrize("width", [80, 120])
def test_the_three_scores_of_a_winner_have_columns_of_their_own(width: int):
    console = Console(file=io.StringIO(), width=width)
    console.print(leaderboard_table(leaderboard_rows(two_rounds(), mean_won()), width))
    header, first, second, _ = (line.split() for line in console.file.getvalue().splitlines())
    place = header.index("fitness")
    assert header[place : place + 3] == ["fitness", "final", "test"]
    assert first[1] == "mean"
    assert first[place : place + 6] == ["0.72", "±0.03", "0.72", "±0.03", "0.81", "±0.02"]
    assert second[1:3] == ["tie", "1"]
    assert second[place + 1 : place + 6] == ["0.75", "±0.05", "0.70", "±0.03", "-"]


def test_a_restored_member_is_named_so():
    rounds = two_rounds()
    back = Mutation("restore", {"lr": (1e-3, 5e-4)})
    members = (rounds[1].agents[0], replace(rounds[1].agents[1], mutation=back))
    lines = branches([rounds[0], replace(rounds[1], agents=members)])
    assert any("restored, lr 1e-3 -> 5e-4" in line for line in lines)
    unmoved = (members[0], replace(members[1], mutation=Mutation("restore")))
    assert any(
        "  restored" in line for line in branches([rounds[0], replace(rounds[1], agents=unmoved)])
    )


@pytest.mark.parametrize("width", [70, 80])
def test_a_narrow_leaderboard_goes_without_what_is_alike_and_cuts_nothing(width: int):
    names = ("lr", "group_size", "temperature", "top_p")
    values = [(1e-3, 8, 1.0, 1.0), (2.82e-3, 16, 0.564, 0.95), (1e-4, 12, 1.17, 0.9)]
    agents = [
        replace(scored(slot, 0, 0.5, ()), hparams=Hparams(**dict(zip(names, own, strict=True))))
        for slot, own in enumerate(values)
    ]
    there = (Member(0, Slot(0)), Member(1, Slot(1)))
    record = RoundRecord(0, tuple(agents), {}, there, mutable=names)
    console = Console(file=io.StringIO(), width=width)
    console.print(leaderboard_table(leaderboard_rows([record]), width))
    text = console.file.getvalue()
    assert "…" not in text
    assert "beta" not in text  # it is 0 for all
    for shown in ("lr", "group", "temperature", "top_p", "2.82e-3", "0.564"):
        assert shown in text
    assert ("left after round 1" if width == 80 else "left in 1") in text


def test_an_agent_of_the_front_is_marked_in_words():
    assert (cell("front", True), cell("front", False)) == ("yes", "no")


def console(width=80, terminal=True):
    return Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=width,
        color_system=None,
        highlight=False,
        _environ={"TERM": "xterm"},
    )


def view(summary, rounds=None, **more):
    return RunView("run", rounds or two_rounds(), summary=summary, **more)


def shown(summary, rounds=None, width=80, terminal=True, **more):
    screen = console(width, terminal)
    show_ending(screen, view(summary, rounds, **more))
    return screen.file.getvalue().splitlines()


def test_a_story_has_a_paragraph_for_each_thing_it_tells():
    lines = shown(SUMMARY, width=300)
    assert lines[0] == ""
    assert lines[1].split()[0] == "rank"
    result, winner, validation, share = lines[5:]
    assert result.startswith("Base 0.33 ± 0.02 → winner")
    assert winner.startswith("The winner is agent 1")
    assert winner.endswith("Its lr went 1e-3 → 1.2e-3.")
    assert validation.startswith("Its fitness in round 2 was 0.75")
    assert share.startswith("Its line of ancestors")


@pytest.mark.parametrize("width", [60, 200])
def test_a_terminal_wraps_between_words_and_a_pipe_does_not(width):
    lines = shown(mean_won(), width=width)
    assert all(len(line.rstrip()) <= width for line in lines)
    text = " ".join(" ".join(lines).split())
    assert "both descend from agent 0 of the first round." in text
    piped = shown(mean_won(), width=width, terminal=False)
    assert any(line.startswith("It won the final comparison") and len(line) > 100 for line in piped)


def test_troubles_are_warnings_and_not_too_many():
    agents = tuple(
        agent(slot, slot, 0, None, reason="[red]no gradient\x1b[31m") for slot in range(12)
    )
    lines = shown(None, [RoundRecord(0, (*agents, agent(12, 12, 0, 0.5)), {})], width=300)
    warnings = [line for line in lines if line.startswith("warning: agent")]
    assert len(warnings) == TROUBLES_SHOWN
    assert r"failed in round 1 ([red]no gradient\x1b[31m): lower" in warnings[0]
    assert lines[-1] == "and 7 more warnings: see the report"


def test_next_are_commands_to_copy():
    pipe, terminal = console(terminal=False), console()
    for screen in (pipe, terminal):
        show_next(screen, "runs/my run-1")
    assert pipe.file.getvalue().splitlines() == [
        "",
        "Run folder: runs/my run-1",
        "Next: evo-grpo report 'runs/my run-1', evo-grpo export 'runs/my run-1' OUT",
    ]
    assert [line.strip() for line in terminal.file.getvalue().splitlines()[2:]] == [
        "Next:",
        "evo-grpo report 'runs/my run-1'",
        "evo-grpo export 'runs/my run-1' OUT",
    ]


@pytest.mark.parametrize("activated", [False, True])
def test_next_starts_the_program_as_this_shell_finds_it(activated, tmp_path, monkeypatch):
    """`make run` starts .venv/bin/evo-grpo, which is not on the PATH of the user's shell."""
    bin = tmp_path / "my env" / "bin"
    bin.mkdir(parents=True)
    (bin / "evo-grpo").write_text("#!/bin/sh\n")
    (bin / "evo-grpo").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["my env/bin/evo-grpo", "run"])
    monkeypatch.setenv("PATH", str(bin) if activated else str(tmp_path))
    pipe = console(terminal=False)
    show_next(pipe, "runs/one")
    called = "evo-grpo" if activated else "'my env/bin/evo-grpo'"
    assert f"Next: {called} report runs/one, {called} export runs/one OUT\n" in (
        pipe.file.getvalue()
    )
    # Without plotly there is no report, and `export` refuses a winner that is worse than the base.
    monkeypatch.setattr("evo_grpo.readers.terminal.result.find_spec", lambda name: None)
    pipe = console(terminal=False)
    show_next(pipe, "runs/one", worse=True)
    assert f"Next: {called} lineage runs/one\n" in pipe.file.getvalue()


def shown_arms(arms, width=120):
    console = Console(file=io.StringIO(), width=width)
    show_arms(console, arms)
    return [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]


def bars(compared, width=120):
    return shown_arms(comparison_arms(compared), width)


def lines(table):
    console = Console(width=120, file=io.StringIO())
    console.print(table)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def blocks(line):
    return sum(character in "█▉▊▋▌▍▎▏" for character in line)


def test_a_bar_is_as_long_as_its_result():
    guess, random, evolved, *basis = bars(comparison(guess=0.25, random=0.5, evolved=1.0))
    assert guess.startswith("eight agents at your guess  ")
    assert random.startswith("eight random guesses  ")
    assert evolved.startswith("evolved  ")
    assert [blocks(line) for line in (guess, random, evolved)] == [10, 20, 40]
    assert evolved.endswith("1.00 ± 0.01  1,000 tokens")
    assert " ".join(basis) == (
        "Compared at equal tokens, on the same 256 test prompts with the same draws. Tokens for "
        "training + evaluation: guess 900 + 100, random 900 + 100, evolved 900 + 100."
    )


def test_rewards_of_any_range_have_bars():
    guess, random, evolved, *_ = bars(comparison(guess=-1.0, random=0.0, evolved=3.0))
    assert [blocks(line) for line in (guess, random, evolved)] == [10, 0, 30]
    (guess, *_) = bars(comparison(guess=None, evolved=0.5))
    assert " - " in guess


def test_a_replay_has_bars_spreads_differences_and_sentences_in_a_usual_terminal():
    found = replay({"schedule-run": BETTER})
    text = shown_arms(found.arms(), width=80)
    assert all(len(line) <= 80 for line in text[:7])
    assert "…" not in "".join(text)
    assert text[0].startswith("schedule  ")
    assert text[0].endswith("0.75 ± 0.06  spread 0.000  6,176 tokens")
    assert text[2].split()[:2] == ["the", "winner"]
    assert text[2].endswith("0.50 ± 0.13                1,808 tokens")
    assert text[4].split()[:3] == ["schedule", "last", "values"]
    assert text[4].split()[-3] == "0.250"
    assert text[6].startswith("last values  the winner")
    assert " ".join(text[7:]) == f"{found.verdict} {found.caveat()}"


def test_the_schedule_counts_rounds_from_one_and_shows_what_may_move():
    text = lines(schedule_table(schedule()))
    assert text[0].split()[2:] == [
        *("lr", "beta", "clip", "group", "temperature", "prompts/step", "tokens")
    ]
    assert text[3].split() == ["3", "9", "2e-3", "0", "0.2", "5", "1", "13", "1,040"]
    still = lines(schedule_table(schedule(ROUNDS[:2], mutable=("lr",))))
    assert "temperature" not in still[0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("last", "the best agent of the last round"),
        ("archive", "the best agent of any round"),
        ("mean", "the mean of members 3 and 5, of which the schedule follows the first"),
    ],
)
def test_the_title_names_every_kind_of_winner(kind, words):
    parents = (3, 5) if kind == "mean" else ()
    title = schedule_title("runs/one", schedule(kind=kind, parents=parents))
    assert title.startswith(f"runs/one: the winner is member 9, {words}; its schedule over 3")

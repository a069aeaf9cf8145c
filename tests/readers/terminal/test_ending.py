"""What a run ends with, on a screen."""

import io

import pytest
from rich.console import Console
from shown_run import SUMMARY, agent, mean_won, small_config, two_rounds

from evo_grpo.readers.terminal.result import TROUBLES_SHOWN, show_ending, show_next
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.view import RunView


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


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_terminal_wraps_between_words_and_a_pipe_does_not(width):
    lines = shown(mean_won(), width=width)
    assert all(len(line.rstrip()) <= width for line in lines)
    text = " ".join(" ".join(lines).split())
    assert "both descend from agent 0 of the first round." in text
    piped = shown(mean_won(), width=width, terminal=False)
    assert any(line.startswith("It won the final comparison") and len(line) > 100 for line in piped)


def test_the_result_stands_out():
    screen = Console(file=io.StringIO(), force_terminal=True, width=200, color_system="standard")
    show_ending(screen, view(SUMMARY))
    (bold,) = [line for line in screen.file.getvalue().splitlines() if "winner 0.81" in line]
    assert bold.startswith("\x1b[1mBase")


def test_an_unfinished_run_says_so():
    assert any(
        line.startswith("After 2 of 9 rounds agent 1 is the best")
        for line in shown(None, width=200, config=small_config("population.rounds=9").model_dump())
    )


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


def test_next_exports_no_winner_that_export_refuses():
    pipe = console(terminal=False)
    show_next(pipe, "runs/one", worse=True)
    assert "Next: evo-grpo report runs/one\n" in pipe.file.getvalue()


def test_next_is_no_report_where_plotly_is_missing(monkeypatch):
    monkeypatch.setattr("evo_grpo.readers.terminal.result.find_spec", lambda name: None)
    pipe = console(terminal=False)
    show_next(pipe, "runs/one")
    assert "Next: evo-grpo lineage runs/one, evo-grpo export runs/one OUT\n" in (
        pipe.file.getvalue()
    )


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


def test_what_evolution_was_worth_is_told_where_it_is_known():
    arms = [
        {"name": name, "test": {"mean": mean, "se": 0.01, "n": 256}}
        for name, mean in (("guess", 0.34), ("evolved", 0.81))
    ]
    lines = shown(SUMMARY, width=300, comparison={"agents": 2, "arms": arms})
    assert lines[-1].endswith(
        "your first guess alone reached 0.34 ± 0.01; this run reached 0.81 ± 0.01."
    )

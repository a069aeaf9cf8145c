"""The live table in a terminal or a notebook, and where there are plain lines in its place."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text
from shown_run import SUMMARY, agent, small_config, two_rounds

from evo_grpo.readers.terminal.live import LiveTable, progress_on
from evo_grpo.readers.terminal.progress import PlainLines
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.view import view_of
from evo_grpo.types import Decision


def terminal(width: int = 120, colours: str | None = "truecolor") -> Console:
    return Console(
        force_terminal=True,
        width=width,
        height=40,
        file=io.StringIO(),
        color_system=colours,
        highlight=False,
        _environ={"TERM": "xterm-256color"},
    )


def table(console: Console, names: tuple[str, ...] = ("lr",)) -> LiveTable:
    """A live table of a run of two rounds, without its thread."""
    view = LiveTable(console, hyperparameters=names)
    view.rounds, view.live.auto_refresh = 2, False
    return view


def drawn(view: LiveTable, colours: str | None = None) -> str:
    console = terminal(view.console.width, colours)
    with console.capture() as captured:
        console.print(view.render())
    return captured.get()


def test_a_terminal_gets_the_live_table():
    console = terminal()
    with progress_on(console) as view:
        assert isinstance(view, LiveTable)
        view.live.auto_refresh = False
        view.started(Path("here"), 2, 0, small_config())
        view.stage(0, "learn", 3, 4)
        assert "round 1/2" in drawn(view)
        assert "learn 3/4" in drawn(view)
        assert "fitness" not in drawn(view)  # no round is finished yet
        for record in two_rounds():
            view.round_done(record)
        text = drawn(view)
        for title in ("fitness", "reward", "KL", "zero-var", "lr", "beta", "clip", "group"):
            assert title in text
        assert "temperature" in text  # it may mutate, so it has a column
        assert "0.750 ±0.050" in text
        assert "1.2e-3 ↑" in text
        assert "\x1b[1;35m1.2e-3 ↑" in drawn(view, "truecolor")  # the mutated value, highlighted
        # Yellow and cyan vanish on white, blue on black; what rich colours by itself counts too.
        codes = re.findall("\x1b\\[([0-9;]*)m", drawn(view, "standard"))
        assert {"1;32", "1;35"} <= set(codes)
        assert not any(re.search(r"\b[39][3467]\b", code) for code in codes)
        assert view.rounds_done == 2
        view.finished(SUMMARY)
        assert not view.live.is_started
    out = console.file.getvalue()
    assert "here: tiny-sums on sums, 2 agents" in out
    assert "  copied  0→1" in Text.from_ansi(out).plain
    assert "\x1b[?25h" in out  # the cursor is back


@pytest.mark.parametrize(
    ("width", "shown", "hidden"),
    [
        (120, {"±", "zero-var", "KL", "reward", "member"}, set()),
        (75, {"KL", "reward", "member"}, {"±", "zero-var"}),
        (45, set(), {"±", "zero-var", "KL", "reward", "member"}),
    ],
)
def test_a_narrow_terminal_leaves_out_columns_and_cuts_none(
    width: int, shown: set[str], hidden: set[str]
):
    view = table(terminal(width))
    view.round_done(two_rounds()[1])
    text = drawn(view)
    assert "0.750" in text
    assert "1.2e-3 ↑" in text
    assert "…" not in text.partition("round 2/2")[0]
    assert all(title in text for title in shown)
    assert not any(title in text for title in hidden)


def many_agents(count: int) -> RoundRecord:
    agents = tuple(agent(slot, slot, 0, slot / count) for slot in range(count))
    told = tuple(Decision("kept", slot, 0, 0.0, 0.1, 8, f"kept {slot}") for slot in range(count))
    return RoundRecord(0, agents, {"learn": 2.0}, decisions=told)


@pytest.mark.parametrize(("count", "cut"), [(37, False), (38, True)])
def test_a_terminal_of_40_lines_shows_the_best_agents_and_the_bar(count: int, cut: bool):
    view = table(terminal())
    view.round_done(many_agents(count))
    lines = drawn(view).splitlines()
    assert len(lines) < 40
    assert "round 2/2" in lines[-1]
    shown = [int(line.split()[0]) for line in lines if line.split()[0].isdecimal()]
    assert shown == (list(range(count - 1, count - 37, -1)) if cut else list(range(count)))
    assert (f"and {count - 36} more agent" in lines[-2]) == cut


def test_a_notebook_scrolls_through_all_agents():
    view = table(Console(force_jupyter=True, highlight=False, file=io.StringIO()))
    view.round_done(many_agents(150))
    assert len(drawn(view).splitlines()) > 150


def test_a_second_run_of_a_view_leaves_what_was_printed_since_the_first():
    console = terminal()
    view = table(console)
    for _ in range(2):
        view.live.auto_refresh = False
        before = len(console.file.getvalue())
        view.started(None, 2, 0, None)
        view.live.refresh()
        shown = console.file.getvalue()[before:]
        assert "\x1b[1A" not in shown, "the cursor went up over earlier lines"
        assert "fitness" not in shown, "the agents of the run before"
        view.round_done(two_rounds()[0])
        view.live.refresh()
        view.close()


def test_decisions_are_told_and_wrap_between_words():
    sentence = "agent 1 took agent 0's weights at lr 0.0012: +0.25 ± 0.05 on 64 shared prompts"
    decision = Decision("copied", 1, 0, 0.25, 0.05, 64, sentence)
    record = replace(two_rounds()[0], decisions=(decision, replace(decision, sentence="and more")))
    view = table(terminal(40, None))
    view.round_done(record)
    lines = view.console.file.getvalue().splitlines()
    told = lines[next(i for i, line in enumerate(lines) if "took" in line) :]
    assert all(line.startswith("  ") and len(line) <= 40 for line in told)
    assert " ".join(" ".join(told).split()) == f"{sentence} and more"
    plain = Console(file=io.StringIO(), width=40)
    PlainLines(plain).round_done(record)
    lines = plain.file.getvalue().splitlines()
    assert lines[-2:] == [
        f"  {sentence}",
        "  and more",
    ]  # a line each, so that a log can be searched


def test_the_ending_is_shown_in_place_of_the_table():
    view = table(console := terminal(120, None))
    with view:
        view.started(None, 2, 0, settings=None)
        view.show_ending(view_of(two_rounds()))
        assert not view.live.is_started
    text = console.file.getvalue()
    assert "At the end agent 1 is the best: 0.75 ± 0.05 on 64 validation prompts; agent 0" in text
    assert "evo-grpo" not in text  # nothing was written that it could read


def test_a_failed_agent_is_shown_as_such():
    record = RoundRecord(0, (agent(0, 0, 0, 0.5), agent(1, 1, 0, None, reason="no finite")), {})
    plain = Console(file=io.StringIO(), width=200)
    for view in (table(terminal()), PlainLines(plain)):
        view.round_done(record)
        if isinstance(view, LiveTable):
            assert "failed" in drawn(view)
    text = plain.file.getvalue()
    assert "failed: agent 1" in text
    assert "fitness failed" in text
    assert text.rstrip().endswith("no finite")


def test_consoles_that_cannot_redraw_get_plain_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    for console in (Console(file=io.StringIO()), dumb):
        assert isinstance(progress_on(console), PlainLines)
    notebook = Console(force_jupyter=True)
    with monkeypatch.context() as patch:
        patch.setattr("evo_grpo.readers.terminal.live.find_spec", lambda name: name)
        assert isinstance(progress_on(notebook), LiveTable)
    view = progress_on(notebook, title="mine")  # without ipywidgets
    assert isinstance(view, PlainLines)
    assert not view.console.is_jupyter
    view.started(None, 2, 0, None)
    assert capsys.readouterr().out == "mine\n"

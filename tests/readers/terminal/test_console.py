"""What the screen gets: text as text, whoever wrote it."""

import ast
import io
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, Group
from shown_run import small_config, two_rounds

import evo_grpo
from evo_grpo.readers.terminal import console as module
from evo_grpo.readers.terminal.console import (
    BAD,
    GOOD,
    NOTICE,
    WorkLines,
    safe,
    say,
    show,
    warnings_to,
)
from evo_grpo.readers.terminal.live import LiveTable
from evo_grpo.readers.terminal.progress import PlainLines
from evo_grpo.types import Decision
from evo_grpo.working import working

EVIL = "a\x1b[31m\nb\u202e[red]:smile:\x9b"
SHOWN = r"a\x1b[31m\nb\u202e[red]:smile:\x9b"
PACKAGE = Path(evo_grpo.__file__).parent
SHOWING = [
    path for room in ("readers/terminal", "cli") for path in sorted((PACKAGE / room).rglob("*.py"))
]
#: Where strings become output, by way of `printable`.
DOORS = {"readers/terminal/console.py", "cli/output.py"}


def pipe() -> Console:
    return Console(file=io.StringIO(), width=200)


def terminal() -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=300,
        color_system=None,
        highlight=False,
        _environ={"TERM": "xterm"},
    )


@pytest.mark.parametrize("make", [pipe, terminal])
def test_a_line_is_one_line_and_no_markup(make):
    console = make()
    say(console, EVIL)
    say(console, safe(EVIL), wrap=True)
    show(console, safe(EVIL))
    assert console.file.getvalue().splitlines() == [SHOWN] * 3


def test_a_line_wraps_in_a_terminal_only():
    for make, lines in ((pipe, 1), (terminal, 2)):
        console = make()
        say(console, "word " * 79, wrap=True)
        say(console, "word " * 79)
        assert len(console.file.getvalue().splitlines()) == lines + 1


def test_tables_of_a_pipe_have_no_blanks_at_their_ends():
    console = pipe()
    show(console, Group(safe("a   "), safe(""), safe("b")))
    assert console.file.getvalue() == "a\n\nb\n"


@pytest.mark.parametrize("view", [LiveTable, PlainLines])
def test_progress_shows_names_reasons_and_decisions_as_text(view):
    console = terminal()
    first = two_rounds()[0]
    agents = tuple(replace(agent, reason=EVIL) for agent in first.agents)
    record = replace(
        first, agents=agents, decisions=(Decision("kept", 0, None, 0.0, 0.0, 0, EVIL),)
    )
    shown = view(console)
    if view is LiveTable:
        shown.live.auto_refresh = False
    config = small_config()
    config = config.replace(env=config.env.model_copy(update={"kind": EVIL}))
    config = config.replace(model=config.model.model_copy(update={"name": EVIL}))
    with shown:
        shown.started(Path(EVIL), 2, 0, config)
        shown.stage(0, EVIL, 0, 2)
        shown.round_done(record)
    text = console.file.getvalue()
    assert f"{SHOWN}: {SHOWN} on {SHOWN}, 2 agents" in text
    assert f"  {SHOWN}" in text
    for forbidden in ("\x1b[31m", "\u202e", "\x9b", "😄"):
        assert forbidden not in text


def test_warnings_are_one_line_each():
    seen = []
    with warnings_to(seen.append):
        warnings.simplefilter("always")
        warnings.warn("a\n  b\x1b[31m\u202e", stacklevel=1)
        warnings.warn("x" * 5000, stacklevel=1)
    assert seen[0] == r"a b\x1b[31m\u202e"
    assert len(seen[1]) <= 1000


def calls(path: Path) -> list[tuple[int, str, int]]:
    """Line, name and number of arguments of every call in a module."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            found.append((node.lineno, name, len(node.args)))
    return found


def test_all_that_is_shown_passes_a_door_that_makes_it_safe():
    open_ones = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in SHOWING
        if path.relative_to(PACKAGE).as_posix() not in DOORS
        for line, name, arguments in calls(path)
        if name in {"Text", "from_markup", "assemble", "echo", "secho"}
        or (name == "print" and arguments)
    ]
    assert {PACKAGE / door for door in DOORS} <= set(SHOWING)
    assert open_ones == [], "use safe, say or show, or say, warn or write of cli/output.py"


def test_only_colours_that_show_on_any_background():
    """Yellow and cyan vanish on white, blue on black; whatever is coloured comes from one place."""
    named = {"black", "blue", "cyan", "white", "yellow", "green", "red", "magenta"}
    found = {
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value}"
        for path in SHOWING
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and len(node.value) < 20
        and named & set(node.value.replace("_", " ").split())
        and path.name != "console.py"
    }
    assert found == set(), "use GOOD, BAD or NOTICE of readers/terminal/console.py"
    assert {GOOD, BAD, NOTICE} == {"green", "red", "magenta"}


def test_work_is_shown_while_it_lasts_if_it_takes_long(monkeypatch):
    console = pipe()
    monkeypatch.setattr(module, "LONG_WORK", 1e9)
    with WorkLines(console), working("load the weights"):
        pass
    assert console.file.getvalue() == ""
    monkeypatch.setattr(module, "LONG_WORK", 0.0)
    with WorkLines(console), working("load the weights"):
        _wait_for(lambda: console.file.getvalue() == "  load the weights …\n")
    with working("render the prompts"):  # nobody looks any more
        pass
    monkeypatch.setattr(module, "LONG_WORK", 0.2)
    begun = working("take the first step")
    with WorkLines(console):
        begun.__enter__()  # as after Ctrl-C, its end does not come
    time.sleep(0.4)
    assert console.file.getvalue() == "  load the weights …\n"
    begun.__exit__(None, None, None)


def _wait_for(holds):
    end = time.monotonic() + 30
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    assert holds()

"""One view of a run: all displays show the same numbers, and say which ones a run does not have."""

import html
import io
import json
import re
import tempfile
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_runs import make_run
from rich.console import Console
from shown_run import SUMMARY, run_folder, two_rounds
from typer.testing import CliRunner

from evo_grpo.analysis.export.contents import BaseModel, Contents
from evo_grpo.analysis.export.export import ExampleCode, card
from evo_grpo.cli import showing
from evo_grpo.cli.commands import app
from evo_grpo.errors import CheckpointError
from evo_grpo.readers.dashboard import study_note
from evo_grpo.readers.report.run_page import as_html, report_html
from evo_grpo.readers.terminal.result import family_tree, leaderboard_markdown, show_ending
from evo_grpo.record.choice import ChosenAgent, choose_of
from evo_grpo.record.family import best_ever, leading_agent
from evo_grpo.record.leaderboard import from_records
from evo_grpo.record.view import RunView
from evo_grpo.schema.hparams import Hparams
from evo_grpo.settings import from_dict

KINDS = ("last", "archive", "mean", "unfinished")
"""Which finalist won; or that none has yet."""


def viewed(
    kind: str, size: int = 3, rounds: int = 3, seed: int = 0, *, compared=True, failures=0.0
) -> RunView:
    """A run in which all numbers differ, so that one in the place of another is seen."""
    played = make_run(size, rounds, seed, failures=failures)
    config = {"population": {"rounds": rounds + (kind == "unfinished")}}
    if kind == "unfinished":
        return RunView("run", played, config=config)
    rng = np.random.default_rng((seed, 1))

    def score(n: int) -> dict:
        return {"mean": float(rng.random()), "se": float(rng.random()) / 10, "n": n}

    last, ever = leading_agent(played[-1]), best_ever(played)
    names = {"last": last, "archive": ever}
    finalists = []
    for name, one in names.items():
        parents = [] if one.parent is None else [one.parent]
        finalist = {"kind": name, "agent": one.agent, "member": one.member, "parents": parents}
        finalists.append({**finalist, "validation": score(64), "tie": name != kind})
    if kind == "mean":
        parents = [last.member, next(a.member for a in played[-1].agents if a is not last)]
        mean = {"kind": "mean", "agent": None, "member": 999, "parents": parents}
        finalists.append({**mean, "validation": score(64), "tie": None})
    if not compared:
        finalists = [
            {**one, "validation": None, "tie": None} for one in finalists if one["kind"] == kind
        ]
    (won,) = [one for one in finalists if one["kind"] == kind]
    best = {name: won[name] for name in ("kind", "agent", "member", "parents")}
    fitness = None if kind == "mean" else names[kind].score.mean
    base, test = score(256), score(256)
    summary = {
        **SUMMARY,
        "base": base,
        "best": {**test, **best, "fitness": fitness, "checkpoint": "checkpoints/winner"},
        "gain": test["mean"] - base["mean"],
        "gain_se": float(rng.random()) / 10,
        "rounds": rounds,
        "candidates": finalists,
    }
    spent = {"training": 1000, "evaluation": 100}
    arms = [
        {"name": "guess", "folder": "compare/guess", "tokens": spent, "test": score(256)},
        {"name": "evolved", "folder": ".", "tokens": spent, "test": test},
    ]
    comparison = {"agents": size, "split": "test", "arms": arms}
    return RunView("run", played, summary=summary, comparison=comparison, config=config)


def displays(view: RunView) -> dict[str, str]:
    """What each display shows of a run, as plain text; a card where there is an agent to export."""
    text = {
        "terminal": printed(lambda console: show_ending(console, view)),
        "tree": printed(lambda console: console.print(family_tree(view))) if view.rounds else "",
        "notebook": plain_text(as_html(view, "a run")),
        "dashboard": html.unescape(study_note(Path("run"), view)),
        "json": finished_event(view),
        "markdown": leaderboard_markdown(
            list(from_records(view.rounds, view.summary).columns), view.leaderboard
        ),
    }
    if view.winner is not None:
        base = BaseModel("tiny-sums", None, "tiny-sums")
        choice = ChosenAgent(_empty_folder(), view, view.winner, {})
        config = from_dict({"model": "tiny-sums", "env": "sums"})
        example = ExampleCode.of(base, Contents({}), config, Hparams(), None)
        text["card"] = card(choice, config, example, "digest")
    return text


@cache
def _empty_folder() -> Path:
    """A run folder without a replay, which is all that a card looks for in it."""
    return run_folder(f"{tempfile.mkdtemp()}/run", rounds=0, summary=False)


def printed(show) -> str:
    """What goes to a console so wide that no line is broken and no column left out."""
    console = Console(file=io.StringIO(), width=400, force_terminal=False, highlight=False)
    show(console)
    return console.file.getvalue()


def plain_text(page: str) -> str:
    """The text of a page, with a blank between elements."""
    page = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.S)
    return html.unescape(re.sub(r"<[^>]*>", " ", page))


def finished_event(view: RunView) -> str:
    """The sentences of the event that ends a run, as one text."""
    written: list[str] = []
    before, showing.write = showing.write, written.append
    try:
        showing.Events().ended(Path("run"), view)
    finally:
        showing.write = before
    return "\n".join(one["text"] for one in json.loads(written[0])["story"])


def without_fitness(view: RunView) -> RunView:
    """The same run, whose last round failed as a whole."""
    agents = tuple(replace(one, state="failed", score=None) for one in view.rounds[-1].agents)
    rounds = [*view.rounds[:-1], replace(view.rounds[-1], agents=agents)]
    return replace(view, rounds=rounds)


def without_test(view: RunView) -> RunView:
    """The same run, whose winner had no finite reward on the test prompts."""
    best = {**view.summary["best"], "mean": None, "se": None}
    return replace(view, summary={**view.summary, "best": best, "gain": None, "gain_se": None})


N = r"(-?\d+\.\d+)"
SHOWN = {
    "test": [
        rf"→ winner {N} ±",
        rf"winner +{N} ± \d+\.\d+ +\(?on 256 test prompts",
        rf"winner(?: after round \d+)?, test {N}",
        rf"test split, judged once: {N} ±",
        rf"this run reached {N} ±",
    ],
    "base": [rf"Base {N} ±", rf"base model +{N} ±"],
    "gain": [rf": {N.replace('-?', '[+-]?')} ± \d+\.\d+ on 256", r"gain +([+-]\d+\.\d+) ±"],
    "final": [
        rf"final comparison on 64 validation prompts: {N} ±",
        rf"\), final comparison  {N}",
    ],
    "fitness": [
        rf"Its fitness in round \d+ was {N} ± \d+\.\d+ on 4 validation",
        rf"validation fitness: {N} ± \d+\.\d+ \(4 prompts",
        rf"is the best: {N} ± \d+\.\d+ on 4 validation",
        rf"best fitness +{N} ± \d+\.\d+ +\(?on 4 validation",
    ],
}
"""How displays name each number; what follows the name is the number."""


def numbers(text):
    """The numbers that a text shows, by their names."""
    return {
        name: [found for pattern in patterns for found in re.findall(pattern, text)]
        for name, patterns in SHOWN.items()
    }


def is_rounded(shown, value):
    digits = len(shown.partition(".")[2])
    return abs(float(shown) - value) <= 0.5 * 10**-digits + 1e-9


def recorded(view):
    """The same numbers, from the records."""
    winner = view.winner
    known = {"fitness": winner.record.score.mean} if winner.agent is not None else {}
    if view.summary is None:
        return known
    kind, candidates = view.summary["best"]["kind"], view.summary["candidates"]
    (own,) = [one for one in candidates if one["kind"] == kind]
    if own["validation"] is not None:
        known["final"] = own["validation"]["mean"]
    parts = {"test": view.summary["best"]["mean"], "base": view.summary["base"]["mean"]}
    return known | parts | {"gain": view.summary["gain"]}


WHERE = {
    "test": {"terminal", "tree", "notebook", "dashboard", "json", "card"},
    "base": {"terminal", "notebook", "dashboard", "json", "card"},
    "gain": {"terminal", "notebook", "dashboard", "json"},
    "final": {"terminal", "notebook", "dashboard", "json", "card"},
    "fitness": {"terminal", "notebook", "dashboard", "json", "card"},
}
"""The displays that have to show a number that a run has."""


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    size=st.integers(2, 5),
    rounds=st.integers(1, 4),
    seed=st.integers(0, 10_000),
    compared=st.booleans(),
    failures=st.sampled_from([0.0, 0.4]),
)
def test_all_displays_show_the_numbers_of_the_records(kind, size, rounds, seed, compared, failures):
    view = viewed(kind, size, rounds, seed, compared=compared or kind == "mean", failures=failures)
    known, showing = recorded(view), defaultdict(set)
    for display, text in displays(view).items():
        for name, found in numbers(text).items():
            for shown in found:
                assert name in known, (display, name, shown)
                assert is_rounded(shown, known[name]), (display, name, shown, known[name])
                showing[name].add(display)
    for name in known:
        assert WHERE[name] <= showing[name], name


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(KINDS), size=st.integers(2, 5), seed=st.integers(0, 10_000))
def test_the_first_row_is_the_winner_with_the_numbers_of_the_records(kind, size, seed):
    view = viewed(kind, size, seed=seed)
    first, *others = view.leaderboard
    known = recorded(view)
    assert first["member"] == view.winner.member
    assert (first["test"], first["final"]) == (known.get("test"), known.get("final"))
    assert first["fitness"] == known.get("fitness", known.get("final"))
    assert all(one["test"] is None for one in others)
    assert sum(one["tokens"] for one in view.leaderboard) == view.tokens
    document = view.family_document()
    assert view.winner.member in [one["id"] for one in document["members"]]
    (line,) = [line for line in displays(view)["markdown"].splitlines() if line.startswith("| 1 ")]
    shown = line.strip("| ").split(" | ")
    for name in ("fitness", "final", "test"):
        cell = shown[list(first).index(name)]
        assert cell == "-" if first[name] is None else is_rounded(cell, first[name])


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_of_a_run_shows_the_same_numbers(kind):
    view = viewed(kind)
    known = recorded(view)
    for name, found in numbers(plain_text(report_html(view))).items():
        assert bool(found) == (name in known), name
        for shown in found:
            assert is_rounded(shown, known[name]), (name, shown, known[name])


# --- runs that lack something --------------------------------------------------------------------

NOT_YET = "No agent is judged on test prompts before the end of the run."
LACKING = {
    "without a round": (RunView("run", []), ["No round is finished yet."]),
    "without a summary": (viewed("unfinished"), [NOT_YET]),
    "never judged": (RunView("run", two_rounds()), ["No agent was judged on test prompts."]),
    "without a finite fitness": (
        without_fitness(viewed("unfinished", rounds=1)),
        ["After 1 of 2 rounds no agent has a fitness: all of them failed.", NOT_YET],
    ),
    "with a last round that failed": (without_fitness(viewed("archive")), []),
    "with a winner that was never evaluated": (
        without_fitness(viewed("last")),
        ["The winner has no fitness: it failed, or was never evaluated."],
    ),
    "with a winner without a test score": (
        without_test(viewed("mean")),
        ["On 256 test prompts the winner has no finite score and the base model has 0."],
    ),
    "with one agent": (viewed("last", size=1, compared=False), []),
}


@pytest.mark.parametrize("name", LACKING)
def test_every_display_says_what_is_missing(name):
    view, missing = LACKING[name]
    assert len(view.missing) == len(missing)
    shown = displays(view)
    shown["report"] = plain_text(report_html(view))
    for display in shown.keys() - {"tree", "markdown"}:
        for sentence in missing:
            assert sentence in shown[display].replace("\\", ""), display
    for display, text in shown.items():
        assert not re.search(r"\b(nan|None|inf)\b", text), display


def test_one_agent_alone_won_nothing():
    view, _ = LACKING["with one agent"]
    for display in ("terminal", "notebook", "dashboard", "json"):
        assert "nothing was selected: the winner is agent 0." in displays(view)[display]


@pytest.mark.parametrize("command", ["leaderboard", "lineage"])
def test_a_command_shows_an_unfinished_run_and_says_what_is_missing(tmp_path, command):
    folder = run_folder(str(tmp_path / "run"), rounds=1, summary=False)
    lines = CliRunner().invoke(app, [command, str(folder)]).stdout.splitlines()
    assert any("agent 0, round 1" in line or line.startswith("1 ") for line in lines)
    assert lines[-1] == NOT_YET


def test_a_run_without_a_finite_fitness_has_nothing_to_export(tmp_path):
    folder = run_folder(str(tmp_path / "run"), rounds=0, summary=False)
    with pytest.raises(CheckpointError, match="nothing to export, expected a finished round"):
        choose_of(folder)

"""Runs of every kind of end, as views, and what each display shows of them as text."""

import html
import io
import json
import re
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from random_runs import make_run
from rich.console import Console
from shown_run import SUMMARY, run_folder

from evo_grpo.analysis.export.contents import BaseModel, Contents
from evo_grpo.analysis.export.export import ExampleCode, card
from evo_grpo.cli import events
from evo_grpo.readers.dashboard import study_note
from evo_grpo.readers.report.run_page import as_html
from evo_grpo.readers.terminal.result import family_tree, leaderboard_markdown, show_ending
from evo_grpo.record.choice import ChosenAgent
from evo_grpo.record.family import best_ever, leading_agent
from evo_grpo.record.leaderboard import from_records
from evo_grpo.record.view import RunView
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
        use = ExampleCode.of(base, Contents({}), config)
        text["card"] = card(choice, config, use, "digest")
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
    before, events.write = events.write, written.append
    try:
        events.Events().ended(Path("run"), view)
    finally:
        events.write = before
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

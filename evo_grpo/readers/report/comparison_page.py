"""`evo-grpo compare`: runs side by side, as one page for people."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from evo_grpo.evolve.intervals import interval
from evo_grpo.printable import cut
from evo_grpo.readers.report.figures.style import GREY, graph_objects, look_of, new_figure
from evo_grpo.readers.report.page.build import Page, Table, sortable
from evo_grpo.readers.report.side_by_side import SideBySide
from evo_grpo.record.columns import fitness
from evo_grpo.record.files import atomic_write
from evo_grpo.record.wording import number, with_error
from evo_grpo.schema.shown import shown_value

VALUE = 40
"""Longest value of a setting that is shown whole."""

if TYPE_CHECKING:
    import plotly.graph_objects as go


def write_comparison(found: SideBySide, out: str | Path) -> Path:
    """Write runs side by side as a page that needs no network.

    Raises:
        EngineUnavailable: plotly is not installed.
        RunFailedError: The file cannot be written.
    """
    graph_objects("compare")
    names = ", ".join(one.name for one in found.standings)
    page = Page("Runs side by side", f"{names}: differences are those to {found.standings[0].name}")
    page.section("results", "Results", sortable(standings_table(found)), "On the test split.")
    page.section(
        "test",
        "Test split",
        page.chart(plot_tests(found)),
        "The winner of each run with an interval of 95%, and its base model.",
    )
    page.section(
        "apart",
        "Differences",
        sortable(differences_table(found)),
        "Paired where both runs answered the same prompts: then what makes prompts hard cancels.",
    )
    page.section(
        "progress",
        "Progress",
        page.chart(plot_progress(found)),
        "The best validation fitness so far, against the tokens that a run had sampled.",
    )
    page.section("settings", "Settings that differ", sortable(settings_table(found)))
    file = Path(out)
    atomic_write(file, page.render(), "compare")
    return file


def standings_table(found: SideBySide) -> Table:
    """Return what each run reached."""
    titles = ["run", "test", "base", "gain", "best fitness", "rounds", "tokens", "seconds"]
    rows: list[list[tuple[str, object]]] = [
        [
            (one.name, one.name),
            (with_error(one.test, one.test_se, 3), _known(one.test)),
            (number(one.base), _known(one.base)),
            (number(one.test - one.base), _known(one.test - one.base)),
            (number(one.fitness), _known(one.fitness)),
            (f"{one.rounds}{'' if one.finished else ' (unfinished)'}", one.rounds),
            (f"{one.tokens:,}", one.tokens),
            (number(one.seconds, 1), one.seconds),
        ]
        for one in found.standings
    ]
    return Table(titles, rows)


def differences_table(found: SideBySide) -> Table:
    """Return how far each run is from the first."""
    first = found.standings[0].name
    titles = ["run", f"minus {first}", "95% interval", "paired", "which is"]
    rows: list[list[tuple[str, object]]] = [
        [
            (one.name, one.name),
            (number(one.difference), _known(one.difference)),
            (f"[{number(one.low)}, {number(one.high)}]", _known(one.low)),
            ("yes" if one.paired else f"no: {one.why}", one.paired),
            (one.verdict, one.verdict),
        ]
        for one in found.apart
    ]
    return Table(titles, rows)


def settings_table(found: SideBySide) -> Table:
    """Return the settings in which the runs differ."""
    titles = ["setting", *(one.name for one in found.standings)]
    rows: list[list[tuple[str, object]]] = [
        [(name, name), *((_shown(value), _shown(value)) for value in values)]
        for name, values in found.settings.items()
    ]
    return Table(titles, rows or [[("none", "none")]])


def plot_tests(found: SideBySide) -> go.Figure:
    """Draw the winners with intervals of 95%, and their base models."""
    figure = new_figure("mean reward (test)", "", height=120 + 48 * len(found.standings))
    names = [one.name for one in found.standings]
    figure.add_scatter(
        x=[one.base for one in found.standings], y=names, mode="markers", name="base model",
        marker={"symbol": "line-ns-open", "size": 14, "color": GREY},
    )  # fmt: skip
    errors = [interval(0.0, one.test_se, one.test_prompts)[1] for one in found.standings]
    figure.add_scatter(
        x=[one.test for one in found.standings], y=names, mode="markers", name="winner",
        error_x={"array": errors, "thickness": 2},
        marker={"symbol": "circle", "size": 11, "color": look_of(0).color},
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed")
    return figure


def plot_progress(found: SideBySide) -> go.Figure:
    """Draw the best fitness so far of each run against its tokens."""
    figure = new_figure("tokens sampled", "best fitness so far (validation)")
    for index, (one, run) in enumerate(zip(found.standings, found.runs, strict=True)):
        tokens = np.cumsum(
            [r.evaluation_tokens + sum(a.tokens for a in r.agents) for r in run.rounds]
        )
        known = [[fitness(a) for a in r.agents] for r in run.rounds]
        best = np.array([max((v for v in own if v == v), default=-np.inf) for own in known])
        top = np.maximum.accumulate(best) if len(best) else best
        look = look_of(index)
        figure.add_scatter(
            x=tokens, y=np.where(np.isfinite(top), top, np.nan), mode="lines+markers",
            name=one.name, line={"color": look.color, "dash": look.dash, "shape": "hv"},
            marker={"symbol": look.symbol, "size": 8},
        )  # fmt: skip
    return figure


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return shown_value(value) if isinstance(value, float) else cut(str(value), VALUE)

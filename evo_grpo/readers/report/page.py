"""Builds a page as one HTML file that contains its styles, scripts, plotly and figures.

The page loads nothing from a network and runs only its two scripts, which a content security policy
names by digest. Data is JSON with escaped tags, and strings are escaped.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from evo_grpo.escaping import printable
from evo_grpo.readers.report.figures.axes import graph_objects
from evo_grpo.record.files import to_line
from evo_grpo.record.study import library_version

if TYPE_CHECKING:
    import plotly.graph_objects as go

REFRESH = 15
"""Seconds after which the page of an unfinished run reloads itself."""


@dataclass
class Page:
    """A page to which sections are added; a `live` page, of an unfinished run, reloads itself."""

    title: str
    lead: str
    live: bool = False
    _sections: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    _figures: list[str] = field(default_factory=list[str])
    _data: dict[str, Any] = field(default_factory=dict[str, Any])

    def section(self, id: str, title: str, body: str, about: str = "") -> None:
        """Add a section unless its `body` (HTML) is empty; all other arguments are plain text."""
        if not body:
            return
        words = f'<p class="about">{text(about)}</p>' if about else ""
        markup = f'<section id="{id}"><h2>{text(title)}</h2>{words}{body}</section>'
        self._sections.append((id, title, markup))

    @contextmanager
    def legend(self, entries: str) -> Generator[None]:
        """Put the block's sections below a legend that stays in sight; `entries` is its HTML."""
        begin = f'<div class="figures"><div class="page-legend">{entries}</div>'
        self._sections.append(("", "", begin))
        yield
        self._sections.append(("", "", "</div>"))

    def chart(self, figure: go.Figure, *, legend: bool = True) -> str:
        """Add a figure and return its HTML element; without `legend`, the figure has no legend."""
        if not legend:
            figure.update_layout(showlegend=False)
        self._figures.append(str(figure.to_json()))
        layout: Any = figure.layout
        return (
            f'<div class="chart" data-figure="{len(self._figures) - 1}" '
            f'style="min-height: {layout.height}px"></div>'
        )

    def data(self, name: str, values: Any) -> None:  # noqa: ANN401 -- anything JSON can hold
        """Pass values to the script of the page, under a name."""
        self._data[name] = values

    def render(self) -> str:
        """Return the page as the text of an HTML file."""
        plotly = _plotly_js()
        script = _part("page.js")
        policy = (
            "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; "
            f"script-src '{_digest(plotly)}' '{_digest(script)}'"
        )
        links = "".join(
            f'<a href="#{id}">{text(title)}</a>' for id, title, _ in self._sections if id
        )
        live = '<label><input type="checkbox" id="refresh"> refresh</label>' if self.live else ""
        # One element per figure: each is parsed when it is drawn.
        figures = "".join(
            f'<script type="application/json" id="figure-{number}">{_embedded(figure)}</script>'
            for number, figure in enumerate(self._figures)
        )
        return _part("page.html").format(
            policy=policy,
            title=text(self.title),
            lead=text(self.lead),
            style=_part("style.css"),
            links=links,
            live=live,
            sections="\n".join(markup for *_, markup in self._sections),
            version=text(library_version()),
            data=_embedded(to_line({"refresh": REFRESH, **self._data}, separators=(",", ":"))),
            figures=figures,
            plotly=plotly,
            script=script,
        )


@dataclass(frozen=True)
class Table:
    """A table of a page; a cell is (text, value to sort by); the value is None if missing."""

    titles: Sequence[str]
    rows: Sequence[Sequence[tuple[str, object]]]


def text(value: object) -> str:
    """Escape a string for HTML, including control characters."""
    return html.escape(printable(str(value)))


def known(value: float) -> float | None:
    """Return a value, or None for NaN, so that a table sorts NaN as a missing value."""
    return None if math.isnan(value) else value


def cards(values: Sequence[tuple[str, str, str]]) -> str:
    """Return HTML cards, each with a title, a value and a description."""
    items = "".join(
        f'<div class="card"><span>{text(title)}</span><b>{text(value)}</b>'
        f"<span>{text(about)}</span></div>"
        for title, value, about in values
    )
    return f'<div class="cards">{items}</div>'


def sortable(table: Table, classes: Sequence[str] = ()) -> str:
    """Return a table as HTML that users can sort by column; `classes` has each row's CSS class."""
    heads = "".join(
        f'<th scope="col"><button type="button">{text(title)}</button></th>'
        for title in table.titles
    )
    body: list[str] = []
    for number, row in enumerate(table.rows):
        cells = "".join(
            f'<td data-value="{"" if value is None else text(value)}">{text(label)}</td>'
            for label, value in row
        )
        name = f' class="{classes[number]}"' if classes and classes[number] else ""
        body.append(f"<tr{name}>{cells}</tr>")
    return (
        f'<div class="wide"><table class="sortable"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _embedded(values: str) -> str:
    """Escape tags in JSON, so that it is safe inside a script element."""
    for sign in "<>&\u2028\u2029":
        values = values.replace(sign, f"\\u{ord(sign):04x}")
    return values.encode("utf-8", "replace").decode("utf-8")


def _plotly_js() -> str:
    graph_objects("report")
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def _part(name: str) -> str:
    return (files("evo_grpo.readers.report") / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"

"""One HTML file from what a run recorded: markup, styles, scripts, plotly and figures in it.

Nothing in it is fetched, and nothing from outside runs in it: a content security policy names the
two scripts by their digests, data is JSON in which no tag can end, and strings become text alone.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from evo_grpo.printable import printable
from evo_grpo.readers.report.figures.style import graph_objects
from evo_grpo.record.files import to_line

if TYPE_CHECKING:
    import plotly.graph_objects as go

REFRESH = 15
"""Seconds after which the page of an unfinished run looks for a newer one."""


@dataclass
class Page:
    """A page in the making: sections are added one below the other.

    Attributes:
        title: Its heading.
        lead: A sentence below the heading.
        live: Whether what it shows goes on, so that it loads itself again.
    """

    title: str
    lead: str
    live: bool = False
    _sections: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    _figures: list[str] = field(default_factory=list[str])
    _data: dict[str, Any] = field(default_factory=dict[str, Any])

    def section(self, id: str, title: str, body: str, about: str = "") -> None:
        """Add a section, `body` in HTML and the rest plain text; without a body it is left out."""
        if not body:
            return
        words = f'<p class="about">{text(about)}</p>' if about else ""
        markup = f'<section id="{id}"><h2>{text(title)}</h2>{words}{body}</section>'
        self._sections.append((id, title, markup))

    def chart(self, figure: go.Figure) -> str:
        """Keep a figure, and return the HTML of the place where it is drawn."""
        self._figures.append(str(figure.to_json()))
        height = figure.layout.height
        return (
            f'<div class="chart" data-figure="{len(self._figures) - 1}" '
            f'style="min-height: {height}px"></div>'
        )

    def data(self, name: str, values: Any) -> None:  # noqa: ANN401 -- anything JSON can hold
        """Hand values to the script of the page."""
        self._data[name] = values

    def render(self) -> str:
        """Return the page."""
        plotly = _plotly_js()
        script = _part("page.js")
        policy = (
            "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; "
            f"script-src '{_digest(plotly)}' '{_digest(script)}'"
        )
        links = "".join(f'<a href="#{id}">{text(title)}</a>' for id, title, _ in self._sections)
        live = '<label><input type="checkbox" id="refresh"> refresh</label>' if self.live else ""
        # Each in an element of its own, so that it is read when it is drawn and not before.
        figures = "".join(
            f'<script type="application/json" id="figure-{number}">{_embedded(figure)}</script>'
            for number, figure in enumerate(self._figures)
        )
        return _TEMPLATE.format(
            policy=policy,
            title=text(self.title),
            lead=text(self.lead),
            style=_part("style.css"),
            links=links,
            live=live,
            sections="\n".join(markup for *_, markup in self._sections),
            version=text(_version()),
            data=_embedded(to_line({"refresh": REFRESH, **self._data}, separators=(",", ":"))),
            figures=figures,
            plotly=plotly,
            script=script,
        )


@dataclass(frozen=True)
class Table:
    """A table of a page.

    Attributes:
        titles: Its columns.
        rows: For each cell what is shown, and the value by which it sorts, None for none.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[tuple[str, object]]]


def text(value: object) -> str:
    """Return a string from anywhere as HTML that shows it and means nothing else."""
    return html.escape(printable(str(value)))


def cards(values: Sequence[tuple[str, str, str]]) -> str:
    """Return numbers with their titles and what they mean."""
    made = "".join(
        f'<div class="card"><span>{text(title)}</span><b>{text(value)}</b>'
        f"<span>{text(about)}</span></div>"
        for title, value, about in values
    )
    return f'<div class="cards">{made}</div>'


def sortable(table: Table, classes: Sequence[str] = ()) -> str:
    """Return a table that sorts by its columns, with a CSS class for each row, or none."""
    heads = "".join(
        f'<th scope="col"><button type="button">{text(title)}</button></th>'
        for title in table.titles
    )
    body: list[str] = []
    for number, row in enumerate(table.rows):
        cells = "".join(
            f'<td data-value="{"" if value is None else text(value)}">{text(shown)}</td>'
            for shown, value in row
        )
        name = f' class="{classes[number]}"' if classes and classes[number] else ""
        body.append(f"<tr{name}>{cells}</tr>")
    return (
        f'<div class="wide"><table class="sortable"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _embedded(values: str) -> str:
    """Return JSON as it may stand in a script element: no tag ends or begins in it."""
    for sign in "<>&\u2028\u2029":
        values = values.replace(sign, f"\\u{ord(sign):04x}")
    return values.encode("utf-8", "replace").decode("utf-8")


def _plotly_js() -> str:
    graph_objects("report")
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def _part(name: str) -> str:
    return (files("evo_grpo.readers.report.page") / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _version() -> str:
    try:
        return version("evo-grpo")
    except PackageNotFoundError:
        return "from the sources"


_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1><p class="lead">{lead}</p></header>
<nav aria-label="Sections"><div>{links}<span class="tools">{live}<button type="button" id="theme">\
Dark</button></span></div></nav>
<main>
{sections}
<footer>Written by evo-grpo {version}. The page needs no network.</footer>
</main>
<script type="application/json" id="data">{data}</script>
{figures}
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""

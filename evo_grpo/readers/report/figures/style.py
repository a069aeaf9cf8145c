"""How figures look: a colour, a marker and a dash for each agent, and a background of none.

Colours are those of Okabe and Ito (2008), which readers with a colour deficiency tell apart, the
yellow darkened for light backgrounds. Markers and dashes say the same without colour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evo_grpo.errors import EngineUnavailable

if TYPE_CHECKING:
    import plotly.graph_objects as go

COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#9a8c00",
    "#8c6bb1",
)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
GLYPHS = ("●", "■", "◆", "▲", "✚", "✖", "★", "⬢")
"""Characters that look like the markers, for legends and labels."""
DASHES = ("solid", "dash", "dot", "dashdot")
GREY = "#8a8f98"
"""Of what is no agent: the winner's line, the base model, mutations."""
WINNER = "the winner's line"
HEIGHT = 420
TOP, BOTTOM = 24, 48
"""Pixels of the margins above and below."""
MARKERS = 60
"""Markers of a trace that are drawn; a reader hovers over the others all the same."""


@dataclass(frozen=True)
class Look:
    """How an agent, or a run among several, is drawn.

    Attributes:
        color: A CSS colour that is read on light and on dark.
        symbol: A plotly marker.
        dash: A plotly dash.
    """

    color: str
    symbol: str
    dash: str

    def named(self, name: str) -> str:
        """Return a name behind the marker in its colour, as HTML; `name` is HTML too."""
        glyph = GLYPHS[SYMBOLS.index(self.symbol)]
        return f'<span style="color:{self.color}">{glyph}</span> {name}'


def look_of(index: int) -> Look:
    """Return the look with an index >= 0; the first 256 differ from each other."""
    turn = index // len(COLORS)
    return Look(
        COLORS[index % len(COLORS)],
        SYMBOLS[(index + turn // len(DASHES)) % len(SYMBOLS)],
        DASHES[turn % len(DASHES)],
    )


def graph_objects(what: str) -> Any:  # noqa: ANN401 -- a module that may be missing
    """Return plotly.graph_objects, or raise EngineUnavailable with `what`, the caller."""
    try:
        import plotly.graph_objects as module
    except ImportError as error:
        raise EngineUnavailable(
            f"{what}: expected the package plotly, which is not installed; install it with: pip "
            'install "evo-grpo[report]"'
        ) from error
    return module


def new_figure(x: str, y: str, *, height: int = HEIGHT) -> go.Figure:
    """Return an empty figure with the titles of its axes, `height` pixels high."""
    objects = graph_objects("figure")
    figure = objects.Figure(layout=layout(height))
    figure.update_xaxes(title_text=x)
    figure.update_yaxes(title_text=y)
    return figure


def layout(height: int) -> dict[str, Any]:
    """Return the layout that all figures share, with a transparent background."""
    axis = {
        "gridcolor": "rgba(128,128,128,0.2)",
        "zerolinecolor": "rgba(128,128,128,0.4)",
        "linecolor": "rgba(128,128,128,0.4)",
        "automargin": True,
        "exponentformat": "e",
        "title": {"standoff": 8},
    }
    template = {
        "layout": {
            "colorway": list(COLORS),
            "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#57606a"},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {"align": "left"},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": GREY, "orientation": "v"},
        }
    }
    return {
        "template": template,
        "height": height,
        "margin": {"l": 56, "r": 16, "t": TOP, "b": BOTTOM},
        "hovermode": "closest",
        "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0.0},
    }


def round_axis(figure: go.Figure, rounds: int, title: str = "round", *, free: float = 0.4) -> None:
    """Number the horizontal axis by rounds, counted from 1; `free` rounds follow the last."""
    figure.update_xaxes(
        title_text=title,
        range=[0.6, max(1, rounds) + free],
        tickformat="d",
        dtick=tick_distance(rounds),
        tick0=1,
    )


def tick_distance(rounds: int) -> int:
    """Return the rounds between two numbers of an axis."""
    return max(1, -(-rounds // 12))

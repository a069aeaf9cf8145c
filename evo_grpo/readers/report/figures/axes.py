"""Defines the style of figures: colours, markers, axes and ticks, and names at ends of lines.

The colours are those of Okabe and Ito (2008), but the yellow is darker, for light backgrounds.
People with a colour deficiency can tell them apart. Markers and dashes also distinguish agents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from evo_grpo.errors import EngineUnavailable
from evo_grpo.schema.problems import shown_value

if TYPE_CHECKING:
    import plotly.graph_objects as go

COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
    *("#e69f00", "#56b4e9", "#9a8c00", "#8c6bb1"),
)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
GLYPHS = ("●", "■", "◆", "▲", "✚", "✖", "★", "⬢")
"""Characters that look like the markers, for legends and labels."""
DASHES = ("solid", "dash", "dot", "dashdot")
GREY = "#8a8f98"
"""Colour of lines and marks that belong to no agent: the winner's line, the base model."""
WINNER = "the winner's line"
HEIGHT = 420
TOP, BOTTOM = 24, 48
"""Pixels of the margins above and below a plot."""
PLOT_HEIGHT = HEIGHT - TOP - BOTTOM
"""Pixels of a plot's height, between these margins."""
MARGIN = 96
"""Pixels of the right margin, for the names at the ends of lines."""
APART, SIZE = 14, 11
"""Least vertical distance between two names in the margin, and size of their font, in pixels."""
MARKERS = 60
"""Greatest number of markers that are drawn in a trace; all points have hover texts."""
SHARE = 0.1
"""Least span of an axis, as a share of the largest absolute value on it."""
PAD = 0.06
"""Free space at either end of an axis, as a share of its span."""
DECADE = 10.0
"""Least ratio of the largest to the smallest value at which an axis is logarithmic."""
BETWEEN = ((1.2, (1, 2, 5)), (2.5, (1, 3)), (math.inf, (1,)))
"""(Powers of ten that a logarithmic axis spans at most, multiples of a power that get ticks)."""

Place = Mapping[str, Any]
"""The `row` and `col` of a subplot; empty in a figure without subplots."""
ALONE: Place = {}


@dataclass(frozen=True)
class Look:
    """The style of an agent or a run: a colour for light and dark pages, a marker, and a dash."""

    color: str
    symbol: str = "circle"
    dash: str = "solid"

    def named(self, name: str) -> str:
        """Return HTML with a marker of this look, and then `name`, which must be HTML."""
        glyph = GLYPHS[SYMBOLS.index(self.symbol)]
        return f'<span style="color:{self.color}">{glyph}</span> {name}'


def look_of(index: int) -> Look:
    """Return the look number `index`, >= 0; the first 256 looks differ from each other."""
    cycle = index // len(COLORS)
    return Look(
        COLORS[index % len(COLORS)],
        SYMBOLS[(index + cycle // len(DASHES)) % len(SYMBOLS)],
        DASHES[cycle % len(DASHES)],
    )


class Line:
    """Points in order, each with a hover text and a standard error (NaN for none)."""

    def __init__(self, x: Iterable[float] = (), y: Iterable[float] = ()) -> None:
        self._points: list[tuple[float, float, float]] = [(*point, math.nan) for point in zip(x, y)]  # noqa: B905 -- of one curve
        self.texts: list[str] = []

    def begin(self) -> None:
        """Leave a gap between the points so far and the points that are added next."""
        if self._points:
            self.add(math.nan, math.nan)

    def add(self, x: float, y: float, text: str = "", error: float = math.nan) -> None:
        """Add a point."""
        self._points.append((x, y, error))
        self.texts.append(text)

    def columns(self) -> np.ndarray:
        """Return x, y and the standard errors, (3, points) float64."""
        return np.array(self._points, dtype=np.float64).reshape(-1, 3).T


def draw(
    figure: go.Figure,
    line: Line,
    look: Look,
    name: str,
    mode: str = "lines+markers",
    *,
    place: Place = ALONE,
    legend: bool = False,
    **more: Any,
) -> None:
    """Draw a line; `more` has options of plotly, which override those of `look`."""
    x, y, errors = line.columns()
    options: dict[str, Any] = {
        "legendgroup": name,
        "line": {"color": look.color, "dash": look.dash, "width": 2},
        "marker": {
            "symbol": look.symbol, "color": look.color, "size": 7, "maxdisplayed": MARKERS
        },
        "error_y": error_bars(errors, look.color),
        **({"text": line.texts, "hoverinfo": "text"} if any(line.texts) else {"hoverinfo": "skip"}),
        **more,
    }  # fmt: skip
    figure.add_scatter(x=x, y=y, mode=mode, name=name, showlegend=legend, **options, **place)


def error_bars(errors: np.ndarray, color: str) -> dict[str, Any] | None:
    """Return plotly's settings of error bars for standard errors, None if all are NaN."""
    if not np.isfinite(errors).any():
        return None
    return {"array": errors, "color": color, "thickness": 1, "width": 3}


def graph_objects(what: str) -> Any:  # noqa: ANN401 -- a module that may be missing
    """Return plotly.graph_objects, or raise EngineUnavailable, which names the caller: `what`."""
    try:
        import plotly.graph_objects as module
    except ImportError as error:
        raise EngineUnavailable(
            f"{what}: expected the package plotly, which is not installed; install it with: pip "
            'install "evo-grpo[report]"'
        ) from error
    return module


def new_figure(x: str = "", y: str = "", *, height: int = HEIGHT, **grid: Any) -> go.Figure:
    """Return an empty figure; `grid` has the options of `plotly.subplots.make_subplots`."""
    objects = graph_objects("figure")
    axis = {
        "gridcolor": "rgba(128,128,128,0.2)",
        "zerolinecolor": "rgba(128,128,128,0.4)",
        "linecolor": "rgba(128,128,128,0.4)",
        "automargin": True,
        "exponentformat": "e",
        "title": {"standoff": 8},
    }
    template = {
        "colorway": list(COLORS),
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#57606a"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "xaxis": axis,
        "yaxis": axis,
        "hoverlabel": {"align": "left"},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": GREY, "orientation": "v"},
    }
    layout: dict[str, Any] = {
        "template": {"layout": template},
        "height": height,
        "margin": {"l": 56, "r": 16, "t": TOP, "b": BOTTOM},
        "hovermode": "closest",
        "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0.0},
    }
    if grid:
        from plotly.subplots import make_subplots

        return make_subplots(**grid).update_layout(layout)
    figure: go.Figure = objects.Figure(layout=layout)
    figure.update_xaxes(title_text=x)
    figure.update_yaxes(title_text=y)
    return figure


class Scale(NamedTuple):
    """The range of an axis, whether it is logarithmic, and the names of its ticks at 1, 2, ..."""

    low: float
    high: float
    log: bool = False
    names: Sequence[str] = ()


def linear(
    values: Iterable[float],
    *,
    include: Sequence[float] = (),
    least: float = 0.0,
    names: Sequence[str] = (),
) -> Scale:
    """Return a linear scale that contains the finite `values` and all values in `include`.

    The span is at least `least`, and at least a tenth of the largest absolute value, so that small
    differences look small.
    """
    numbers = [*filter(math.isfinite, values), *include] or [0.0, 1.0]
    low, high = min(numbers), max(numbers)
    least = max(least, SHARE * max(abs(low), abs(high)))
    if high - low < least:
        middle = (low + high) / 2
        # An axis of values >= 0 does not begin below 0.
        bottom = max(0.0, middle - least / 2) if low >= 0 else middle - least / 2
        low, high = bottom, bottom + least
    padding = PAD * (high - low or 1.0)
    return Scale(low - padding, high + padding, names=names)


def scale_of(values: Iterable[float], names: Sequence[str] = ()) -> Scale:
    """Return a scale for values, logarithmic if all are positive and span a factor of 10."""
    finite = [value for value in values if math.isfinite(value)]
    if names or not finite or min(finite) <= 0 or max(finite) < DECADE * min(finite):
        return linear(finite, names=names)
    low, high = math.log10(min(finite)), math.log10(max(finite))
    padding = PAD * (high - low)
    return Scale(10 ** (low - padding), 10 ** (high + padding), log=True)


def noise(curves: Iterable[Sequence[float]]) -> float:
    """Estimate the standard deviation of the noise in curves from differences of neighbours."""
    pairs = (pair for curve in curves for pair in pairwise(curve))
    steps = [abs(after - before) for before, after in pairs if math.isfinite(after - before)]
    # The median of |a - b| is 0.954 standard deviations for normal noise.
    return median(steps) / 0.954 if steps else 0.0


def log_ticks(scale: Scale) -> list[float]:
    """Return the ticks of a logarithmic axis: powers of ten, and multiples if the span is small."""
    low, high = math.log10(scale.low), math.log10(scale.high)
    factors = next(factors for most, factors in BETWEEN if high - low <= most)
    powers = range(math.floor(low), math.ceil(high) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    return [tick for tick in ticks if scale.low <= tick <= scale.high]


def set_axis(figure: go.Figure, axis: str, scale: Scale, place: Place = ALONE) -> None:
    """Set the range and the ticks of an axis, "x" or "y"."""
    ends = [math.log10(end) if scale.log else end for end in scale[:2]]
    update = {"type": "log" if scale.log else "linear", "range": ends}
    if scale.log or scale.names:
        ticks = log_ticks(scale) if scale.log else [*range(1, len(scale.names) + 1)]
        texts = scale.names or [shown_value(tick) for tick in ticks]
        update |= {"tickmode": "array", "tickvals": ticks, "ticktext": list(texts)}
    set_axes = figure.update_xaxes if axis == "x" else figure.update_yaxes
    set_axes(**update, **place)


def round_axis(figure: go.Figure, rounds: int, title: str = "round", *, free: float = 0.4) -> None:
    """Number the horizontal axis by rounds from 1, with space for `free` rounds after the last."""
    figure.update_xaxes(
        title_text=title,
        range=[0.6, max(1, rounds) + free],
        tickformat="d",
        dtick=tick_distance(rounds),
        tick0=1,
    )


def tick_distance(rounds: int) -> int:
    """Return the number of rounds between two ticks."""
    return max(1, -(-rounds // 12))


class End(NamedTuple):
    """The last point of a line, the line's name as HTML, and its agent; None if it has no agent."""

    x: float
    y: float
    name: str
    agent: int | None = None


def name_ends(
    figure: go.Figure, ends: Sequence[End], scale: Scale, pixels: float, place: Place = ALONE
) -> None:
    """Write the names of lines in the right margin, moved apart so that no two names overlap.

    `ends` are sorted by importance, the most important first; names without room are left out. The
    vertical axis has the range of `scale` and is `pixels` long.
    """

    def position(value: float) -> float:  # annotations have exponents on a log axis
        return math.log10(value) if scale.log else value

    drawable = [end for end in ends if math.isfinite(end.y) and (end.y > 0 or not scale.log)]
    drawable = drawable[: int(pixels / APART)]
    low, high = map(position, scale[:2])
    heights = [(position(end.y) - low) / (high - low) * pixels for end in drawable]
    axes: dict[str, str] = {}
    if place:
        subplot: Any = figure.get_subplot(**place)
        axes = {"xref": subplot.yaxis.anchor, "yref": subplot.xaxis.anchor}
    names = [
        dict(
            x=end.x, y=position(end.y), text=end.name, showarrow=False,
            xanchor="left", yanchor="middle", xshift=9, yshift=after - before,
            font={"size": SIZE}, name="end" if end.agent is None else f"agent {end.agent}",
            **axes,
        )
        for end, before, after in zip(drawable, heights, apart(heights), strict=True)
    ]  # fmt: skip
    # All at once: for each annotation that is added, plotly copies all others.
    layout: Any = figure.layout
    layout.annotations = (*layout.annotations, *names)
    layout.margin.r = MARGIN


def apart(heights: Sequence[float], least: float = APART) -> list[float]:
    """Return heights moved as little as possible so that any two differ by `least` or more.

    Heights that are too close form a block around their mean, as in isotonic regression.
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    blocks: list[list[float]] = []  # sum (less `least` per height below) and number
    for rank, index in enumerate(order):
        blocks.append([heights[index] - rank * least, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, number = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += number
    starts = [total / number for total, number in blocks for _ in range(int(number))]
    moved_heights = [0.0] * len(heights)
    for rank, index in enumerate(order):
        moved_heights[index] = starts[rank] + rank * least
    return moved_heights

"""Names at the ends of lines, in the right margin, moved apart where they would overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evo_grpo.readers.report.figures.axes import Span

if TYPE_CHECKING:
    import plotly.graph_objects as go

MARGIN = 96
"""Pixels of the right margin that the names need."""
APART = 14
"""Least distance between two names, in pixels."""
SIZE = 11
"""Height of a letter, in pixels."""


@dataclass(frozen=True)
class End:
    """The end of a line.

    Attributes:
        x: Where it is on the horizontal axis.
        y: Where it is on the vertical axis.
        name: The name of the line, as HTML.
        agent: The agent that is drawn, None for another line.
    """

    x: float
    y: float
    name: str
    agent: int | None = None


def name_ends(
    figure: go.Figure,
    ends: Sequence[End],
    span: Span,
    pixels: float,
    *,
    log: bool = False,
    row: int | None = None,
    col: int | None = None,
) -> None:
    """Write the names of lines at their ends.

    Args:
        figure: The figure.
        ends: The lines, the most important first; those without room are left out.
        span: The ends of the vertical axis.
        pixels: Its length.
        log: Whether it is logarithmic; positions of annotations are then exponents.
        row: The row in a figure that has several.
        col: The column in it.
    """
    known = [end for end in ends if math.isfinite(end.y) and (end.y > 0 or not log)]
    known = known[: int(pixels / APART)]

    def position(value: float) -> float:
        return math.log10(value) if log else value

    low, high = (position(end) for end in span)
    heights = [(position(end.y) - low) / (high - low) * pixels for end in known]
    axes: dict[str, str] = {}
    if row is not None:
        place: Any = figure.get_subplot(row, col)
        axes = {"xref": place.yaxis.anchor, "yref": place.xaxis.anchor}
    names = [
        dict(
            x=end.x, y=position(end.y), text=end.name, showarrow=False,
            xanchor="left", yanchor="middle", xshift=9, yshift=after - before,
            font={"size": SIZE}, name="end" if end.agent is None else f"agent {end.agent}",
            **axes,
        )
        for end, before, after in zip(known, heights, apart(heights), strict=True)
    ]  # fmt: skip
    # All at once: plotly copies those that a figure has for each that is added.
    layout: Any = figure.layout
    layout.annotations = (*layout.annotations, *names)


def apart(heights: Sequence[float], least: float = APART) -> list[float]:
    """Return heights moved as little as possible so that any two differ by `least` or more.

    Neighbours that overlap form a block around their mean position, as in isotonic regression.
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    blocks: list[list[float]] = []  # sum and number of positions, each without those below it
    for rank, index in enumerate(order):
        blocks.append([heights[index] - rank * least, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, number = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += number
    starts = [total / number for total, number in blocks for _ in range(int(number))]
    moved = [0.0] * len(heights)
    for rank, index in enumerate(order):
        moved[index] = starts[rank] + rank * least
    return moved

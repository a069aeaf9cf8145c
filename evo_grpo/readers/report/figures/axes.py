"""Ranges and ticks of axes: noise does not fill a figure, and logarithmic labels are readable."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from evo_grpo.schema.shown import shown_value

if TYPE_CHECKING:
    import plotly.graph_objects as go

SHARE = 0.1
"""Least span of an axis, as a share of the largest absolute value on it."""
PAD = 0.06
"""Free space at either end of an axis, as a share of its span."""
DECADE = 10.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
BETWEEN = ((1.2, (1, 2, 5)), (2.5, (1, 3)), (math.inf, (1,)))
"""Powers of ten that an axis spans, up to which each of them has these multiples as ticks."""

Span = tuple[float, float]
"""The lower and the upper end of an axis, in the units of its values."""


def linear_span(
    values: Iterable[float], *, include: Sequence[float] = (), least: float = 0.0
) -> Span:
    """Return the ends of a linear axis.

    Args:
        values: What is drawn; NaN and infinite values are left out.
        include: Values that the axis shows in any case.
        least: Its least span. It is also at least a tenth of the largest absolute value, so that
            values that hardly differ look alike.
    """
    known = [value for value in values if math.isfinite(value)]
    shown = [*known, *include] or [0.0, 1.0]
    low, high = min(shown), max(shown)
    least = max(least, SHARE * max(abs(low), abs(high)))
    if high - low < least:
        middle = (low + high) / 2
        # A quantity that cannot be negative gets no negative axis.
        bottom = max(0.0, middle - least / 2) if low >= 0 else middle - least / 2
        low, high = bottom, bottom + least
    free = PAD * (high - low or 1.0)
    return low - free, high + free


def noise(curves: Iterable[Sequence[float]]) -> float:
    """Return the standard deviation of noise on curves, from the differences of neighbours."""
    steps = [
        abs(after - before)
        for curve in curves
        for before, after in pairwise(curve)
        if math.isfinite(before) and math.isfinite(after)
    ]
    # The median of |a - b| is 0.954 standard deviations for normal noise.
    return median(steps) / 0.954 if steps else 0.0


def spans_a_decade(values: Iterable[float]) -> bool:
    """Return whether positive values span a factor of 10."""
    known = [value for value in values if math.isfinite(value)]
    return bool(known) and min(known) > 0 and max(known) >= DECADE * min(known)


def log_span(values: Iterable[float]) -> Span:
    """Return the ends of a logarithmic axis for positive values."""
    known = [math.log10(value) for value in values if math.isfinite(value)]
    low, high = min(known), max(known)
    free = PAD * (high - low)
    return 10 ** (low - free), 10 ** (high + free)


def log_ticks(span: Span) -> list[float]:
    """Return the ticks of a logarithmic axis: powers of ten, and multiples where they are few."""
    low, high = (math.log10(end) for end in span)
    factors = next(factors for most, factors in BETWEEN if high - low <= most)
    powers = range(math.floor(low), math.ceil(high) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    return [tick for tick in ticks if span[0] <= tick <= span[1]]


def set_axis(
    figure: go.Figure,
    axis: str,
    span: Span,
    *,
    log: bool = False,
    names: Sequence[str] = (),
    row: int | None = None,
    col: int | None = None,
) -> None:
    """Give an axis, "x" or "y", its ends, and if it is logarithmic its ticks as people write them.

    With `names`, it has their places 1, 2, ... as ticks. `row` and `col` are for a figure that has
    several.
    """
    update = figure.update_xaxes if axis == "x" else figure.update_yaxes
    if names:
        update(
            type="linear", range=list(span), tickmode="array",
            tickvals=list(range(1, len(names) + 1)), ticktext=list(names), row=row, col=col,
        )  # fmt: skip
        return
    if not log:
        update(type="linear", range=list(span), row=row, col=col)
        return
    ticks = log_ticks(span)
    update(
        type="log", range=[math.log10(end) for end in span], tickmode="array", tickvals=ticks,
        ticktext=[shown_value(tick) for tick in ticks], row=row, col=col,
    )  # fmt: skip

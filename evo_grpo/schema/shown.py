"""Names and values of hyperparameters as people read them: "clip 0.2", "lr 1.4e-3"."""

from __future__ import annotations

import math
from typing import cast

SHORT_NAMES = {"clip_coef": "clip", "group_size": "group"}
SMALL = 0.01
"""Numbers below this are written with an exponent, so that learning rates are easy to compare."""


def short_name(name: str) -> str:
    """Return the name of a hyperparameter in columns and mutations."""
    return SHORT_NAMES.get(name, name)


def shown_value(value: object, digits: int = 3) -> str:
    """Return the value of a hyperparameter: 0.2, 1.4e-3, a name, true, low:high, else "-".

    A number just below 1, such as a decay rate, has the digits of its distance from 1.
    """
    if isinstance(value, tuple | list):
        return ":".join(shown_value(end, digits) for end in cast("list[object]", value))
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, int | float):
        return "-"
    if 0 < 1 - value < SMALL:
        return f"{value:.{digits - 1 - math.floor(math.log10(1 - value))}f}".rstrip("0")
    if not 0 < abs(value) < SMALL:
        return f"{value:.{digits}g}"
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}"

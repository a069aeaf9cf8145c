"""How a setting names a strategy: by its kind, by a mapping of its settings, or by a class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from pydantic import BeforeValidator, Discriminator

from evo_grpo.schema.group import Group
from evo_grpo.schema.problems import Problem, Problems
from evo_grpo.validation import shown

OWN = "module:Class"
"""What stands for the kind of a strategy of the user's own among those that are built in."""
OWN_PATTERN = r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*$"


def _kind(value: object) -> str | None:
    """Return the kind of a strategy, or of its settings."""
    if isinstance(value, Mapping):
        kind = cast("Mapping[str, object]", value).get("kind")
    else:
        kind = getattr(value, "kind", None)
    return OWN if isinstance(kind, str) and ":" in kind else None if kind is None else str(kind)


by_kind = Discriminator(_kind)
"""Chooses among strategies by their kind, and the one of the user's own by its colon."""


def kind_or_settings(default: str, method: str) -> BeforeValidator:
    """Return what a setting does before it is checked against the kinds it may have.

    A string `k` stands for `{kind: k}`, a mapping without a kind and an empty value have the
    default kind, and a strategy is left as it is.

    Args:
        default: The kind where none is given.
        method: What an object needs to be such a strategy.
    """

    def expand(value: object) -> object:
        if isinstance(value, str):
            return {"kind": value}
        if value is None:
            return {"kind": default}
        if isinstance(value, Mapping):
            return {"kind": default, **cast("Mapping[str, object]", value)}
        if isinstance(value, Group):
            return value
        if callable(getattr(value, method, None)):
            text = (
                f"expected a name that a file can hold, got {shown(value)}; name the class as "
                f'"{OWN}", or give the object to Population.train'
            )
            raise Problems(Problem((), text))
        plain = isinstance(value, bool | int | float | list | tuple)
        raise ValueError("a mapping" if plain else f"a strategy with a method {method}")

    return BeforeValidator(expand)

"""How a setting names a strategy: by its kind alone, or by a mapping of its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from pydantic import BeforeValidator


def kind_or_settings(default: str) -> BeforeValidator:
    """Return what a setting does before it is checked against the kinds it may have.

    A string `k` stands for `{kind: k}`, a mapping without a kind and an empty value have the
    default kind, and a strategy is left as it is.

    Args:
        default: The kind where none is given.
    """

    def expand(value: object) -> object:
        if isinstance(value, str):
            return {"kind": value}
        if value is None:
            return {"kind": default}
        if isinstance(value, Mapping):
            return {"kind": default, **cast("Mapping[str, object]", value)}
        return value

    return BeforeValidator(expand)

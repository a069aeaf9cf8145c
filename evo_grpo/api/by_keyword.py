"""Calls with unknown names, or with arguments by position: an error that says what to write."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import ParamSpec, TypeVar

from evo_grpo.errors import ConfigError
from evo_grpo.settings.keywords import unknown_keyword

P = ParamSpec("P")
R = TypeVar("R")


def by_keyword(function: Callable[P, R]) -> Callable[P, R]:
    """Check the names of a call before Python does, which knows no hints.

    The signature that editors and `help` show stays that of the function.
    """
    parameters = signature(function).parameters
    positional = [n for n, p in parameters.items() if p.kind is not Parameter.KEYWORD_ONLY]
    names = {name: None for name in parameters if name not in ("self", "cls")}
    name = getattr(function, "__name__", "")
    at_most = len(positional) - ("self" in parameters or "cls" in parameters)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        call = type(args[0]).__name__ if name == "__init__" else name
        if len(args) > len(positional):
            given = len(args) - len(positional) + at_most
            first = f"at most {at_most} by position and the others" if at_most else "arguments"
            raise ConfigError(
                f"{call}: expected {first} by name, got {given} by position; for AgileRL's "
                "positions change the import to: from evo_grpo.agilerl import ..."
            )
        for given_name in kwargs:
            if given_name not in names:
                raise unknown_keyword(call, given_name, names)
        return function(*args, **kwargs)

    return checked

"""A decorator with helpful errors for unknown keywords and positional arguments."""

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
    """Raise ConfigError with a suggestion for unknown keywords and surplus positional arguments.

    The signature of the function stays the same.
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
                f"{call}: expected {first} by name, got {given} by position; for the positional "
                "arguments of AgileRL, import it from evo_grpo.agilerl"
            )
        for given_name in kwargs:
            if given_name not in names:
                raise unknown_keyword(call, given_name, names)
        return function(*args, **kwargs)

    return checked

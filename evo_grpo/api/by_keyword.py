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
    most = sum(p.kind is not Parameter.KEYWORD_ONLY for p in parameters.values())
    names = {name: None for name in parameters if name not in ("self", "cls")}

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        own = function.__name__
        call = type(args[0]).__name__ if own == "__init__" else own
        if len(args) > most:
            raise ConfigError(
                f"{call}: expected at most {most - 1} arguments by position, got {len(args) - 1} "
                "by position; give the others by name. For the positions of AgileRL, import it "
                "from evo_grpo.agilerl"
            )
        for given in kwargs:
            if given not in names:
                raise unknown_keyword(call, given, names)
        return function(*args, **kwargs)

    return checked

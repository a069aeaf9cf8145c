"""Helpers of the adapters: quiet imports, checks of arguments, trial episodes."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import logging
import math
import re
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from evo_grpo.envs.messages import excerpt, listed, nearest
from evo_grpo.errors import ConfigError, EngineUnavailable, EvoGrpoError, RewardError

if TYPE_CHECKING:
    from evo_grpo.envs.episodes.multi_turn import MultiTurnEnv


OTHER_REMEDY = "install what it imports, or choose another environment"
#: Characters kept of another package's message, which may be a page long.
MESSAGE_CHARACTERS = 300

# Colours and rules, as in NLTK's message about a missing word list.
_ORNAMENTS = re.compile(r"\x1b\[[0-9;]*m|\*+")


def load_package(kind: str, module: str, package: str, remedy: str) -> ModuleType:
    """Import another package without what its import does to the process.

    Args:
        kind: The environment, for messages, e.g. "gem:game:Sudoku-v0".
        module: What to import.
        package: Its name in the package index.
        remedy: What to type when it is missing.

    Raises:
        EngineUnavailable: It is not installed, or fails to import.
    """
    try:
        with quiet():
            return importlib.import_module(module)
    except (ImportError, SyntaxError) as error:  # a package may be written for a newer Python
        raise EngineUnavailable(
            f'env.kind: "{kind}" needs {module} of the package {package}, which fails to import '
            f"({type(error).__name__}: {excerpt(str(error))}): {remedy}"
        ) from error


@contextmanager
def quiet() -> Generator[None]:
    """Keep another package's prints, warnings and logging set-up away from the user's terminal."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)


def check_name(kind: str, package: str, name: str, names: Iterable[str]) -> None:
    """Refuse a name that a package does not have, with the nearest that it has."""
    known = list(names)
    if name not in known:
        raise ConfigError(
            f'env.kind: {package} has no environment "{name}" (from "{kind}").'
            f"{nearest(name, known)} It has: {listed(known)}"
        )


def check_arguments(
    kind: str, args: Mapping[str, Any], made_by: Callable[..., Any], own: Iterable[str] = ()
) -> None:
    """Refuse arguments that an environment's class does not name.

    Several packages swallow unknown ones silently, so a misspelt setting would have no effect.

    Args:
        kind: The environment, for messages.
        args: `env.args`.
        made_by: The class or factory that takes them.
        own: Names that the adapter takes itself.

    Raises:
        ConfigError: A name is unknown; names the nearest.
    """
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(made_by).parameters.values()
    known = [*own, *(p.name for p in parameters if p.kind in named)]
    for name in args:
        if name not in known:
            raise ConfigError(
                f'env.args.{name}: no such argument of "{kind}".{nearest(name, known)} '
                f"It has: {listed(known)}"
            )


def check_call(kind: str, args: Mapping[str, Any], made_by: Callable[..., Any]) -> None:
    """Refuse arguments that do not fit a function of the user's: unknown ones, or too few."""
    signature = inspect.signature(made_by)
    try:
        signature.bind(**args)
    except TypeError as error:
        unknown = [name for name in args if name not in signature.parameters]
        near = nearest(unknown[0], signature.parameters) if unknown else ""
        raise ConfigError(
            f'env.args: "{kind}" is not called with {listed(args)}: {error}.{near} '
            f"It takes: {listed(signature.parameters)}"
        ) from error


def check_integer(name: str, value: object, low: int) -> int:
    """Return an integer of `env.args`, or refuse anything else and what is below `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"env.args.{name}: expected an integer >= {low}, got {value!r}")
    return value


def try_out(kind: str, make: Callable[[], MultiTurnEnv], seed: int) -> None:
    """Make an environment and begin an episode, so that what is missing shows before the run.

    Raises:
        EngineUnavailable: It fails: a file that it would download, a key that it wants, a bug.
    """
    try:
        env = make()
        try:
            env.reset(seed=seed)
        finally:
            close = getattr(env, "close", None)
            if close is not None:
                close()
    except EvoGrpoError:
        raise
    except Exception as error:  # another package's code may raise anything
        message = " ".join(_ORNAMENTS.sub(" ", str(error)).split())
        raise EngineUnavailable(
            f'env.kind: "{kind}" does not begin an episode here: {type(error).__name__}: '
            f"{message[:MESSAGE_CHARACTERS]}; install or download what it asks for, or choose "
            "another"
        ) from error


def finite(kind: str, reward: object) -> float:
    """Return an environment's reward as a float, or raise RewardError unless it is finite."""
    try:
        number = float(cast("float", reward))
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(f'environment "{kind}": expected a finite reward, got {reward!r}')
    return number

"""Defines `Family`, which the module of an environment family declares, and checks `env.args`.

A module of `builtin` or `adapters` is a family, whose name is that of the module. It declares
`FAMILY`, and has

    def build(name: str, env: EnvConfig, seed: int) -> Task                         # one turn
    def build(name: str, env: EnvConfig, seed: int) -> Callable[[], MultiTurnEnv]   # many turns

`name` is the part of `env.kind` after the colon ("chain_sum" in "reasoning_gym:chain_sum"), `env`
the group `env` of the configuration, and `seed` the run's seed. A family of many turns whose
settings name the user's code also has

    def check(name: str, env: EnvConfig, seed: int) -> None

which `evo-grpo check` calls in place of `build`, and which imports no user code. The module is
imported on first use, and imports its library in `build`.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, Literal, TypeVar

from evo_grpo.envs.data.tables import Split
from evo_grpo.envs.messages import listed, nearest
from evo_grpo.errors import ConfigError
from evo_grpo.schema.group import Group
from evo_grpo.schema.problems import Problems

G = TypeVar("G", bound=Group)


@dataclass(frozen=True)
class Family:
    """What the module of an environment family declares: how `env.kind` names it, what it reads.

    Attributes:
        named: What follows the name of the family in `env.kind`, after a colon: nothing, the name
            of an environment, or the user's code as "module:function".
        multi_turn: Whether episodes have several turns.
        reads: Which of env.train, env.validation and env.test the family reads. If it reads any of
            them and episodes have one turn, `build` takes a `Loader` as its last argument, and
            itself applies the template and the rewards of the configuration.
    """

    named: Literal["", "name", "code"] = ""
    multi_turn: bool = False
    reads: tuple[Split, ...] = ()


def arguments(args: Mapping[str, Any], kind: type[G]) -> G:
    """Return `env.args` as a group of settings; raise Problems whose paths begin with env.args."""
    try:
        return kind(**args)
    except Problems as error:
        raise error.below("env", "args") from None


def check_names(kind: str, args: Iterable[str], known: Iterable[str]) -> None:
    """Refuse an argument in `env.args` whose name is not in `known`; suggest the nearest name."""
    known = list(known)
    for name in args:
        if name not in known:
            raise ConfigError(
                f'env.args.{name}: no such argument of "{kind}".{nearest(name, known)} '
                f"It has: {listed(known)}"
            )


def check_arguments(
    kind: str, args: Mapping[str, Any], made_by: Callable[..., Any], own: Iterable[str] = ()
) -> None:
    """Refuse arguments that neither `made_by`, the environment's class, nor its adapter takes.

    `own` has the names of the adapter's arguments. Several packages ignore unknown arguments, so a
    misspelt argument would have no effect.
    """
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(made_by).parameters.values()
    check_names(kind, args, [*own, *(p.name for p in parameters if p.kind in by_name)])


def check_call(kind: str, args: Mapping[str, Any], made_by: Callable[..., Any]) -> None:
    """Refuse `args` if they cannot be passed as keywords to the user's function `made_by`."""
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


def check_name(kind: str, package: str, name: str, names: Iterable[str]) -> None:
    """Refuse the name of an environment that is not in a package's `names`; suggest the nearest."""
    available = list(names)
    if name not in available:
        raise ConfigError(
            f'env.kind: {package} has no environment "{name}" (from "{kind}").'
            f"{nearest(name, available)} It has: {listed(available)}"
        )

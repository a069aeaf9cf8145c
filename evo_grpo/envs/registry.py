"""The table of environment families: the kinds of `env.kind`, and the modules that build them.

To add a family, write a module with

    def build(name: str, env: EnvConfig, seed: int) -> Task                         # one turn
    def build(name: str, env: EnvConfig, seed: int) -> Callable[[], MultiTurnEnv]   # many turns

and add it to `FAMILIES`. If its settings name code, `build` of one turn takes a `Loader` as its
last argument, and a family of many turns has a second function, which imports no user code:

    def check(name: str, env: EnvConfig, seed: int) -> None

`name` is the part of `env.kind` after the colon ("chain_sum" in "reasoning_gym:chain_sum"), `env`
the group `env` of the configuration, and `seed` the run's seed. The module of a family is imported
on first use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from evo_grpo.envs.data.tables import require_columns
from evo_grpo.envs.from_config import configured_rewards, configured_template
from evo_grpo.envs.loading import Loader, load_function
from evo_grpo.envs.messages import listed, nearest
from evo_grpo.envs.prompting import with_prompting
from evo_grpo.envs.prompts import Template
from evo_grpo.envs.rewards.functions import required_columns
from evo_grpo.envs.task import SPLITS, Split, Task
from evo_grpo.errors import ConfigError
from evo_grpo.record.files import many_objects

if TYPE_CHECKING:
    from evo_grpo.envs.episodes.multi_turn import MultiTurnEnv
    from evo_grpo.settings import EnvConfig


@dataclass(frozen=True)
class Family:
    """A family of environments.

    Attributes:
        module: Name of the module in this package that holds its `build`.
        named: Whether its kinds are "<family>:<name>".
        multi_turn: Whether episodes have several turns.
        names_code: Whether its settings name modules, which `evo-grpo check` must not import.
        reads: Those of env.train, env.validation and env.test that it reads.
    """

    module: str
    named: bool = False
    multi_turn: bool = False
    names_code: bool = False
    reads: tuple[Split, ...] = ()


FAMILIES: dict[str, Family] = {
    "sums": Family("builtin.sums"),
    "foods": Family("builtin.foods"),
    "dataset": Family("data.dataset", names_code=True, reads=SPLITS),
    "reasoning_gym": Family("adapters.reasoning_gym", named=True),
    "gem": Family("adapters.gem", named=True, multi_turn=True),
    "textarena": Family("adapters.textarena", named=True, multi_turn=True, names_code=True),
    "verifiers": Family("adapters.verifiers", named=True, multi_turn=True, names_code=True),
    "trl": Family(
        "adapters.trl_style", named=True, multi_turn=True, names_code=True, reads=("train",)
    ),
    "python": Family("adapters.python_factory", named=True, multi_turn=True, names_code=True),
}

_REFUSED_OF_QUESTIONS = (
    (SPLITS, 'brings its own rows; those of files belong to kind "dataset"'),
    (("max_turns",), "asks one question, and takes arguments in env.args"),
)
_REFUSED_OF_EPISODES = (
    (
        (*SPLITS, "prompt", "conversation", "prompts", "few_shot", "thinking", "reward"),
        "brings its own prompts and rewards",
    ),
    (
        ("reward_failures", "reward_errors", "reward_style", "isolate"),
        "plays episodes in this process and drops those that fail",
    ),
)
"""Settings of `env` that tasks of one turn, and of several, do not have, and why."""


@many_objects()
def build_task(env: EnvConfig, seed: int, load: Loader = load_function) -> Task:
    """Build the single-turn task that a configuration names.

    For every kind, `prompt` or `conversation` replaces its template, and `reward` its reward
    functions. `seed` decides which rows are in which split. With `finding.find_function` as `load`,
    nothing is imported; the task then has rows and prompts but cannot score completions.
    """
    family, name = _checked(env, multi_turn=False)
    build = _module(family).build
    task: Task
    if family.names_code:  # `build` has used the configured template and rewards
        task = build(name, env, seed, load)
    else:
        task = _overridden(build(name, env, seed), env, load)
    return with_prompting(replace(task, calls=env.calls()), env.prompting(), seed)


def build_multi_turn(env: EnvConfig, seed: int) -> Callable[[], MultiTurnEnv]:
    """Return a factory of the multi-turn environment that a configuration names.

    An episode is begun here, so that errors come before a run. Environments share no state. The
    run's seed decides the episodes without a seed.
    """
    family, name = _checked(env, multi_turn=True)
    return _module(family).build(name, env, seed)


def check_multi_turn(env: EnvConfig, seed: int) -> None:
    """Check the multi-turn environment that a configuration names, without importing user code."""
    family, name = _checked(env, multi_turn=True)
    module = _module(family)
    look = module.check if family.names_code else module.build
    look(name, env, seed)


def is_multi_turn(kind: str) -> bool:
    """Return whether the environment of a kind has several turns."""
    family = FAMILIES.get(kind.partition(":")[0])
    return family is not None and family.multi_turn


def kinds() -> list[str]:
    """Return all kinds, e.g. "sums" and "gem:<name>"."""
    return [f"{key}:<name>" if family.named else key for key, family in FAMILIES.items()]


def _module(family: Family) -> Any:  # noqa: ANN401 -- a module
    return import_module(f"evo_grpo.envs.{family.module}")


def _checked(env: EnvConfig, *, multi_turn: bool) -> tuple[Family, str]:
    """Return the family of a kind and the name within it; refuse settings of other kinds."""
    key, colon, name = env.kind.partition(":")
    family = FAMILIES.get(key)
    if family is None or bool(name) != family.named or bool(colon) != family.named:
        raise ConfigError(
            f'env.kind: no task "{env.kind}".{nearest(env.kind, kinds())} Expected one of '
            f"{listed(kinds())}"
        )
    if family.multi_turn != multi_turn:
        raise ConfigError(
            f'env.kind: "{env.kind}" is played over several turns and has no rows; build it with '
            "build_multi_turn"
            if family.multi_turn
            else f'env.kind: "{env.kind}" asks one question and has rows; build it with build_task'
        )
    for settings, why in _REFUSED_OF_EPISODES if multi_turn else _REFUSED_OF_QUESTIONS:
        for setting in settings:
            # A resolved file holds the default of every setting, for all kinds.
            default = type(env).model_fields[setting].default
            value = getattr(env, setting)
            if value != default and setting not in family.reads:
                expected = "null" if default is None else f"the default {default!r}"
                raise ConfigError(
                    f'env.{setting}: "{env.kind}" {why}; expected {expected}, got {value!r}'
                )
    return family, name


def _overridden(task: Task, env: EnvConfig, load: Loader) -> Task:
    """Return a task with the template and the reward functions of the configuration, if any."""
    rewards = configured_rewards(env, load, task.rewards)
    needs = required_columns(rewards, env.thinking)
    template = configured_template(env)
    if template is not None:
        made = Template.of(template)
        needs |= made.columns()
        task = replace(task, prompt=made.text, conversation=made.conversation)
    for split, rows in task.splits.items() if needs else ():  # do not build rows for nothing
        # All rows of a built-in task have the same columns.
        require_columns(rows[:1], needs, f"{task.name}, {split}")
    return replace(task, rewards=rewards) if rewards else task

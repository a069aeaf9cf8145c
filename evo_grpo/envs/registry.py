"""Finds the environment family that an `env.kind` names, and builds its task or environment.

A family is a module of `builtin` or `adapters`; `family.py` says what it declares. Families are
found by the names of their files, so there is no list of them to extend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from evo_grpo.envs import messages, prompting, prompts
from evo_grpo.envs.data.tables import SPLITS, require_columns
from evo_grpo.envs.family import Family
from evo_grpo.envs.loading import Loader, configured_rewards, load_function
from evo_grpo.envs.rewards.functions import required_columns
from evo_grpo.envs.task import Task
from evo_grpo.errors import ConfigError
from evo_grpo.settings import EnvConfig

if TYPE_CHECKING:
    from evo_grpo.envs.episodes.multi_turn import MultiTurnEnv

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
"""Settings that an `env` of one turn (questions) or of several (episodes) must not set, and why."""


@cache
def _modules() -> dict[str, str]:
    """Return the name of each family -> the dotted path of its module."""
    folders = [Path(__file__).parent / name for name in ("builtin", "adapters")]
    return {
        module.name: f"evo_grpo.envs.{folder.name}.{module.name}"
        for folder in folders
        for module in iter_modules([str(folder)])
    }


def family_of(kind: str) -> Family | None:
    """Return the family that `kind`, an `env.kind`, names; None if no family has that name."""
    name = kind.partition(":")[0]
    return _module(name).FAMILY if name in _modules() else None


def _module(name: str) -> Any:  # noqa: ANN401 -- a module
    return import_module(_modules()[name])


def is_multi_turn(kind: str) -> bool:
    """Return whether the environments that `kind` names have several turns."""
    family = family_of(kind)
    return family is not None and family.multi_turn


def code_in(kind: str) -> str | None:
    """Return the user's code, "module:function", that `kind` names, or None."""
    family = family_of(kind)
    return kind.partition(":")[2] if family is not None and family.named == "code" else None


def kinds() -> list[str]:
    """Return the forms that `env.kind` can have, e.g. "sums" and "gem:<name>"."""
    families = {name: _module(name).FAMILY for name in _modules()}
    return [f"{name}:<name>" if family.named else name for name, family in families.items()]


def build_task(env: EnvConfig, seed: int, load: Loader = load_function) -> Task:
    """Build the single-turn task that a configuration names.

    For every kind, `env.prompt` or `env.conversation` replaces the template of the kind, and
    `env.reward` its reward functions. `seed` decides which rows are in which split. With
    `finding.find_function` as `load`, nothing is imported; the task then has rows and prompts but
    cannot score completions.
    """
    module, name = _checked(env, multi_turn=False)
    if module.FAMILY.reads:
        task: Task = module.build(name, env, seed, load)
    else:
        task = _overridden(module.build(name, env, seed), env, load)
    return prompting.with_prompting(replace(task, calls=env.calls()), env.prompting(), seed)


def build_multi_turn(env: EnvConfig, seed: int) -> Callable[[], MultiTurnEnv]:
    """Return a factory of the multi-turn environment that a configuration names.

    One episode is begun, so that errors are raised before the run. Environments share no state.
    `seed`, the run's seed, seeds the episodes that are begun without a seed.
    """
    module, name = _checked(env, multi_turn=True)
    return module.build(name, env, seed)


def check_multi_turn(env: EnvConfig, seed: int) -> None:
    """Check the multi-turn environment that a configuration names, without importing user code."""
    module, name = _checked(env, multi_turn=True)
    check = getattr(module, "check", module.build)
    check(name, env, seed)


def _checked(env: EnvConfig, *, multi_turn: bool) -> tuple[Any, str]:
    """Return the family module that `env.kind` names, and the name after its colon.

    Refuses a kind that contradicts `multi_turn`, and settings that the family does not read.
    """
    key, colon, name = env.kind.partition(":")
    family = family_of(env.kind)
    if family is None or bool(name) != bool(family.named) or bool(colon) != bool(family.named):
        nearest, listed = messages.nearest(env.kind, kinds()), messages.listed(kinds())
        problem = f'no task "{env.kind}".{nearest} Expected one of {listed}'
    elif family.multi_turn and not multi_turn:
        problem = (
            f'"{env.kind}" is played over several turns and has no rows; build it with '
            "build_multi_turn"
        )
    elif multi_turn and not family.multi_turn:
        problem = f'"{env.kind}" asks one question and has rows; build it with build_task'
    else:
        _check_settings(env, family)
        return _module(key), name
    raise ConfigError(f"env.kind: {problem}")


def _check_settings(env: EnvConfig, family: Family) -> None:
    """Refuse settings that the family does not read, unless they have their default values."""
    for settings, why in _REFUSED_OF_EPISODES if family.multi_turn else _REFUSED_OF_QUESTIONS:
        for setting in settings:
            # A resolved file holds the default of every setting, for all kinds.
            default = type(env).model_fields[setting].default
            value = getattr(env, setting)
            if value != default and setting not in family.reads:
                expected = "null" if default is None else f"the default {default!r}"
                raise ConfigError(
                    f'env.{setting}: "{env.kind}" {why}; expected {expected}, got {value!r}'
                )


def _overridden(task: Task, env: EnvConfig, load: Loader) -> Task:
    """Return a task with the template and the reward functions of the configuration, if any."""
    rewards = configured_rewards(env, load, task.rewards)
    needs = required_columns(rewards, env.thinking)
    template = prompting.configured_template(env)
    if template is not None:
        prompt_template = prompts.Template.of(template)
        needs |= prompt_template.columns()
        task = replace(task, templates={None: prompt_template})
    for split, rows in task.splits.items() if needs else ():  # do not build rows for nothing
        # All rows of a built-in task have the same columns.
        require_columns(rows[:1], needs, f"{task.name}, {split}")
    return replace(task, rewards=rewards) if rewards else task

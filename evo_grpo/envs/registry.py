"""A kind's name becomes a task, once.

Each kind's module is imported by its builder, and what only some kinds need where they need it: a
plan of sums loads no game, no numpy and no reader of files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from evo_grpo.envs.loading import load_function
from evo_grpo.envs.names import listed, nearest
from evo_grpo.envs.rewards.functions import RewardFunction, as_rewards
from evo_grpo.envs.task import SPLITS, Split, Task
from evo_grpo.errors import ConfigError

if TYPE_CHECKING:
    from evo_grpo.envs.episodes.multi_turn import MultiTurnEnv
    from evo_grpo.envs.prompts import Messages
    from evo_grpo.settings import EnvConfig

Builder = Callable[["EnvConfig", int], Task]
MultiTurnBuilder = Callable[["EnvConfig", int], Callable[[], "MultiTurnEnv"]]


def build_task(env: EnvConfig, seed: int) -> Task:
    """Build the task that a configuration names.

    Whatever the kind, `prompt` or `conversation` replaces its template, and `reward` its reward
    functions.

    Args:
        env: The configuration; paths in it are relative to the current directory.
        seed: The run's seed: which rows are in which split follows from it.

    Raises:
        ConfigError: Unknown kind or arguments, a malformed template, or a reward function that
            cannot be loaded.
        DataError: A dataset is missing, empty, too small to divide, or lacks a column.
        EngineUnavailable: The kind needs a package that is not installed.
    """
    prefix, colon, name = env.kind.partition(":")
    table = PREFIXES if colon else KINDS
    builder = table.get(prefix)
    if is_multi_turn(env.kind):
        raise ConfigError(
            f'env.kind: "{env.kind}" is played over several turns and has no rows; build it with '
            "build_multi_turn"
        )
    if builder is None or (colon and not name):
        raise _unknown(env.kind)
    if env.prompt is not None and env.conversation is not None:
        raise ConfigError(
            "env: expected prompt (a raw template) or conversation (messages for the chat "
            "template), got both"
        )
    if env.kind != "dataset":
        for split in SPLITS:
            if getattr(env, split) is not None:
                raise ConfigError(
                    f'env.{split}: belongs to kind "dataset", and the kind is "{env.kind}", which '
                    "brings its own rows"
                )
    default = type(env).model_fields["max_turns"].default
    # The default stands in every resolved file, whatever the kind.
    if env.max_turns != default:
        raise ConfigError(
            f'env.max_turns: "{env.kind}" asks one question, expected the default {default}, got '
            f"{env.max_turns}; leave it out, or give arguments of the task in env.args"
        )
    task = builder(env, seed)
    return task if env.kind == "dataset" else _overridden(task, env)


def build_multi_turn(env: EnvConfig, seed: int) -> Callable[[], MultiTurnEnv]:
    """Return a factory of the multi-turn environment that a configuration names.

    An episode is begun once, here, so that a missing package, file or setting shows before a run.

    Args:
        env: The configuration; paths in it are relative to the current directory.
        seed: The run's seed, for episodes that are begun without a seed of their own.

    Returns:
        Makes a new environment with each call; they share no state.

    Raises:
        ConfigError: Unknown kind, environment or arguments, or a setting of single-turn tasks.
        DataError: The rows of a TRL-style environment are missing or empty.
        EngineUnavailable: The environment needs a package or a download that is not there.
    """
    if not is_multi_turn(env.kind):
        if env.kind.partition(":")[0] in (*KINDS, *PREFIXES):
            raise ConfigError(
                f'env.kind: "{env.kind}" asks one question and has rows; build it with build_task'
            )
        raise _unknown(env.kind)
    prefix, _, name = env.kind.partition(":")
    if not name:
        raise _unknown(env.kind)
    for setting in ("train", "validation", "test", "prompt", "conversation", "reward"):
        if getattr(env, setting) is not None and (prefix, setting) != ("trl", "train"):
            raise ConfigError(
                f'env.{setting}: "{env.kind}" brings its own prompts and rewards, expected null, '
                f"got {getattr(env, setting)!r}"
            )
    return MULTI_TURN[prefix](env, seed)


def is_multi_turn(kind: str) -> bool:
    """Return whether a kind is played over several turns, so that `build_multi_turn` builds it."""
    return kind.partition(":")[0] in MULTI_TURN


def multi_turn_kinds() -> list[str]:
    """Return the kinds that `build_multi_turn` knows, as "gem:<name>"."""
    return [f"{prefix}:<name>" for prefix in MULTI_TURN]


def _unknown(kind: str) -> ConfigError:
    known = [*kinds(), *multi_turn_kinds()]
    return ConfigError(
        f'env.kind: no task "{kind}".{nearest(kind, known)} Expected one of {listed(known)}'
    )


def kinds() -> list[str]:
    """Return the kinds that `build_task` knows, prefix kinds as "reasoning_gym:<name>"."""
    return [*KINDS, *(f"{prefix}:<name>" for prefix in PREFIXES)]


def load_rewards(env: EnvConfig) -> tuple[RewardFunction, ...]:
    """Load the reward functions that a configuration names; empty when it names none."""
    if not env.reward:
        if env.reward_weights is not None:
            raise ConfigError("env.reward_weights: expected env.reward beside it, got none")
        return ()
    paths = [env.reward] if isinstance(env.reward, str) else env.reward
    return as_rewards([load_function(path) for path in paths], env.reward_weights)


def _sums(env: EnvConfig, seed: int) -> Task:
    from evo_grpo.envs.builtin import sums

    return sums.build(seed, **_checked(env, sums.build))


def _foods(env: EnvConfig, seed: int) -> Task:
    from evo_grpo.envs.builtin import foods

    return foods.build(seed, **_checked(env, foods.build))


def _reasoning_gym(env: EnvConfig, seed: int) -> Task:
    from evo_grpo.envs.adapters import reasoning_gym

    sizes = {f"{split}_size" for split in SPLITS}
    own = {name: value for name, value in env.args.items() if name in sizes}
    settings = {name: value for name, value in env.args.items() if name not in sizes}
    name = env.kind.partition(":")[2]
    return reasoning_gym.build(seed, name, settings, **_typed(own, reasoning_gym.build))


def _dataset(env: EnvConfig, seed: int) -> Task:
    from evo_grpo.envs.data import dataset

    rewards = load_rewards(env)
    if not rewards:
        raise ConfigError(
            'env.reward: kind "dataset" needs a reward function, expected "module:function", got '
            "none"
        )
    sources: dict[Split, Any] = {split: getattr(env, split) for split in SPLITS}
    if env.args:
        raise ConfigError(f'env.args: kind "dataset" takes none, got {listed(env.args)}')
    return dataset.build(seed, sources, _template(env), rewards)


def _gem(env: EnvConfig, seed: int) -> Callable[[], MultiTurnEnv]:
    from evo_grpo.envs.adapters import gem

    return gem.build(seed, env.kind.partition(":")[2], env.args)


def _textarena(env: EnvConfig, seed: int) -> Callable[[], MultiTurnEnv]:
    from evo_grpo.envs.adapters import textarena

    return textarena.build(seed, env.kind.partition(":")[2], env.args)


def _verifiers(env: EnvConfig, seed: int) -> Callable[[], MultiTurnEnv]:
    from evo_grpo.envs.adapters import verifiers

    return verifiers.build(seed, env.kind.partition(":")[2], env.args)


def _trl(env: EnvConfig, seed: int) -> Callable[[], MultiTurnEnv]:
    from evo_grpo.envs.adapters import trl_style
    from evo_grpo.envs.data.tables import read_rows

    rows = [] if env.train is None else read_rows(env.train, "train")
    return trl_style.build(seed, env.kind.partition(":")[2], env.args, rows)


def _python(env: EnvConfig, seed: int) -> Callable[[], MultiTurnEnv]:
    from evo_grpo.envs.adapters import python_factory

    return python_factory.build(seed, env.kind.partition(":")[2], env.args)


def _overridden(task: Task, env: EnvConfig) -> Task:
    rewards = load_rewards(env)
    needs: dict[str, str] = {}
    for reward in rewards:
        needs |= reward.required_columns()
    template = _template(env)
    if template is not None:
        from evo_grpo.envs.prompts import Template

        made = Template.of(template)
        needs |= made.columns()
        task = replace(task, prompt=made.text, conversation=made.conversation)
    if needs:  # else a plan does without the rows
        from evo_grpo.envs.data.tables import require_columns

        for split, rows in task.splits.items():
            # All rows of a built-in task are alike.
            require_columns(rows[:1], needs, f"{task.name}, {split}")
    return replace(task, rewards=rewards) if rewards else task


def _template(env: EnvConfig) -> str | Messages | None:
    if env.prompt is not None:
        return env.prompt
    if env.conversation is None:
        return None
    return [{"role": message.role, "content": message.content} for message in env.conversation]


def _checked(env: EnvConfig, builder: Callable[..., Task]) -> dict[str, Any]:
    """Return the arguments of `env.args`, each one known to the builder and of its type."""
    known = _keywords(builder)
    for name in env.args:
        if name not in known:
            raise ConfigError(
                f'env.args.{name}: no such argument of "{env.kind}".{nearest(name, known)} '
                f"It has: {listed(known)}"
            )
    return _typed(env.args, builder)


def _typed(args: Mapping[str, Any], builder: Callable[..., Task]) -> dict[str, Any]:
    known = _keywords(builder)
    for name, value in args.items():
        default = known[name].default
        # None stands for "as many as are left" and is a size; the others have a default of their
        # type.
        expected: type = int if default is None else type(default)
        if (default is None and value is None) or (
            isinstance(value, expected) and not isinstance(value, bool)
        ):
            continue
        raise ConfigError(
            f"env.args.{name}: expected {'a whole number' if expected is int else 'a text'}, got "
            f"{value!r}"
        )
    return dict(args)


def _keywords(builder: Callable[..., Task]) -> dict[str, Parameter]:
    parameters = signature(builder).parameters
    return {name: p for name, p in parameters.items() if p.kind is Parameter.KEYWORD_ONLY}


KINDS: dict[str, Builder] = {"sums": _sums, "foods": _foods, "dataset": _dataset}
PREFIXES: dict[str, Builder] = {"reasoning_gym": _reasoning_gym}
MULTI_TURN: dict[str, MultiTurnBuilder] = {
    "gem": _gem,
    "textarena": _textarena,
    "verifiers": _verifiers,
    "trl": _trl,
    "python": _python,
}

"""Read the group `env` of a configuration, for all families of environments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Literal, cast

from evo_grpo.envs.loading import REWARD, Loader, load_function, split_name
from evo_grpo.envs.messages import listed, nearest
from evo_grpo.envs.rewards.functions import RewardFunction, as_rewards
from evo_grpo.errors import ConfigError
from evo_grpo.settings.env import EnvConfig
from evo_grpo.settings.objects import PythonObject
from evo_grpo.settings.rewards import JudgeReward, ModelReward

if TYPE_CHECKING:
    from evo_grpo.envs.prompts import Messages


def checked_arguments(env: EnvConfig, taken_by: Callable[..., object]) -> dict[str, Any]:
    """Return `env.args`, checked against the keyword-only parameters of a function."""
    parameters = signature(taken_by).parameters.values()
    check_names(
        env.kind, env.args, [p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY]
    )
    return checked_types(env.args, taken_by)


def check_names(kind: str, args: Iterable[str], known: Iterable[str]) -> None:
    """Refuse names in `env.args` that an environment does not have, and suggest the nearest."""
    known = list(known)
    for name in args:
        if name not in known:
            raise ConfigError(
                f'env.args.{name}: no such argument of "{kind}".{nearest(name, known)} '
                f"It has: {listed(known)}"
            )


def checked_types(args: Mapping[str, Any], taken_by: Callable[..., object]) -> dict[str, Any]:
    """Check each of `env.args` against its default; a default of None is a number of rows."""
    for name, value in args.items():
        default = signature(taken_by).parameters[name].default
        expected: type = int if default is None else type(default)
        if (default is None and value is None) or (
            isinstance(value, expected) and not isinstance(value, bool)
        ):
            continue
        wanted = "an integer" if expected is int else "a string"
        raise ConfigError(f"env.args.{name}: expected {wanted}, got {value!r}")
    return dict(args)


def configured_rewards(
    env: EnvConfig, load: Loader = load_function, own: Sequence[RewardFunction] = ()
) -> tuple[RewardFunction, ...]:
    """Load the reward functions that a configuration names; `own` are those of the task.

    If it names none, a mapping `env.reward_weights` sets the weights of `own`.
    """
    if not env.reward:
        if env.reward_weights is None:
            return ()
        if not own or not isinstance(env.reward_weights, Mapping):
            raise ConfigError("env.reward_weights: expected env.reward beside it, got none")
        return as_rewards(own, env.reward_weights)
    return rewards_of(env.rewards, env.reward_weights, load, env.reward_style)


def rewards_of(
    given: object,
    weights: Sequence[float] | Mapping[str, float] | None,
    load: Loader = load_function,
    style: Literal["trl"] | None = None,
) -> tuple[RewardFunction, ...]:
    """Return one reward or several, with weights, as `as_rewards` does.

    Each is a function, its name, a `ModelReward`, a `JudgeReward`, or a mapping as in `env.reward`.
    """
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    several = cast("Sequence[object]", given) if is_list else [given]
    for one in several:
        if isinstance(one, str):
            split_name(one, REWARD)  # before any of them is imported
    return as_rewards([_reward(one, load) for one in several], weights, style)


def _reward(given: object, load: Loader) -> Any:  # noqa: ANN401 -- what `as_rewards` takes
    if isinstance(given, str):
        return load(given, REWARD)
    if isinstance(given, PythonObject):
        return given.value
    if isinstance(given, Mapping):
        (given,) = EnvConfig(kind="dataset", reward=cast("Any", given)).rewards
    # Imported here: they load slowly, and most runs have neither.
    if isinstance(given, ModelReward):
        from evo_grpo.envs.rewards.reward_model import RewardModel

        return RewardModel(given)
    if isinstance(given, JudgeReward):
        from evo_grpo.envs.rewards.judge import Judge

        return Judge(given)
    return given


def configured_template(env: EnvConfig) -> str | Messages | None:
    """Return the prompt template of a configuration, or None."""
    if env.conversation is None:
        return env.prompt
    if env.prompt is not None:
        raise ConfigError(
            "env: expected prompt (a raw template) or conversation (messages for the chat "
            "template), got both"
        )
    return [{"role": message.role, "content": message.content} for message in env.conversation]

"""Read the group `env` of a configuration, for all families of environments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from evo_grpo.envs.loading import REWARD, Loader, load_function, split_name
from evo_grpo.envs.messages import listed, nearest
from evo_grpo.envs.rewards.from_settings import scorer_of
from evo_grpo.envs.rewards.functions import RewardFunction, as_rewards
from evo_grpo.errors import ConfigError
from evo_grpo.settings.given import Given
from evo_grpo.settings.rewards import Reward

if TYPE_CHECKING:
    from evo_grpo.envs.prompts import Messages
    from evo_grpo.settings import EnvConfig


def checked_arguments(env: EnvConfig, taken_by: Callable[..., object]) -> dict[str, Any]:
    """Return `env.args`, checked against the keyword-only parameters of a function.

    Each argument has the type of the parameter's default; a default of None stands for an optional
    number of rows.
    """
    check_names(env.kind, env.args, _keywords(taken_by))
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
    """Return `env.args` after checking each against the type of the parameter's default."""
    known = _keywords(taken_by)
    for name, value in args.items():
        default = known[name].default
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
    """Load the reward functions that a configuration names, which may be none.

    Without names, a mapping `env.reward_weights` gives weights to those of the task, `own`.
    """
    if not env.reward:
        if env.reward_weights is None:
            return ()
        if not own or not isinstance(env.reward_weights, Mapping):
            raise ConfigError("env.reward_weights: expected env.reward beside it, got none")
        return as_rewards(own, env.reward_weights)
    for one in env.rewards:
        if isinstance(one, str):
            split_name(one, REWARD)  # before any of them is imported
    return as_rewards([_reward(one, load) for one in env.rewards], env.reward_weights)


def _reward(given: Reward, load: Loader) -> Any:  # noqa: ANN401 -- what `as_rewards` takes
    if isinstance(given, str):
        return load(given, REWARD)
    return given.value if isinstance(given, Given) else scorer_of(given)


def configured_template(env: EnvConfig) -> str | Messages | None:
    """Return the prompt template of a configuration, or None."""
    if env.prompt is not None:
        return env.prompt
    if env.conversation is None:
        return None
    return [{"role": message.role, "content": message.content} for message in env.conversation]


def _keywords(taken_by: Callable[..., object]) -> dict[str, Parameter]:
    parameters = signature(taken_by).parameters
    return {name: p for name, p in parameters.items() if p.kind is Parameter.KEYWORD_ONLY}

"""Read the rewards and the template in the group `env` of a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from evo_grpo.envs.loading import REWARD, Loader, load_function, split_name
from evo_grpo.envs.rewards.functions import RewardFunction, as_rewards
from evo_grpo.errors import ConfigError
from evo_grpo.settings.env import EnvConfig
from evo_grpo.settings.objects import PythonObject
from evo_grpo.settings.rewards import JudgeReward, ModelReward

if TYPE_CHECKING:
    from evo_grpo.envs.prompts import Messages


def configured_rewards(
    env: EnvConfig, load: Loader = load_function, own: Sequence[RewardFunction] = ()
) -> tuple[RewardFunction, ...]:
    """Load the reward functions that a configuration names, by default `own`, the task's.

    If none is named, a mapping `env.reward_weights` sets the weights of `own`.
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
    """Return one reward or several as reward functions with weights.

    A reward is a function, its name, a `ModelReward`, a `JudgeReward`, or a mapping as in
    `env.reward`.
    """
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    rewards = cast("Sequence[object]", given) if is_list else [given]
    for reward in rewards:
        if isinstance(reward, str):
            split_name(reward, REWARD)  # before any of them is imported
    return as_rewards([_reward(reward, load) for reward in rewards], weights, style)


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

"""Make the rewards that settings describe: reward models and judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from evo_grpo.envs.rewards.scorer import Scorer
from evo_grpo.settings.env import EnvConfig
from evo_grpo.settings.rewards import JudgeReward, ModelReward


def made_of(reward: object) -> Any:  # noqa: ANN401 -- what `as_rewards` takes
    """Return a reward, or a list of them, with a scorer for each description.

    A description is a `ModelReward`, a `JudgeReward`, or a mapping as in YAML's `env.reward`.

    Raises:
        ConfigError: A description is wrong, or a template in it is malformed.
    """
    if isinstance(reward, Sequence) and not isinstance(reward, str):
        return [made_of(one) for one in cast("Sequence[object]", reward)]
    if isinstance(reward, Mapping):
        (reward,) = EnvConfig(kind="dataset", reward=cast("Any", reward)).rewards
    return scorer_of(reward) if isinstance(reward, ModelReward | JudgeReward) else reward


def scorer_of(reward: ModelReward | JudgeReward) -> Scorer:
    """Return the scorer that settings describe; it loads and sends nothing yet."""
    # Imported here: a judge loads asyncio, and most runs have neither.
    if isinstance(reward, ModelReward):
        from evo_grpo.envs.rewards.reward_model import RewardModel

        return RewardModel(reward)
    from evo_grpo.envs.rewards.judge import Judge

    return Judge(reward)

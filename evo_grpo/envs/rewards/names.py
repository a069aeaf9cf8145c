"""Names of reward functions in settings: weights that are searched, and what fitness measures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from evo_grpo.envs.rewards.functions import unknown_reward
from evo_grpo.schema.hparams import REWARD_WEIGHT
from evo_grpo.schema.problems import Problem, Problems
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.settings.evolve import FitnessReward


def searched(names: Iterable[str]) -> list[str]:
    """Return the reward functions whose weights are among the names of hyperparameters."""
    return [name.removeprefix(REWARD_WEIGHT) for name in names if name.startswith(REWARD_WEIGHT)]


def weights_in(reward: str | Mapping[str, float]) -> Mapping[str, float]:
    """Return the weights that `evolve.fitness.reward` names."""
    return {reward: 1.0} if isinstance(reward, str) else reward


def check_rewards(
    weights: Mapping[str, float], space: HyperparameterConfig, reward: FitnessReward = None
) -> None:
    """Check the reward functions that the ranges and `evolve.fitness.reward` name.

    Args:
        weights: The weight of each reward function of the environment, by its name; empty if it
            does not name them.
        space: Ranges of the hyperparameters that may mutate.
        reward: `evolve.fitness.reward`.

    Raises:
        Problems: A function of that name does not exist, or its weight, with which the first agent
            begins, is outside of its range.
    """
    found: list[Problem] = []
    for name in searched(space.names()):
        path = ("evolve", "hyperparameters", f"{REWARD_WEIGHT}{name}")
        if name not in weights:
            found.append(Problem(path, unknown_reward(name, list(weights))))
            continue
        if not space[path[-1]].allows(weights[name]):
            text = (
                f"expected {space[path[-1]].expected()} as the weight of {name!r}, got "
                f"{weights[name]:g}; give such a one, or change evolve.hyperparameters.{path[-1]}"
            )
            found.append(Problem(("env", "reward_weights"), text))
    for name in () if reward is None else weights_in(reward):
        if name not in weights:
            text = unknown_reward(name, list(weights))
            found.append(Problem(("evolve", "fitness", "reward"), text))
    if found:
        raise Problems(*found)

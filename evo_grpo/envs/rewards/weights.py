"""Weights of reward functions by their names: what an agent learns from, and what fitness is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from evo_grpo.envs.protocol import Environment, Floats
from evo_grpo.envs.rewards.functions import unknown_reward
from evo_grpo.envs.rewards.names import check_rewards, searched, weights_in
from evo_grpo.errors import ConfigError
from evo_grpo.schema.hparams import REWARD_WEIGHT, Hparams
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.settings.evolve import FitnessReward


def reward_names(env: Environment[Any]) -> tuple[str, ...]:
    """Return the names of an environment's reward functions; none if it does not name them."""
    return tuple(getattr(env, "reward_names", ()))


def judge_cost(env: Environment[Any]) -> float:
    """Return what the judges of an environment have cost in this process; 0 without a judge."""
    spent = getattr(env, "spent_on_rewards", dict[str, float])()
    return spent.get("cost", 0.0)


def values_by_name(env: Environment[Any], rewards: Floats) -> list[dict[str, float | None]]:
    """Return each row of rewards (B, K) by the names of the functions; None for NaN."""
    names = reward_names(env) or [f"reward {n}" for n in range(1, rewards.shape[1] + 1)]
    return [
        {name: None if math.isnan(value) else value for name, value in zip(names, row, strict=True)}
        for row in rewards.tolist()
    ]


def weights_of(env: Environment[Any], own: Mapping[str, float]) -> Floats:
    """Return (K,) float64: the weights of an environment, some of them replaced by name."""
    if not own:
        return env.weights
    weights, names = env.weights.copy(), reward_names(env)
    for name, weight in own.items():
        weights[names.index(name)] = weight
    return weights


def named_weights(env: Environment[Any]) -> dict[str, float]:
    """Return the weights of an environment by the names of its reward functions."""
    names = reward_names(env)
    return dict(zip(names, env.weights.tolist(), strict=True)) if names else {}


def searched_weights(env: Environment[Any], space: HyperparameterConfig) -> dict[str, float]:
    """Return the environment's weight of each reward function whose weight is searched.

    Raises:
        Problems: See `check_rewards`.
    """
    weights = named_weights(env)
    check_rewards(weights, space)
    return {name: weights[name] for name in searched(space.names())}


def with_weights_of(
    env: Environment[Any], hparams: Hparams, weights: Mapping[str, float]
) -> Hparams:
    """Return an agent's hyperparameters with these weights where it has none of its own.

    Raises:
        ConfigError: The agent has a weight of a reward function that the environment lacks.
    """
    filled, names = hparams.with_weights(weights), reward_names(env)
    for name in filled.reward_weights:
        if name not in names:
            text = unknown_reward(name, names)
            raise ConfigError(f"{REWARD_WEIGHT}{name} of an agent: {text}")
    return filled


def fitness_rewards(
    env: Environment[Any], rewards: Floats, reward: FitnessReward
) -> tuple[Floats, Floats]:
    """Return the columns of rewards that count in fitness, and their weights.

    Takes rewards (B, K) and `evolve.fitness.reward`; returns (B, k) rewards and (k,) weights, which
    are all rewards with the weights of the environment if `reward` is None. A function without a
    weight is left out, so that a row in which only it has a reward counts as one without a reward.
    """
    if reward is None:
        return rewards, env.weights
    given = weights_in(reward)
    columns = [reward_names(env).index(name) for name in given]
    return rewards[:, columns], np.array(list(given.values()), dtype=np.float64)

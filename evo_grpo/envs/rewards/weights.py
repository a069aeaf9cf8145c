"""Selects weights of reward functions by name, for training and for fitness."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evo_grpo.envs.rewards.functions import unknown_reward
from evo_grpo.errors import ConfigError
from evo_grpo.schema.hparams import REWARD_WEIGHT, Hparams
from evo_grpo.schema.problems import Problem, Problems, nearest
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.settings.evolve import FITNESS, TOKENS, FitnessReward, ObjectiveConfig

if TYPE_CHECKING:
    from evo_grpo.envs.protocol import Environment, Floats  # for annotations only: numpy

MEASURES = (FITNESS, TOKENS)
"""Objectives that every task has, beside its reward functions."""


def searched(names: Iterable[str]) -> list[str]:
    """Return the reward functions whose weights are in `names`, the names of hyperparameters."""
    return [name.removeprefix(REWARD_WEIGHT) for name in names if name.startswith(REWARD_WEIGHT)]


def weights_in(reward: str | Mapping[str, float]) -> Mapping[str, float]:
    """Return `evolve.fitness.reward` as reward function -> weight; a name alone has weight 1."""
    return {reward: 1.0} if isinstance(reward, str) else reward


def check_rewards(
    weights: Mapping[str, float],
    space: HyperparameterConfig,
    reward: FitnessReward = None,
    objectives: Sequence[ObjectiveConfig] = (),
    stop: Mapping[str, float] | None = None,
) -> None:
    """Check names of reward functions in `space`, `evolve.fitness` and `population.stop`.

    `weights` has the weight of each reward function of the environment, and may be empty. A weight
    that is searched must lie in its range.
    """
    problems: list[Problem] = []
    for name in searched(space.names()):
        path = ("evolve", "hyperparameters", f"{REWARD_WEIGHT}{name}")
        if name not in weights:
            problems.append(Problem(path, unknown_reward(name, list(weights))))
            continue
        if not space[path[-1]].allows(weights[name]):
            text = (
                f"expected {space[path[-1]].expected()} as the weight of {name!r}, got "
                f"{weights[name]:g}; give such a one, or change evolve.hyperparameters.{path[-1]}"
            )
            problems.append(Problem(("env", "reward_weights"), text))
    names_by_setting = {
        ("evolve", "fitness", "reward"): {} if reward is None else weights_in(reward),
        ("population", "stop", "rewards"): stop or {},
    }
    problems += [
        Problem(path, unknown_reward(name, list(weights)))
        for path, names in names_by_setting.items()
        for name in names
        if name not in weights
    ]
    objective_names = [*weights, *MEASURES]
    for number, objective in enumerate(objectives):
        if objective_names.count(objective.name) == 1:
            continue
        near = nearest(objective.name, objective_names)
        text = f"expected one of {', '.join(objective_names)}, got {objective.name!r}"
        text += "" if near is None or near == objective.name else f"; did you mean {near!r}?"
        if objective.name in objective_names:
            text += ", which is a measure of every task too; rename the reward function"
        problems.append(Problem(("evolve", "fitness", "objectives", number, "name"), text))
    if problems:
        raise Problems(*problems)


def reward_names(env: Environment[Any]) -> tuple[str, ...]:
    """Return the names of an environment's reward functions, or () if it has no such names."""
    return tuple(getattr(env, "reward_names", ()))


def values_by_name(env: Environment[Any], rewards: Floats) -> list[dict[str, float | None]]:
    """Return, for each row of rewards (B, K), reward function -> reward, with None for NaN."""
    names = reward_names(env) or [f"reward {n}" for n in range(1, rewards.shape[1] + 1)]
    return [
        {name: None if math.isnan(value) else value for name, value in zip(names, row, strict=True)}
        for row in rewards.tolist()
    ]


def weights_of(env: Environment[Any], own: Mapping[str, float]) -> Floats:
    """Return an environment's weights, (K,) float64, updated by the weights in an agent's `own`."""
    if not own:
        return env.weights
    weights, names = env.weights.copy(), reward_names(env)
    for name, weight in own.items():
        weights[names.index(name)] = weight
    return weights


def named_weights(env: Environment[Any]) -> dict[str, float]:
    """Return reward function -> weight of an environment; {} if its functions have no names."""
    names = reward_names(env)
    return dict(zip(names, env.weights.tolist(), strict=True)) if names else {}


def searched_weights(env: Environment[Any], space: HyperparameterConfig) -> dict[str, float]:
    """Return the environment's weight of each reward function whose weight is searched."""
    weights = named_weights(env)
    check_rewards(weights, space)
    return {name: weights[name] for name in searched(space.names())}


def with_weights_of(
    env: Environment[Any], hparams: Hparams, weights: Mapping[str, float]
) -> Hparams:
    """Return `hparams` with the `weights` that it lacks; refuse weights of unknown functions."""
    agent_hparams, names = hparams.with_weights(weights), reward_names(env)
    for name in agent_hparams.reward_weights:
        if name not in names:
            text = unknown_reward(name, names)
            raise ConfigError(f"{REWARD_WEIGHT}{name} of an agent: {text}")
    return agent_hparams


def fitness_rewards(
    env: Environment[Any], rewards: Floats, reward: FitnessReward
) -> tuple[Floats, Floats]:
    """Return the columns of rewards that count in fitness, (B, k), and their weights, (k,).

    `rewards` are (B, K), and `reward` is `evolve.fitness.reward`; None counts all columns with the
    weights of the environment. Otherwise only the functions that `reward` names count, so a row has
    no reward if all of these abstained.
    """
    import numpy as np  # slow to load for `evo-grpo check`, which only checks names

    if reward is None:
        return rewards, env.weights
    counted = weights_in(reward)
    columns = [reward_names(env).index(name) for name in counted]
    return rewards[:, columns], np.array(list(counted.values()), dtype=np.float64)

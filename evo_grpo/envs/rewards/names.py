"""Names of reward functions in settings: weights that are searched, and what fitness measures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from evo_grpo.envs.rewards.functions import unknown_reward
from evo_grpo.schema.hparams import REWARD_WEIGHT
from evo_grpo.schema.problems import Problem, Problems, nearest
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.settings.evolve import FITNESS, TOKENS, FitnessReward, ObjectiveConfig

MEASURES = (FITNESS, TOKENS)
"""Objectives that every task has, beside its reward functions."""


def searched(names: Iterable[str]) -> list[str]:
    """Return the reward functions whose weights are among the names of hyperparameters."""
    return [name.removeprefix(REWARD_WEIGHT) for name in names if name.startswith(REWARD_WEIGHT)]


def weights_in(reward: str | Mapping[str, float]) -> Mapping[str, float]:
    """Return the weights that `evolve.fitness.reward` names."""
    return {reward: 1.0} if isinstance(reward, str) else reward


def check_rewards(
    weights: Mapping[str, float],
    space: HyperparameterConfig,
    reward: FitnessReward = None,
    objectives: Sequence[ObjectiveConfig] = (),
    stop: Mapping[str, float] | None = None,
) -> None:
    """Check the names of reward functions in ranges, `evolve.fitness` and `population.stop`.

    Args:
        weights: The weight of each reward function of the environment, by its name; empty if it
            does not name them.
        space: Ranges of the hyperparameters that may mutate.
        reward: `evolve.fitness.reward`.
        objectives: `evolve.fitness.objectives`.
        stop: `population.stop.rewards`.

    Raises:
        Problems: A function of that name does not exist, its weight, with which the first agent
            begins, is outside of its range, or two objectives are the same.
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
    named = {
        ("evolve", "fitness", "reward"): {} if reward is None else weights_in(reward),
        ("population", "stop", "rewards"): stop or {},
    }
    found += [
        Problem(path, unknown_reward(name, list(weights)))
        for path, names in named.items()
        for name in names
        if name not in weights
    ]
    for number, one in enumerate(objectives):
        path = ("evolve", "fitness", "objectives", number, "name")
        if one.name not in (*weights, *MEASURES):
            known = [*weights, *MEASURES]
            near = nearest(one.name, known)
            hint = "" if near is None else f"; did you mean {near!r}?"
            text = f"expected one of {', '.join(known)}, got {one.name!r}{hint}"
            found.append(Problem(path, text))
        elif one.name in weights and one.name in MEASURES:
            text = (
                f"expected a name with one meaning, got {one.name!r}, which is a measure of every "
                "task and a reward function of this one; rename the function"
            )
            found.append(Problem(path, text))
    found += _same(weights, reward, objectives)
    if found:
        raise Problems(*found)


def _same(
    weights: Mapping[str, float], reward: FitnessReward, objectives: Sequence[ObjectiveConfig]
) -> Iterator[Problem]:
    """Yield an objective that orders agents as the objective `fitness` does."""
    counted = weights if reward is None else weights_in(reward)
    parts = [name for name, weight in counted.items() if weight]
    if FITNESS not in {one.name for one in objectives} or len(parts) != 1:
        return
    for number, one in enumerate(objectives):
        if one.name in parts:
            text = (
                f"expected another objective than fitness, which measures {one.name!r} alone; "
                "remove one of them"
            )
            yield Problem(("evolve", "fitness", "objectives", number, "name"), text)

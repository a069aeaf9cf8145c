"""Names of reward functions in settings: weights that are searched, and what fitness measures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from evo_grpo.envs.rewards.functions import unknown_reward
from evo_grpo.schema.hparams import REWARD_WEIGHT
from evo_grpo.schema.problems import Problem, Problems
from evo_grpo.settings.evolve import FitnessReward


def searched(names: Iterable[str]) -> list[str]:
    """Return the reward functions whose weights are among the names of hyperparameters."""
    return [name.removeprefix(REWARD_WEIGHT) for name in names if name.startswith(REWARD_WEIGHT)]


def weights_in(reward: str | Mapping[str, float]) -> Mapping[str, float]:
    """Return the weights that `evolve.fitness.reward` names."""
    return {reward: 1.0} if isinstance(reward, str) else reward


def check_reward_names(
    names: Sequence[str], hyperparameters: Iterable[str], reward: FitnessReward
) -> None:
    """Check the reward functions that hyperparameters and `evolve.fitness.reward` name.

    Args:
        names: The reward functions of the environment; none if it does not name them.
        hyperparameters: Names of the hyperparameters that may mutate.
        reward: `evolve.fitness.reward`.

    Raises:
        Problems: A function of that name does not exist.
    """
    found = [
        *(
            Problem(("evolve", "hyperparameters", f"{REWARD_WEIGHT}{name}"), text)
            for name, text in _unknown(searched(hyperparameters), names)
        ),
        *(
            Problem(("evolve", "fitness", "reward"), text)
            for _, text in _unknown(() if reward is None else weights_in(reward), names)
        ),
    ]
    if found:
        raise Problems(*found)


def _unknown(given: Iterable[str], names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each name that is not one of `names`, with a message."""
    yield from ((name, unknown_reward(name, names)) for name in given if name not in names)

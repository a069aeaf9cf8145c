"""Settings that ask for more rows than the task of a run has."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

from evo_grpo.envs.task import Task
from evo_grpo.record.wording import count
from evo_grpo.settings import DoubtfulSetting, FitnessConfig


def shortages(rows: Mapping[str, int], prompts: int, fitness: FitnessConfig) -> Iterator[str]:
    """Yield one sentence for each setting that exceeds the rows of its split.

    Args:
        rows: Number of rows of the splits train, validation and test; a split that is missing has
            no end, as the seeds of episodes.
        prompts: Prompts of a GRPO step.
        fitness: The settings of evaluations.
    """
    for key, split, wanted, effect in (
        (
            "algorithm.prompts_per_step",
            "train",
            prompts,
            "a step uses some of them twice; add rows, or lower it",
        ),
        (
            "evolve.fitness.prompts",
            "validation",
            fitness.prompts,
            "selection uses only these; add rows, or take more samples of each with "
            "evolve.fitness.samples",
        ),
        (
            "evolve.fitness.test_prompts",
            "test",
            fitness.test_prompts,
            "the final result uses only these; add rows, or take more samples of each with "
            "evolve.fitness.test_samples",
        ),
    ):
        number = rows.get(split, wanted)
        if wanted > number:
            yield f"{key} is {wanted}, but {split} has {count(number, 'row')}: {effect}"


def warn_of_shortages(
    task: object, prompts: int, fitness: FitnessConfig, *, tests: bool = True
) -> None:
    """Warn of each setting that exceeds the rows of its split.

    Args:
        task: The `Task` of a run; anything else, as several turns have, has no rows that end.
        prompts: Prompts of a GRPO step.
        fitness: The settings of evaluations.
        tests: Whether the winner is evaluated on the test split.
    """
    splits = task.splits if isinstance(task, Task) else {}
    rows = {str(split): len(own) for split, own in splits.items() if tests or split != "test"}
    for text in shortages(rows, prompts, fitness):
        warnings.warn(text, DoubtfulSetting, stacklevel=4)

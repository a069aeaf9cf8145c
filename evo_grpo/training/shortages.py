"""Warns of settings that ask for more rows than a task has, and refuses too many processes."""

import warnings
from collections.abc import Iterable, Iterator, Mapping

from evo_grpo.envs.data.tables import DatasetRow, LazyRows
from evo_grpo.envs.prompts import Template
from evo_grpo.envs.task import Task
from evo_grpo.errors import ConfigError
from evo_grpo.population.ranks.team import Team
from evo_grpo.record.wording import count
from evo_grpo.settings import DoubtfulSetting, FitnessConfig, RunConfig
from evo_grpo.settings.cross_checks import divides_quantized

FEWEST = 8
"""A run warns if its validation split has fewer different prompts than this."""


def shortages(rows: Mapping[str, int], prompts: int, fitness: FitnessConfig) -> Iterator[str]:
    """Yield one sentence for each setting that asks for more prompts than its split has rows.

    `rows` has the number of rows by split; a missing split is unlimited, as episode seeds are.
    `prompts` is the number of prompts of a GRPO step.
    """
    for key, split, asked_for in (
        ("algorithm.prompts_per_step", "train", prompts),
        ("evolve.fitness.prompts", "validation", fitness.prompts),
        ("evolve.fitness.test_prompts", "test", fitness.test_prompts),
    ):
        number = rows.get(split, asked_for)
        if asked_for > number:
            remedy = "only these are used; add rows, or lower it"
            yield f"{key} is {asked_for}, but {split} has {count(number, 'row')}: {remedy}"


def few_prompts(task: Task) -> Iterator[str]:
    """Yield a sentence if a validation split has too few different prompts to tell agents apart.

    Tasks with generated rows, or with one prompt for all their rows, are not checked.
    """
    if any(isinstance(rows, LazyRows) for rows in task.splits.values()):
        return
    number, template = min(
        (
            (_different(task.splits["validation"], candidate), candidate)
            for candidate in task.templates.values()
        ),
        key=lambda pair: pair[0],
    )
    if number < FEWEST and (number > 1 or _different(task.splits["train"], template) > 1):
        yield (
            f"validation has {count(number, 'different prompt')}: equal prompts count as one, and "
            f"the differences between agents are uncertain with fewer than {FEWEST}; add rows"
        )


def _different(rows: Iterable[DatasetRow], template: Template) -> int:
    """Return the number of different prompts that rows have, counted up to `FEWEST`."""
    prompts: set[str] = set()
    for row in rows:
        prompts.add(template.plain(row))
        if len(prompts) == FEWEST:
            break
    return len(prompts)


def warn_of_shortages(
    task: object, prompts: int, fitness: FitnessConfig, *, tests: bool = True
) -> None:
    """Warn if a split has too few rows or prompts; the test split is checked only with `tests`.

    `prompts` is the number of prompts of a GRPO step.
    """
    single_turn = task if isinstance(task, Task) else None
    splits = {} if single_turn is None else single_turn.splits
    rows = {str(split): len(items) for split, items in splits.items() if tests or split != "test"}
    few = () if single_turn is None else few_prompts(single_turn)
    for text in (*shortages(rows, prompts, fitness), *few):
        warnings.warn(text, DoubtfulSetting, stacklevel=4)


def check_ranks(config: RunConfig, team: Team) -> None:
    """Refuse more processes than can have agents, and several if the base cannot be divided."""
    most = config.most_processes
    problem = divides_quantized(config.engine) if team.size > 1 else ""
    if not problem and team.size > most and config.engine.zero is None:
        problem = (
            f"ranks: expected at most {most} processes, one for each of engine.shards and for each "
            f"agent of the smallest round, got {team.size}; start fewer, or another run with "
            f"engine.shards and the last of population.sizes of {team.size} or more"
        )
    if problem:
        raise ConfigError(problem)

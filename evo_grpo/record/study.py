"""A run as a study in a database: what it is called there, and what the study says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from evo_grpo.settings import RunConfig

_NAME_CHARACTERS = 400
"""Optuna keeps names of at most 512 characters."""


@dataclass(frozen=True)
class RunStudy:
    """The study of a run.

    Attributes:
        config: The settings of the run.
        id: Its id.
        new_id: Gives the run another id, which it has from then on.
    """

    config: RunConfig
    id: str
    new_id: Callable[[], str]

    @property
    def name(self) -> str:
        """Name of the study: two runs of one name are not one study."""
        return study_name(self.config, self.id)

    @property
    def attributes(self) -> dict[str, Any]:
        """What the study says of the run."""
        config, fitness = self.config, self.config.evolve.fitness
        return {
            "name": config.name,
            "run_id": self.id,
            "base": config.model.name,
            "task": config.env.kind,
            "algorithm": config.algorithm.kind,
            "objective": (
                f"fitness: mean reward on {fitness.prompts} validation prompts x {fitness.samples}"
            ),
            "agents": config.population.size,
            "rounds": config.population.rounds,
            "seed": config.seed,
            "evo_grpo": _version(),
        }


def study_name(config: RunConfig, id: str) -> str:
    """Return the name of the study of a run in a database."""
    return f"{config.name[:_NAME_CHARACTERS]}-{id}"


def _version() -> str:
    try:
        return version("evo-grpo")
    except PackageNotFoundError:  # run from the sources
        return "unknown"

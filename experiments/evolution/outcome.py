"""What a run of the package on the settings of an arm found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arms import nested

from evo_grpo import run
from evo_grpo import settings as configuration
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.summary import read_summary


@dataclass(frozen=True)
class Outcome:
    """What a driver found.

    Attributes:
        rounds: Of the run, or of the best trial.
        summary: Its summary.json.
        curve: Best fitness after each round, or each equal share of the rows.
    """

    rounds: Sequence[RoundRecord]
    summary: dict[str, Any]
    curve: Sequence[float]


def played(settings: dict[str, Any], folder: Path, **options: Any) -> Outcome:
    """Run the package on settings by dotted path, and read what it wrote."""
    run(configuration.from_dict(nested(settings)), out=folder, **options)
    rounds, summary = read_rounds(folder), read_summary(folder)
    assert summary is not None
    return Outcome(rounds, summary, [best_fitness(record) for record in rounds])


def best_fitness(record: RoundRecord) -> float:
    """Return the greatest fitness of a round."""
    return max(agent.score.mean for agent in record.agents if agent.score is not None)

"""What `evo-grpo run --compare` adds to a finished run: its result, and how it is counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from evo_grpo.errors import CheckpointError
from evo_grpo.record.folder import read_result
from evo_grpo.record.names import COMPARISON
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.summary import MeanReward
from evo_grpo.schema.validated import validated

EVOLVED = "evolved"
"""The name of the run itself among the arms of its comparison."""


@dataclass(frozen=True)
class _Arm:
    name: str
    folder: str
    tokens: Mapping[str, int]
    test: MeanReward


@dataclass(frozen=True)
class _Comparison:
    agents: int
    split: str
    arms: list[_Arm]


_SCHEMA = TypeAdapter(_Comparison)


def read_comparison(run: str | Path) -> dict[str, Any] | None:
    """Return what RUN/compare/compare.json holds, None before a comparison is finished.

    Raises:
        CheckpointError: The file is damaged.
    """
    return read_comparison_of(Path(run) / COMPARISON, Path(run))


def read_comparison_of(file: Path, run: Path) -> dict[str, Any] | None:
    """Return what a file holds that was written as a compare.json; see `read_comparison`.

    Args:
        file: The file.
        run: The run folder.
    """
    command = f"resume {run} --compare"
    data = read_result(file, "the result of a comparison", command)
    if data is None:
        return None
    try:
        validated(_SCHEMA, data)
    except ValueError as error:
        raise CheckpointError(
            f"{file}: {error}; delete it, then write it again with: evo-grpo {command}"
        ) from error
    return data


def tokens_by_purpose(rounds: Sequence[RoundRecord], summary: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens of a run by purpose; those of the test are the same for all runs.

    Args:
        rounds: Its rounds, first to last.
        summary: What its summary.json holds.
    """
    return {
        "training": sum(agent.tokens for record in rounds for agent in record.agents),
        "evaluation": sum(r.evaluation_tokens for r in rounds) + summary["final_tokens"],
    }


def tokens_to_train(rounds: Sequence[RoundRecord], summary: Mapping[str, Any]) -> int:
    """Return the tokens on which a population trains that is evaluated once, at its end.

    Args:
        rounds: The rounds of the run that it is compared with, first to last.
        summary: What that run's summary.json holds.
    """
    return sum(tokens_by_purpose(rounds, summary).values()) - rounds[0].evaluation_tokens


def compared_arm(
    name: str, folder: str, rounds: Sequence[RoundRecord], summary: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a comparison says of one of its arms.

    Args:
        name: Its name.
        folder: Its run folder, relative to that of the run.
        rounds: Its rounds, first to last.
        summary: What its summary.json holds.
    """
    return {
        "name": name,
        "folder": folder,
        "tokens": tokens_by_purpose(rounds, summary),
        "test": {key: summary["best"][key] for key in ("mean", "se", "n")},
    }

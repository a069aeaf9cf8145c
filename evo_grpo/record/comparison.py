"""What `evo-grpo run --compare` adds to a finished run: its result, and how it is counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from evo_grpo.record.folder import read_result
from evo_grpo.record.names import COMPARISON
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.summary import MeanReward

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


def read_comparison(run: str | Path, file: Path | None = None) -> dict[str, Any] | None:
    """Return what a file written as compare.json holds, by default the one in RUN/compare.

    None before a comparison is finished.
    """
    file = file or Path(run) / COMPARISON
    found = read_result(file, _SCHEMA, "the result of a comparison", f"resume {run} --compare")
    return None if found is None else found[0]


def tokens_by_purpose(rounds: Sequence[RoundRecord], summary: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens of a run by purpose; those of the test are the same for all runs."""
    return {
        "training": sum(agent.tokens for record in rounds for agent in record.agents),
        "evaluation": sum(r.evaluation_tokens for r in rounds) + summary["final_tokens"],
    }


def tokens_to_train(rounds: Sequence[RoundRecord], summary: Mapping[str, Any]) -> int:
    """Return the tokens on which a population trains that is evaluated once, at its end.

    Rounds and summary are those of the run that it is compared with.
    """
    return sum(tokens_by_purpose(rounds, summary).values()) - rounds[0].evaluation_tokens


def compared_arm(
    name: str, folder: str, rounds: Sequence[RoundRecord], summary: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a comparison says of one of its arms; its folder is relative to the run's."""
    return {
        "name": name,
        "folder": folder,
        "tokens": tokens_by_purpose(rounds, summary),
        "test": {key: summary["best"][key] for key in ("mean", "se", "n")},
    }

"""summary.json: how a run ended. It is written last, and marks the run as finished."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from evo_grpo.record.folder import read_result
from evo_grpo.record.names import SUMMARY
from evo_grpo.record.plain import RelativePath


@dataclass(frozen=True, kw_only=True)
class MeanReward:
    """A score as results hold it: mean reward, its standard error, and the number of prompts.

    `per_prompt` has the mean reward of each prompt, in the order of the split; null where all
    reward functions abstained, empty in results of evo-grpo 0.2 and before.
    """

    mean: float | None
    se: float | None
    n: int
    per_prompt: list[float | None] = field(default_factory=list[float | None])


@dataclass(frozen=True, kw_only=True)
class _Best(MeanReward):
    kind: Literal["last", "archive", "mean"]
    agent: int | None
    member: int
    parents: list[int]
    fitness: float | None
    checkpoint: RelativePath | None

    def __post_init__(self) -> None:
        is_mean = self.kind == "mean"
        if is_mean != (self.agent is None) or (is_mean and len(self.parents) != 2):
            raise ValueError("expected an agent, or the mean of two members")


@dataclass(frozen=True)
class _Candidate:
    kind: str
    agent: int | None
    member: int
    parents: list[int]
    validation: MeanReward | None
    tie: bool | None


@dataclass(frozen=True)
class _Earlier:
    rounds: int
    base: MeanReward
    best: _Best
    gain: float | None
    gain_se: float | None


@dataclass(frozen=True)
class _Summary:
    split: str
    base: MeanReward
    best: _Best
    gain: float | None
    gain_se: float | None
    rounds: int
    wall_seconds: float
    candidates: list[_Candidate]
    final_tokens: int
    files: Mapping[RelativePath, str] = field(default_factory=dict[str, str])
    stopped: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    earlier: list[_Earlier] = field(default_factory=list[_Earlier])


_SCHEMA = TypeAdapter(_Summary)


def read_summary(path: str | Path) -> dict[str, Any] | None:
    """Return what summary.json holds, or None before the run's end.

    Returns:
        - split, base, best, gain, gain_se, rounds, wall_seconds: see `judge.judge`
        - candidates: see `judge.candidates_summary`
        - final_tokens: tokens sampled to compare them
        - stopped: rules of population.stop that ended it, with their values; empty where none did,
          missing where an earlier version wrote it
        - files: SHA-256 by path of the files of a winner that no round recorded
        - earlier: how the run had ended before it was given more rounds
    """
    return read_summary_of(Path(path) / SUMMARY)


def read_summary_of(file: Path) -> dict[str, Any] | None:
    """Return what one file holds that was written as a summary.json; see `read_summary`."""
    found = read_result(file, _SCHEMA, "the summary of the run", f"resume {file.parent}")
    return None if found is None else found[0]


def earlier_end(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the summary of a run with more rounds keeps of an earlier one."""
    return {name.name: summary[name.name] for name in fields(_Earlier)}

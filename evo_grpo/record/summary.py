"""summary.json: the result of a run. It is written last, and marks the run as finished."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from evo_grpo.evolve.claims import TEST_LEVEL, claims
from evo_grpo.evolve.intervals import interval
from evo_grpo.record.folder import read_result
from evo_grpo.record.names import EARLIER, SUMMARY
from evo_grpo.record.plain import RelativePath
from evo_grpo.types import Score


@dataclass(frozen=True, kw_only=True)
class _Mean:
    mean: float | None
    se: float | None
    n: int


@dataclass(frozen=True, kw_only=True)
class MeanReward(_Mean):
    """A score in a result file: mean reward, its standard error, and the number of prompts.

    `per_prompt` has the mean reward of each prompt, in the order of the split: null where all
    reward functions abstained. It is empty in the result of a comparison. `rewards` has each reward
    function by itself, without its weight.
    """

    per_prompt: list[float | None] = field(default_factory=list[float | None])
    rewards: Mapping[str, _Mean] = field(default_factory=dict[str, _Mean])


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
class _Passes:
    k: int
    correct: float
    base: MeanReward
    best: MeanReward
    gain: float | None
    gain_se: float | None


@dataclass(frozen=True)
class _Judge:
    answers: float
    input_tokens: float
    output_tokens: float
    cost: float


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
    stopped: Mapping[str, float | Mapping[str, float] | None] = field(
        default_factory=dict[str, float | Mapping[str, float] | None]
    )
    earlier: list[_Earlier] = field(default_factory=list[_Earlier])
    passes: list[_Passes] = field(default_factory=list[_Passes])
    judge: _Judge | None = None


_SCHEMA = TypeAdapter(_Summary)


def read_summary(path: str | Path) -> dict[str, Any] | None:
    """Return the content of summary.json, or None before the end of the run.

    Returns:
        - split, base, best, gain, gain_se, rounds, wall_seconds: see `judge.judge`
        - candidates: see `judge.candidates_summary`
        - final_tokens: tokens sampled to compare the candidates
        - stopped: the rules of population.stop that ended the run, with their values; empty if
          no rule did
        - files: SHA-256 by path of the files of a mean that won
        - judge: answers of judges, their input_tokens and output_tokens, and their cost; missing
          in a run without a judge
        - earlier: the results of the run before it was extended to more rounds
        - passes: see `judge.judge`
    """
    return read_summary_of(Path(path) / SUMMARY)


def read_summary_of(file: Path) -> dict[str, Any] | None:
    """Return the content of a file written as summary.json; see `read_summary`."""
    found = read_result(file, _SCHEMA, "the summary of the run", f"resume {file.parent}")
    return None if found is None else found[0]


def earlier_ends(folder: Path) -> list[dict[str, Any]]:
    """Return what the summary of a run keeps of those before each extension, oldest first."""
    found = {
        int(match[1]): read_summary_of(path)
        for path in folder.glob("summary.rounds-*.json")
        if (match := EARLIER.fullmatch(path.name))
    }
    return [earlier_end(end) for _, end in sorted(found.items()) if end is not None]


def earlier_end(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a summary that the summary of the extended run keeps."""
    return {name.name: summary[name.name] for name in fields(_Earlier)}


def gain_interval(summary: Mapping[str, Any]) -> tuple[float, float]:
    """Return the 95% interval (low, high) of the winner's gain over the base model.

    It is paired, by Student's t over the prompts that both answered; both ends are NaN if there are
    fewer than two.
    """
    gain, error = summary["gain"], summary["gain_se"]
    if gain is None or error is None:
        return math.nan, math.nan
    base, best = summary["base"], summary["best"]
    pairs = zip(base["per_prompt"], best["per_prompt"], strict=False)
    return interval(gain, error, sum(None not in pair for pair in pairs))


def gain_sign(summary: Mapping[str, Any]) -> int:
    """Return 1 if the winner is shown to be ahead of the base model, -1 if behind, else 0."""
    return claims([score_of(summary[name]) for name in ("best", "base")], 0, TEST_LEVEL)[1]


def score_of(part: Mapping[str, Any]) -> Score:
    """Return a mean reward of a result file as a score; null becomes NaN."""
    values = [part["mean"], part["se"], *part.get("per_prompt", ())]
    mean, error, *rewards = (math.nan if value is None else float(value) for value in values)
    return Score(mean, error, part["n"], tuple(rewards))

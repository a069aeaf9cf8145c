"""Finds the winner of a run, and reads summary.json, whose presence marks the run as finished."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from evo_grpo.evolve.claims import TEST_LEVEL, claims
from evo_grpo.evolve.intervals import interval
from evo_grpo.record.family import ancestry, best_ever, front, leading_agent
from evo_grpo.record.folder import read_result
from evo_grpo.record.names import SUMMARY
from evo_grpo.record.plain import RelativePath
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.types import Score


@dataclass(frozen=True, kw_only=True)
class _Mean:
    mean: float | None
    se: float | None
    n: int


@dataclass(frozen=True, kw_only=True)
class MeanReward(_Mean):
    """The mean reward in a result file, with its standard error and number of prompts.

    `per_prompt` has the mean reward of each prompt, null if all reward functions abstained; it is
    empty in a comparison. `rewards` has the mean of each reward function without its weight.
    """

    per_prompt: list[float | None] = field(default_factory=list[float | None])
    rewards: Mapping[str, _Mean] = field(default_factory=dict[str, _Mean])


@dataclass(frozen=True, kw_only=True)
class _WinnerEntry(MeanReward):
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
    """The content of summary.json.

    Attributes:
        final_tokens: Tokens sampled to compare the candidates.
        files: SHA-256 by path of the files of a mean that won.
        stopped: The rules of population.stop that ended the run, with their values.
    """

    split: str
    base: MeanReward
    best: _WinnerEntry
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
    passes: list[_Passes] = field(default_factory=list[_Passes])
    judge: _Judge | None = None


_SCHEMA = TypeAdapter(_Summary)


def read_summary(folder: str | Path, name: str = SUMMARY) -> dict[str, Any] | None:
    """Return the content of summary.json, or None before the end of the run.

    `_Summary` lists the keys; `training.judge` and `training.writer` write them. With `name`, read
    a summary that the run had before it was extended.
    """
    content = "the summary of the run"
    result = read_result(Path(folder) / name, _SCHEMA, content, f"resume {folder}")
    return None if result is None else result[0]


def gain_interval(summary: Mapping[str, Any]) -> tuple[float, float]:
    """Return the 95% interval (low, high) of the winner's gain over the base model.

    It is paired, by Student's t over the prompts that both answered; NaN with fewer than two.
    """
    gain, error = summary["gain"], summary["gain_se"]
    if gain is None or error is None:
        return math.nan, math.nan
    base, best = summary["base"], summary["best"]
    pairs = zip(base["per_prompt"], best["per_prompt"], strict=False)
    return interval(gain, error, sum(None not in pair for pair in pairs))


def gain_sign(summary: Mapping[str, Any]) -> int:
    """Return the sign of the winner's gain over the base model: 1, -1, or 0 if not significant."""
    return claims([score_of(summary[name]) for name in ("best", "base")], 0, TEST_LEVEL)[1]


def score_of(part: Mapping[str, Any]) -> Score:
    """Return a mean reward of a result file as a score; null becomes NaN."""
    values = [part["mean"], part["se"], *part.get("per_prompt", ())]
    mean, error, *rewards = (math.nan if value is None else float(value) for value in values)
    return Score(mean, error, part["n"], tuple(rewards))


@dataclass(frozen=True)
class SelectedAgent:
    """An agent of a run as it was after one of its rounds, or the mean of two agents.

    Attributes:
        kind: "last" (the best of the last round), "archive" (the best of all rounds, as winner of
            the final comparison), "mean" (of two survivors, as winner), "ever" (the best of all
            rounds, if the caller asked for it) or "named" (any other that the caller named).
        agent: Number of the agent, None for a mean.
        checkpoint: Path relative to the run folder; empty if none was saved.
        lines: The records of the agent and its ancestors, from first round to last. A mean has two
            such lines, the better parent's first; any other agent has one.
        rounds: The number of finished rounds of the run.
        final: Score in the final comparison, on validation prompts with new draws; None if
            finalists were not compared.
        test: Score on the test prompts, NaN if no reward was finite; None if the agent was not
            tested. **This is the score of the winner**: nothing was selected on these prompts.
        tie: Whether the agent lost the final comparison without being significantly worse.
    """

    kind: str
    agent: int | None
    member: int
    checkpoint: str
    lines: Sequence[Sequence[AgentRecord]]
    rounds: int
    final: Score | None = None
    test: Score | None = None
    tie: bool = False

    @property
    def record(self) -> AgentRecord:
        """The latest record in the agent's line; for a mean, the better parent's latest record."""
        return self.lines[0][-1]

    @property
    def fitness(self) -> Score | None:
        """The validation score in the agent's `record`; None if the agent failed or is a mean."""
        return None if self.agent is None else self.record.score

    @property
    def name(self) -> str:
        """The agent in words, such as "agent 1 as it was after round 2"."""
        if self.kind == "mean":
            first, second = (line[-1].agent for line in self.lines)
            return f"the mean of agents {first} and {second}"
        earlier = self.kind == "archive" or self.record.round + 1 < self.rounds
        when = f" as it was after round {self.record.round + 1}" if earlier else ""
        return f"agent {self.agent}{when}"


def winner_of(
    rounds: Sequence[RoundRecord], summary: Mapping[str, Any] | None
) -> SelectedAgent | None:
    """Return the winner of a run; before the end, the agent that would win now.

    Before the end, this is the best of the agents that train on after the last round, or, with
    several objectives, the agent of the front with the greatest fitness. None if no round is
    finished, or no agent of an unfinished run has a finite fitness.
    """
    if not rounds:
        return None
    if summary is None:
        front_agents = front(rounds)
        best = front_agents[0] if front_agents else leading_agent(rounds[-1])
        if best is None:
            return None
        return select("last" if best.round == rounds[-1].round else "archive", rounds, best)
    best = summary["best"]
    entry = next(
        (candidate for candidate in summary["candidates"] if candidate["kind"] == best["kind"]), {}
    )
    winner = _finalist(rounds, {**entry, **best})
    return replace(winner, checkpoint=best["checkpoint"] or "", test=score_of(best))


def rivals_of(
    rounds: Sequence[RoundRecord], summary: Mapping[str, Any] | None
) -> tuple[SelectedAgent, ...]:
    """Return the finalists that lost the final comparison; none if nothing was compared."""
    if summary is None or not rounds:
        return ()
    # By kind: the best of the last round and the best ever may be one member at two times.
    return tuple(
        _finalist(rounds, candidate)
        for candidate in summary["candidates"]
        if candidate["validation"] is not None and candidate["kind"] != summary["best"]["kind"]
    )


def _finalist(rounds: Sequence[RoundRecord], finalist: Mapping[str, Any]) -> SelectedAgent:
    """Return a finalist; `finalist` is an entry of `candidates` in summary.json."""
    score = finalist.get("validation")
    return SelectedAgent(
        kind=finalist["kind"],
        agent=finalist["agent"],
        member=finalist["member"],
        checkpoint="",
        lines=winning_lines(rounds, finalist),
        rounds=len(rounds),
        final=None if score is None else score_of(score),
        tie=bool(finalist.get("tie")),
    )


def select(kind: str, rounds: Sequence[RoundRecord], record: AgentRecord) -> SelectedAgent:
    """Return the agent of a record, as it was after the record's round, with its ancestors."""
    line = ancestry(rounds[: record.round + 1], record.member)
    checkpoint = record.checkpoint or ""
    return SelectedAgent(kind, record.agent, record.member, checkpoint, [line], len(rounds))


def winning_lines(
    rounds: Sequence[RoundRecord], best: Mapping[str, Any]
) -> list[list[AgentRecord]]:
    """Return the records of a winner ("best" of summary.json) and of its ancestors.

    A mean has two lists, the better parent's first; any other winner has one. The list of an agent
    from the archive ends in the round after which it was archived.
    """
    if best["kind"] == "mean":
        return [ancestry(rounds, parent) for parent in best["parents"]]
    line = ancestry(rounds, best["member"])
    ever = best_ever(rounds) if best["kind"] == "archive" else None
    return [[record for record in line if ever is None or record.round <= ever.round] or line]


def winner_files(
    rounds: Sequence[RoundRecord], best: Mapping[str, Any], files: Mapping[str, str]
) -> dict[str, str]:
    """Return the SHA-256 of the winner's files by path below its checkpoint.

    `files` is the entry "files" of summary.json: the digests of the winner's files if the winner is
    the mean of two agents.
    """
    if best["kind"] == "mean":
        below = f"{best['checkpoint']}/"
        return {name.removeprefix(below): d for name, d in files.items() if name.startswith(below)}
    ever = best_ever(rounds) if best["kind"] == "archive" else None
    checkpoint = best["checkpoint"] if ever is None else ever.checkpoint
    by_round = (record.files_of(str(checkpoint)) for record in rounds)
    return next((digests for digests in by_round if digests), {})

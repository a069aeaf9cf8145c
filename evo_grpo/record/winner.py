"""The winner of a run: which agent it is, the rounds that led to it, and its scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evo_grpo.record.family import ancestry, best_ever, leading_agent
from evo_grpo.record.summary import score_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from evo_grpo.record.records import AgentRecord, RoundRecord
    from evo_grpo.types import Score


@dataclass(frozen=True)
class SelectedAgent:
    """An agent of a run as it was after one of its rounds, or the mean of two agents.

    Attributes:
        kind: "last" (the best of the last round), "archive" (the best of all rounds, where it won
            the final comparison), "mean" (of two survivors, where it won), "ever" (the best of all
            rounds, asked for by the caller) or "named" (any other that the caller named).
        agent: The number of the agent, None for a mean.
        member: The member id.
        checkpoint: Its checkpoint, relative to the run folder; empty where none was saved.
        lines: The records that led to it, first round to last: one line, or two for a mean, with
            that of the better parent first.
        rounds: The number of finished rounds of the run.
        final: Its score in the final comparison, on validation prompts with new draws; None where
            finalists were not compared.
        test: Its score on the test prompts, NaN where its rewards were not finite; None where it
            was not judged. **This is the score of the winner**: nothing was selected on these
            prompts.
    """

    kind: str
    agent: int | None
    member: int
    checkpoint: str
    lines: Sequence[Sequence[AgentRecord]]
    rounds: int
    final: Score | None = None
    test: Score | None = None

    @property
    def record(self) -> AgentRecord:
        """Its record in the round after which it is taken; of a mean, that of the better parent."""
        return self.lines[0][-1]

    @property
    def fitness(self) -> Score | None:
        """Its score on the validation prompts of that round; None for a mean or a failed agent."""
        return None if self.agent is None else self.record.score

    @property
    def name(self) -> str:
        """The agent in words, such as "agent 1 as it was after round 2"."""
        if self.kind == "mean":
            first, second = (line[-1].agent for line in self.lines)
            return f"the mean of agents {first} and {second}"
        earlier = self.kind == "archive" or self.record.round + 1 < self.rounds
        return f"agent {self.agent}{_after(self.record) if earlier else ''}"


@dataclass(frozen=True)
class Rival:
    """A finalist that lost the final comparison.

    Attributes:
        kind: "last", "archive" or "mean", as in `SelectedAgent`.
        member: The member id.
        name: The finalist in words.
        final: Its score in the final comparison, NaN where it was not finite.
        tie: Whether a paired test cannot separate it from the winner.
    """

    kind: str
    member: int
    name: str
    final: Score
    tie: bool


def winner_of(
    rounds: Sequence[RoundRecord], summary: Mapping[str, Any] | None
) -> SelectedAgent | None:
    """Return the winner of a finished run; before the end, the best agent of the last round.

    None where no round is finished, or no agent of an unfinished run has a finite fitness.
    `summary` is the content of summary.json.
    """
    if not rounds:
        return None
    if summary is None:
        best = leading_agent(rounds[-1])
        return None if best is None else select("last", rounds, best)
    best = summary["best"]
    own = next((one for one in summary["candidates"] if one["kind"] == best["kind"]), None)
    return SelectedAgent(
        kind=best["kind"],
        agent=best["agent"],
        member=best["member"],
        checkpoint=best["checkpoint"] or "",
        lines=winning_lines(rounds, best),
        rounds=len(rounds),
        final=None if own is None or own["validation"] is None else score_of(own["validation"]),
        test=score_of(best),
    )


def select(kind: str, rounds: Sequence[RoundRecord], record: AgentRecord) -> SelectedAgent:
    """Return an agent as it was after the round of a record."""
    line = ancestry(rounds[: record.round + 1], record.member)
    checkpoint = record.checkpoint or ""
    return SelectedAgent(kind, record.agent, record.member, checkpoint, [line], len(rounds))


def rivals_of(
    rounds: Sequence[RoundRecord], summary: Mapping[str, Any] | None
) -> tuple[Rival, ...]:
    """Return the finalists that lost the final comparison; none where nothing was compared."""
    if summary is None or not rounds:
        return ()
    # By kind: the best of the last round and the best ever may be one member at two times.
    return tuple(
        Rival(
            kind=one["kind"],
            member=one["member"],
            name=_finalist_name(rounds, one),
            final=score_of(one["validation"]),
            tie=bool(one["tie"]),
        )
        for one in summary["candidates"]
        if one["validation"] is not None and one["kind"] != summary["best"]["kind"]
    )


def winning_lines(
    rounds: Sequence[RoundRecord], best: Mapping[str, Any]
) -> list[list[AgentRecord]]:
    """Return the rounds that led to the winner, one list for each adapter of a mean.

    For a mean these are the lines of both parents, the better one first. The line of the best ever
    ends in the round in which it was the best. `best` is the value of that key in summary.json.
    """
    if best["kind"] == "mean":
        return [ancestry(rounds, parent) for parent in best["parents"]]
    line = ancestry(rounds, best["member"])
    ever = best_ever(rounds) if best["kind"] == "archive" else None
    return [line if ever is None else [one for one in line if one.round <= ever.round]]


def winner_files(
    rounds: Sequence[RoundRecord], best: Mapping[str, Any], files: Mapping[str, str]
) -> dict[str, str]:
    """Return the SHA-256 of the winner's files, by their paths below its checkpoint.

    `files` are those of summary.json, which has the files of a mean; no round recorded them.
    """
    if best["kind"] == "mean":
        below = f"{best['checkpoint']}/"
        return {name.removeprefix(below): d for name, d in files.items() if name.startswith(below)}
    ever = best_ever(rounds) if best["kind"] == "archive" else None
    checkpoint = best["checkpoint"] if ever is None else ever.checkpoint
    found = [record.files_of(str(checkpoint)) for record in rounds]
    return next((one for one in found if one), {})


def _finalist_name(rounds: Sequence[RoundRecord], one: Mapping[str, Any]) -> str:
    if one["kind"] == "mean":
        agents = {record.member: record.agent for record in rounds[-1].agents}
        first, second = (agents.get(parent, "?") for parent in one["parents"])
        return f"the mean of agents {first} and {second}"
    ever = best_ever(rounds) if one["kind"] == "archive" else None
    return f"agent {one['agent']}{'' if ever is None else _after(ever)}"


def _after(record: AgentRecord) -> str:
    return f" as it was after round {record.round + 1}"

"""The winner of a run: which agent it is, the rounds that led to it, and its scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from evo_grpo.record.family import ancestry, best_ever, front, leading_agent
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
        lines: The records that led to it, each line from first round to last. A mean has two lines,
            first that of the better parent; all others have one.
        rounds: The number of finished rounds of the run.
        final: Its score in the final comparison, on validation prompts with new draws; None if
            finalists were not compared.
        test: Its score on the test prompts, NaN if its rewards were not finite; None if it
            was not judged. **This is the score of the winner**: nothing was selected on these
            prompts.
        tie: Whether it is a finalist that lost without the winner being shown to be ahead of it.
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
        """Its record in the round of the choice; for a mean, the record of the better parent."""
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
        when = f" as it was after round {self.record.round + 1}" if earlier else ""
        return f"agent {self.agent}{when}"


def winner_of(
    rounds: Sequence[RoundRecord], summary: Mapping[str, Any] | None
) -> SelectedAgent | None:
    """Return the winner of a finished run; before the end, the best agent of the last round.

    With several objectives, the winner is the agent of the front with the greatest fitness. None if
    no round is finished, or no agent of an unfinished run has a finite fitness.
    `summary` is the content of summary.json.
    """
    if not rounds:
        return None
    if summary is None:
        several = front(rounds)
        best = several[0] if several else leading_agent(rounds[-1])
        if best is None:
            return None
        return select("last" if best.round == rounds[-1].round else "archive", rounds, best)
    best = summary["best"]
    own = next((one for one in summary["candidates"] if one["kind"] == best["kind"]), {})
    winner = _finalist(rounds, {**own, **best})
    return replace(winner, checkpoint=best["checkpoint"] or "", test=score_of(best))


def rivals_of(
    rounds: Sequence[RoundRecord], summary: Mapping[str, Any] | None
) -> tuple[SelectedAgent, ...]:
    """Return the finalists that lost the final comparison; none if nothing was compared."""
    if summary is None or not rounds:
        return ()
    # By kind: the best of the last round and the best ever may be one member at two times.
    return tuple(
        _finalist(rounds, one)
        for one in summary["candidates"]
        if one["validation"] is not None and one["kind"] != summary["best"]["kind"]
    )


def _finalist(rounds: Sequence[RoundRecord], one: Mapping[str, Any]) -> SelectedAgent:
    """Return a finalist; `one` is an entry of `candidates` in summary.json."""
    score = one.get("validation")
    return SelectedAgent(
        kind=one["kind"],
        agent=one["agent"],
        member=one["member"],
        checkpoint="",
        lines=winning_lines(rounds, one),
        rounds=len(rounds),
        final=None if score is None else score_of(score),
        tie=bool(one.get("tie")),
    )


def select(kind: str, rounds: Sequence[RoundRecord], record: AgentRecord) -> SelectedAgent:
    """Return an agent as it was after the round of a record."""
    line = ancestry(rounds[: record.round + 1], record.member)
    checkpoint = record.checkpoint or ""
    return SelectedAgent(kind, record.agent, record.member, checkpoint, [line], len(rounds))


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
    return [[one for one in line if ever is None or one.round <= ever.round] or line]


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

"""Which agent of a run is taken, as it was after which round: the winner, or one that is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.record.family import ancestry, best_ever
from evo_grpo.record.folder import expect_run, read_rounds
from evo_grpo.record.leaderboard import best_agent
from evo_grpo.record.names import BEST
from evo_grpo.record.summary import read_summary
from evo_grpo.record.winner import finalist_name, winner_files, winning_lines

if TYPE_CHECKING:
    from evo_grpo.record.records import AgentRecord, RoundRecord

SHOWN_ROUNDS = 8
"""Rounds of which an error lists the checkpoints that are there, the latest."""


@dataclass(frozen=True)
class Choice:
    """An agent of a run, as it was after a round.

    Attributes:
        run: The run folder.
        rounds: Its finished rounds, first to last.
        summary: What its summary.json holds, None before its end.
        best: The agent in the form of summary.json's `best`. Its `kind` is "last", "archive" or
            "mean" of a winner, "ever" of the best over all rounds, "named" of any other.
        files: SHA-256 of the checkpoint's files, by their paths below it.
        lines: The rounds that led to it, one list for each adapter that it is made of.
    """

    run: Path
    rounds: Sequence[RoundRecord]
    summary: Mapping[str, Any] | None
    best: Mapping[str, Any]
    files: Mapping[str, str]
    lines: Sequence[Sequence[AgentRecord]]

    @property
    def checkpoint(self) -> str:
        """Its checkpoint, relative to the run folder; empty where there is none."""
        return str(self.best["checkpoint"] or "")

    @property
    def record(self) -> AgentRecord:
        """Its record in the round after which it is taken; of a mean that of the better parent."""
        return self.lines[0][-1]

    @property
    def is_winner(self) -> bool:
        """Whether it is what summary.json judged on the test split."""
        if self.summary is None:
            return False
        theirs = self.summary["best"]
        return self.best is theirs or (
            theirs["kind"] != "mean"
            and self.best["kind"] != "mean"
            and theirs["member"] == self.best["member"]
            and winning_lines(self.rounds, theirs)[0][-1].round == self.record.round
        )

    @property
    def better_ever(self) -> AgentRecord | None:
        """The best over all rounds, where it had a greater fitness and no comparison refused it."""
        ever = best_ever(self.rounds)
        compared = [] if self.summary is None else self.summary["candidates"]
        if ever is None or any(one["kind"] == "archive" for one in compared):
            return None
        own, score = self.record.score, ever.score
        if self.best["kind"] == "mean" or score is None:
            return None
        return ever if own is None or score.mean > own.mean else None

    @property
    def name(self) -> str:
        """It in words: "agent 1", "agent 1 as it was after round 2", "the mean of agents 0, 1"."""
        if self.best["kind"] in ("ever", "named"):
            last = self.record.round == self.rounds[-1].round
            when = "" if last else f" as it was after round {self.record.round + 1}"
            return f"agent {self.best['agent']}{when}"
        return finalist_name(self.rounds, self.best)

    @property
    def title(self) -> str:
        """Its name, with its member id."""
        return f"{self.name}, member {self.best['member']}"


def choose_of(
    run: str | Path,
    agent: int | None = None,
    member: int | None = None,
    round: int | None = None,
    *,
    best_ever: bool = False,
) -> Choice:
    """Find an agent of a run whose checkpoint is there: the winner where nobody is named.

    The winner of a finished run is that of its final comparison: the best agent of the last round,
    the best ever, or the mean of two survivors. Before the end it is the best of the last round.

    Args:
        run: The run folder.
        agent: An agent, by its number.
        member: One life of an agent, by its id.
        round: After which round (0-based); None is the last one that it finished.
        best_ever: Take the agent with the greatest fitness of all rounds.

    Raises:
        RunNotFoundError: It is no run folder.
        CheckpointError: No round is finished, no agent has a fitness, the checkpoint was removed,
            or a record is damaged.
        ConfigError: There is no such agent, member or round, or names exclude each other.
    """
    folder = expect_run(run)
    named = {"agent": agent is not None, "member": member is not None, "best ever": best_ever}
    given = [name for name, is_given in named.items() if is_given]
    if best_ever and round is not None:
        given.append("round")
    if len(given) > 1:
        raise ConfigError(
            f"whom to take: expected one of agent, member and best ever, got "
            f"{' and '.join(given)}; leave all but one out"
        )
    rounds, summary = read_rounds(folder), read_summary(folder)
    if not given and round is None:
        return _winner(folder, rounds, summary)
    if not rounds:
        raise _nothing(folder)
    record = _best_ever(rounds) if best_ever else _named(rounds, agent, member, round)
    found = Choice(
        run=folder,
        rounds=rounds,
        summary=summary,
        best=_as_best("ever" if best_ever else "named", record),
        files=rounds[record.round].files_of(str(record.checkpoint)),
        lines=[ancestry(rounds[: record.round + 1], record.member)],
    )
    return _where_it_is(found)


def _winner(
    folder: Path, rounds: Sequence[RoundRecord], summary: Mapping[str, Any] | None
) -> Choice:
    if summary is not None:
        best = summary["best"]
    elif rounds and (record := best_agent(_without_those_that_left(rounds[-1]))) is not None:
        best = _as_best("last", record)
    else:
        raise _nothing(folder)
    files = winner_files(rounds, best, {} if summary is None else summary["files"])
    lines = winning_lines(rounds, best)
    return Choice(folder, rounds, summary, best, files, lines)


def _nothing(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder}: nothing to export, expected a finished round with a ranked agent; go on "
        f"with: evo-grpo resume {folder}"
    )


def _as_best(kind: str, record: AgentRecord) -> dict[str, Any]:
    """Return an agent in the form of summary.json's `best`."""
    names = ("agent", "member", "checkpoint")
    return {"kind": kind, **{name: getattr(record, name) for name in names}}


def _without_those_that_left(record: RoundRecord) -> RoundRecord:
    """Return a round with the agents that go on: a collapsed one leaves, however good it was."""
    collapsed = {one.agent for one in record.decisions if one.kind == "collapsed"}
    # Its place may be taken: then there is a member of that number, and it is another one.
    left = {member.agent for member in record.members} - collapsed
    return replace(record, agents=tuple(one for one in record.agents if one.agent in left))


def _best_ever(rounds: Sequence[RoundRecord]) -> AgentRecord:
    best = best_ever(rounds)
    if best is None:
        raise CheckpointError(
            "best ever: expected an agent with a finite fitness in one of "
            f"{len(rounds)} rounds, got none; name an agent"
        )
    return best


def _named(
    rounds: Sequence[RoundRecord], agent: int | None, member: int | None, round: int | None
) -> AgentRecord:
    """Return the record of whom a caller names; the best of a round where only that is named."""
    if round is not None and not 0 <= round < len(rounds):
        raise ConfigError(
            f"round: expected one of the finished rounds, 1 to {len(rounds)}, got {round + 1}"
        )
    looked = rounds if round is None else [rounds[round]]
    if agent is None and member is None:
        best = best_agent(looked[-1])
        if best is None:
            raise CheckpointError(
                f"round {looked[-1].round + 1}: expected an agent with a finite fitness, got none; "
                "name an agent, or another round"
            )
        return best
    what, number = ("agent", agent) if member is None else ("member", member)
    played = [record for one in looked for record in one.agents]
    found = [record for record in played if getattr(record, what) == number]
    if not found:
        when = "" if round is None else f" that played round {round + 1}"
        there = ", ".join(map(str, sorted({getattr(record, what) for record in played})))
        raise ConfigError(f"{what}: expected one{when} of {there}, got {number}")
    return found[-1]


def _where_it_is(found: Choice) -> Choice:
    """Return a choice with a checkpoint that is there: its own, or its copy in checkpoints/best."""
    folder, record = found.run, found.record
    if found.checkpoint and (folder / found.checkpoint).is_dir():
        return found
    ever = best_ever(found.rounds)
    if ever == record and (folder / BEST).is_dir():
        return replace(found, best={**found.best, "checkpoint": BEST})
    raise CheckpointError(
        f"{folder}: the checkpoint of agent {record.agent} after round {record.round + 1} is not "
        "there (record.checkpoints says which are kept; `all` keeps each); take one that is there: "
        f"{checkpoints_there(folder, found.rounds)}"
    )


def checkpoints_there(folder: Path, rounds: Sequence[RoundRecord]) -> str:
    """Return the checkpoints of a run that are there, in words; rounds count from 1."""
    parts: list[str] = []
    for record in reversed(rounds):
        agents = [
            str(one.agent)
            for one in record.agents
            if one.checkpoint is not None and (folder / one.checkpoint).is_dir()
        ]
        if agents:
            parts.append(f"round {record.round + 1}: agents {', '.join(agents)}")
    more = [f"and {len(parts) - SHOWN_ROUNDS} rounds before"] if len(parts) > SHOWN_ROUNDS else []
    ever = best_ever(rounds) if (folder / BEST).is_dir() else None
    best = [] if ever is None else [f"the best ever: agent {ever.agent} of round {ever.round + 1}"]
    return "; ".join([*parts[:SHOWN_ROUNDS], *more, *best]) or "none"

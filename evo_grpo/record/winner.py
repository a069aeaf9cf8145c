"""The winner of a finished run, from its records and its summary: who it is, and what led to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evo_grpo.record.family import ancestry, best_ever
from evo_grpo.record.leaderboard import best_agent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from evo_grpo.record.records import AgentRecord, RoundRecord


def winning_lines(
    rounds: Sequence[RoundRecord], best: Mapping[str, Any]
) -> list[list[AgentRecord]]:
    """Return the rounds that led to the best of a run, one list for each adapter it is made of.

    For a mean these are the lines of both parents, the better one first. The line of the best ever
    ends in the round in which it was the best. `best` is what summary.json holds under that name.
    """
    if best["kind"] == "mean":
        return [ancestry(rounds, parent) for parent in best["parents"]]
    line = ancestry(rounds, best["member"])
    ever = best_ever(rounds) if best["kind"] == "archive" else None
    return [line if ever is None else [one for one in line if one.round <= ever.round]]


def leading_lines(
    rounds: Sequence[RoundRecord], summary: Mapping[str, Any] | None
) -> list[list[AgentRecord]]:
    """Return what led to the winner, before the end to the best of the last round, if any."""
    if summary is not None:
        return winning_lines(rounds, summary["best"])
    best = best_agent(rounds[-1]) if rounds else None
    return [] if best is None else [ancestry(rounds, best.member)]


def winner_files(
    rounds: Sequence[RoundRecord], best: Mapping[str, Any], files: Mapping[str, str]
) -> dict[str, str]:
    """Return the digests of the winner's files, by their paths below its checkpoint.

    `files` are those of summary.json, of a mean, which no round recorded.
    """
    if best["kind"] == "mean":
        below = f"{best['checkpoint']}/"
        return {name.removeprefix(below): d for name, d in files.items() if name.startswith(below)}
    ever = best_ever(rounds) if best["kind"] == "archive" else None
    checkpoint = best["checkpoint"] if ever is None else ever.checkpoint
    found = [record.files_of(str(checkpoint)) for record in rounds]
    return next((one for one in found if one), {})


def finalist_name(rounds: Sequence[RoundRecord], one: Mapping[str, Any]) -> str:
    """Return the best of a run, or a candidate for it, in words."""
    if one["kind"] == "mean":
        agents = {record.member: record.agent for record in rounds[-1].agents}
        first, second = (agents.get(parent, "?") for parent in one["parents"])
        return f"the mean of agents {first} and {second}"
    ever = best_ever(rounds) if one["kind"] == "archive" else None
    when = "" if ever is None else f" as it was after round {ever.round + 1}"
    return f"agent {one['agent']}{when}"


def other_finalists(
    rounds: Sequence[RoundRecord], summary: Mapping[str, Any]
) -> tuple[Mapping[str, Any], str] | None:
    """Return the winner's final validation score, and the others' in words.

    None where nothing was compared at the end.
    """
    compared = [one for one in summary["candidates"] if one["validation"] is not None]
    if len(compared) < 2:
        return None
    # By kind: the best of the last round and the best ever may be one member at two times.
    won = next((one for one in compared if one["kind"] == summary["best"]["kind"]), None)
    if won is None:
        return None
    own = won["validation"]
    others = [
        f"{_mean(one)} ({finalist_name(rounds, one)}{_tie(one, own['mean'])})"
        for one in compared
        if one is not won
    ]
    return own, " and ".join(others)


def _tie(one: Mapping[str, Any], won: float) -> str:
    """Return what a finalist's score says beside that of the winner."""
    mean = one["validation"]["mean"]
    if mean is not None and mean > won:
        return ", not significantly ahead"  # which the best ever has to be to win
    return ", a tie" if one["tie"] else ""


def _mean(one: Mapping[str, Any]) -> str:
    mean = one["validation"]["mean"]
    return "no finite score" if mean is None else f"{mean:.2f}"

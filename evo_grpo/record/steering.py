"""What a person asks of a run, checked as far as its folder knows; and what became of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evo_grpo.errors import ConfigError, RunDirError
from evo_grpo.evolve.steer import ON_AGENTS, ON_RUN, Boundary, Plan, steer
from evo_grpo.record.config import read_config
from evo_grpo.record.family import next_member_id
from evo_grpo.record.folder import (
    config_text,
    expect_run,
    is_trained,
    read_rounds,
    refuse_objects,
)
from evo_grpo.record.names import BASELINE, LOCK
from evo_grpo.record.plain import read_plain
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.requests import (
    carried_out,
    new_id,
    read_requests,
    remove_requests,
    write_request,
)
from evo_grpo.record.summary import read_summary
from evo_grpo.settings import RunConfig
from evo_grpo.types import Member, Request, Slot, Steering


@dataclass(frozen=True)
class Standing:
    """Where a run stands, as far as its folder says.

    Attributes:
        trains: Whether a process has the run.
        playing: The round (0-based) that it plays, or would play next.
        waiting: What is asked for and not carried out.
        unread: What is wrong with each file that is no request.
        became: What became of requests, with the round (0-based) after which.
    """

    folder: Path
    config: RunConfig
    rounds: Sequence[RoundRecord]
    trains: bool
    playing: int
    finished: bool
    waiting: tuple[Request, ...]
    unread: tuple[str, ...]
    became: tuple[tuple[int, Steering], ...]

    @property
    def paused(self) -> bool:
        """Whether it waits between two rounds to go on."""
        return self.trains and bool(self.rounds) and self.rounds[-1].paused_by is not None

    @property
    def between(self) -> bool:
        """Whether no round is being played, nor is about to be."""
        asked = (one.op for one in self.waiting)
        return not self.trains or (self.paused and "continue" not in asked)

    @property
    def over(self) -> bool:
        """Whether no round follows."""
        played = self.playing >= self.config.population.rounds
        return self.finished or played or any(record.is_end for record in self.rounds[-1:])


def standing_of(run: str | Path) -> Standing:
    """Return where a run stands."""
    folder = expect_run(run)
    # Before the rounds: what is carried out meanwhile is in one of them.
    found = read_requests(folder)
    rounds = read_rounds(folder)
    became = tuple((record.round, one) for record in rounds for one in record.steering)
    over, trains = carried_out(rounds), is_trained(folder)
    told = _told_round(folder) if trains else 0
    return Standing(
        folder,
        read_config(folder),
        rounds,
        trains,
        max(told, len(rounds)),
        read_summary(folder) is not None,
        tuple(one for one in found.requests if one.id not in over),
        tuple(found.unread.values()),
        became,
    )


def _told_round(folder: Path) -> int:
    """Return the round that a process says it plays: its line may be on the way to disk."""
    said = read_plain(folder / LOCK).decode(errors="replace").split()
    return int(said[1]) if len(said) > 1 and said[1].isdecimal() else 0


def ask(
    run: str | Path,
    op: str,
    *,
    agent: int | None = None,
    source: int | None = None,
    values: Mapping[str, Any] | None = None,
) -> tuple[Request, Standing]:
    """Ask something of a run; it is carried out between two of its rounds.

    `agent` is stopped, overwritten or changed, `source` is cloned, and `values` are set. Returns
    the request as written, and where the run stood before.

    Raises:
        ConfigError: It cannot be carried out, as far as the folder knows.
        RunDirError: The run belongs to a comparison, or cannot go on; or a link is in the way.
    """
    now = standing_of(run)
    _refuse_runs(now)
    request = Request(
        "",  # a number is taken once nothing is refused any more
        op,
        agent,
        source,
        dict(values or {}),
        now.playing - int(now.between),
        time.time(),
    )
    if op in ON_RUN:
        _check_process(now, op)
    elif op in ON_AGENTS:
        _check_agents(now, request)
    else:
        raise ConfigError(f"steer: expected one of {', '.join((*ON_AGENTS, *ON_RUN))}, got {op!r}")
    request = replace(request, id=new_id(now.folder))
    write_request(now.folder, request)
    return request, now


def cancel(run: str | Path) -> int:
    """Withdraw what is asked of a run and not carried out; returns how many requests that were."""
    folder = expect_run(run)
    now = read_requests(folder)
    ids = {one.id for one in now.requests} | {Path(name).stem for name in now.unread}
    ids -= carried_out(read_rounds(folder))
    remove_requests(folder, ids)
    return len(ids)


def _refuse_runs(now: Standing) -> None:
    folder = now.folder
    if config_text(folder).startswith(BASELINE):
        raise RunDirError(
            f"{folder}: expected a run that evolves, got a population of the comparison of "
            f"{folder.parent.parent}, which trains by itself; steer that run"
        )
    if now.over:
        does, when = "has played all of its", "first"
        if now.trains and not now.finished:
            does, when = "judges its winner after", "once it has ended"
        raise ConfigError(
            f"{folder}: expected a run with rounds to play, got one that {does} "
            f"{len(now.rounds)}; give it more {when}: evo-grpo resume {folder} --rounds N"
        )
    if not now.trains:
        refuse_objects(folder, "so no process can take it up again and carry out what is asked")


def _check_process(now: Standing, op: str) -> None:
    """Refuse what only a process that trains can do, and what it does already."""
    if not now.trains:
        raise ConfigError(
            f"{op}: expected a run that a process trains, got {now.folder}, which nobody does at "
            f"the moment; it goes on with: evo-grpo resume {now.folder}"
        )
    asked = [one.op for one in now.waiting if one.op in ON_RUN]
    paused = (asked[-1] if asked else "") == "pause" or (now.paused and "continue" not in asked)
    if op == "continue" and not paused:
        raise ConfigError(
            f"continue: expected a run that is paused, got {now.folder}, which goes on"
        )
    if op == "pause" and paused:
        raise ConfigError(
            f"pause: expected a run that goes on, got {now.folder}, which is paused, or will be "
            f"after this round; it goes on with: evo-grpo steer {now.folder} continue"
        )


def _check_agents(now: Standing, request: Request) -> None:
    """Refuse what cannot be carried out on who trains now, after what else is asked for."""
    plan, boundary = _known(now, request.after)
    for earlier in now.waiting:
        if earlier.op in ON_AGENTS:
            plan, _ = steer(plan, earlier, boundary)
    _, became = steer(plan, request, boundary)
    if became.refused:
        raise ConfigError(f"{request}: {became.refused}")


def _known(now: Standing, after: int) -> tuple[Plan, Boundary]:
    """Return what is known of who trains when a request is carried out, at the earliest."""
    space, next_id = now.config.search_space(), next_member_id(now.rounds)
    if not now.rounds:
        size, first = now.config.population.size, now.config.algorithm.hparams()
        plan = Plan(tuple(Member(n, Slot(n)) for n in range(size)), (first,) * size, ())
    else:
        plan = Plan(now.rounds[-1].members, now.rounds[-1].next_hparams, ())
    if now.rounds and after == now.rounds[-1].round:
        played = {agent.member: agent.agent for agent in now.rounds[-1].agents}
    else:  # selection is yet to come: until it has spoken, everybody goes on
        played = {member.id: member.agent for member in plan.members}
    return plan, Boundary(max(after, 0), played, space, max(next_id, len(plan.members)))

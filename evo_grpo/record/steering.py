"""Passes requests to a training run, as files that another process writes into the run folder.

A request is checked against the folder, then written atomically, without a lock. The run removes
the file once the outcome of the request is recorded in its rounds.
"""

import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import TypeAdapter

from evo_grpo.errors import ConfigError, RunDirError
from evo_grpo.evolve.steer import ON_AGENTS, ON_RUN, NextRound, RoundEnd, steer
from evo_grpo.record import family, summary
from evo_grpo.record import folder as run_folder
from evo_grpo.record.files import atomic_write, remove, seal, unseal
from evo_grpo.record.names import BASELINE, LOCK, REQUEST, STEERING
from evo_grpo.record.plain import is_folder, read_plain, refuse_links
from evo_grpo.record.records import RoundRecord
from evo_grpo.schema.problems import validated
from evo_grpo.schema.validation import shown
from evo_grpo.settings import RunConfig
from evo_grpo.types import Member, Request, RequestOutcome, Slot

FORMAT = 1
"""Version of the format of a request."""
_SCHEMA = TypeAdapter(Request)


@dataclass(frozen=True)
class PendingRequests:
    """The pending requests of a run, oldest first.

    `unread` maps the name of each file that is no valid request, or is a link, to an error message.
    """

    requests: tuple[Request, ...]
    unread: dict[str, str]


def write_request(folder: Path, request: Request) -> Request:
    """Write a request and return it with its id, which is greater than all pending ids.

    Raises:
        RunDirError: The folder of requests is a link or a file.
    """
    place = folder / STEERING
    refuse_links(place)
    if os.path.lexists(place) and not is_folder(place):
        raise RunDirError(f"{place}: expected a folder of the run, got a file; remove it")
    waiting = (int(request_id.partition("-")[0]) for request_id in ids_of_requests(folder))
    number = max(time.time_ns(), 1 + max(waiting, default=0))
    request = replace(request, id=f"{number:020d}-{uuid4().hex[:8]}")
    text = seal({"format": FORMAT, **asdict(request)})
    atomic_write(place / f"{request.id}.json", text, "steer")
    return request


def ids_of_requests(folder: Path) -> frozenset[str]:
    """Return the ids of the pending requests to a run, including unreadable files."""
    place = folder / STEERING
    try:
        names = os.listdir(place) if is_folder(place) else ()
    except FileNotFoundError:  # a run that begins anew clears it
        names = ()
    return frozenset(Path(name).stem for name in names if REQUEST.fullmatch(name))


def read_requests(folder: Path) -> PendingRequests:
    """Return the pending requests; unreadable files are listed in `unread`."""
    place, requests, unread = folder / STEERING, list[Request](), dict[str, str]()
    if os.path.lexists(place) and not is_folder(place):
        unread[STEERING] = f"{place}: expected a folder of the run, got something else"
        return PendingRequests((), unread)
    for id in sorted(ids_of_requests(folder)):
        file = place / f"{id}.json"
        try:
            requests.append(_read(file))
        except FileNotFoundError:  # withdrawn in the meantime
            continue
        except RunDirError as error:
            unread[file.name] = str(error)
        except (OSError, ValueError) as error:
            unread[file.name] = (
                f"{file}: expected a request as evo-grpo steer writes it, but {error}"
            )
    return PendingRequests(tuple(requests), unread)


def carried_out(rounds: Iterable[RoundRecord]) -> set[str]:
    """Return the ids of the requests whose outcome is recorded in rounds."""
    return {outcome.request.id for record in rounds for outcome in record.steering}


def remove_requests(folder: Path, ids: Collection[str]) -> None:
    """Remove the files of requests from a run folder; ids without a file are ignored."""
    place = folder / STEERING
    if not is_folder(place):
        return
    for request_id in sorted(ids):
        remove(place / f"{request_id}.json")


def _read(file: Path) -> Request:
    data = unseal(read_plain(file))
    if data.pop("format", None) != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}")
    request = validated(_SCHEMA, data)
    if f"{request.id}.json" != file.name:
        raise ValueError(f"its id is {shown(request.id)}, which is not its name")
    return request


@dataclass(frozen=True)
class RunState:
    """The state of a run and of the requests to it, as read from its folder.

    Attributes:
        trains: Whether a process trains the run.
        playing: The round (0-based) that is being played, or would be played next.
        finished: Whether the run has a summary.
        waiting: Pending requests, in order.
        unread: A message for each file in steering/ that is not a valid request.
        became: The outcome of each request that was carried out or refused, with the round
            (0-based) after which this happened.
    """

    folder: Path
    config: RunConfig
    rounds: Sequence[RoundRecord]
    trains: bool
    playing: int
    finished: bool
    waiting: tuple[Request, ...]
    unread: tuple[str, ...]
    became: tuple[tuple[int, RequestOutcome], ...]

    @property
    def paused(self) -> bool:
        """Whether the run is paused between two rounds."""
        return self.trains and bool(self.rounds) and self.rounds[-1].paused_by is not None

    @property
    def between(self) -> bool:
        """Whether the run stands still: no round is being played, and none is about to start."""
        ops = (request.op for request in self.waiting)
        return not self.trains or (self.paused and "continue" not in ops)

    @property
    def in_last_round(self) -> bool:
        """Whether the round that is being played is the last one."""
        return not self.between and self.playing + 1 >= self.config.population.rounds

    @property
    def over(self) -> bool:
        """Whether the run has no further round to play."""
        played = self.playing >= self.config.population.rounds
        return self.finished or played or any(record.is_end for record in self.rounds[-1:])


def state_of(run: str | Path) -> RunState:
    """Return the state of a run and of the requests to it."""
    folder = run_folder.expect_run(run)
    # Requests first: one that is carried out meanwhile is then found here or in the rounds.
    pending = read_requests(folder)
    rounds = run_folder.read_rounds(folder)
    recorded_ids, trains = carried_out(rounds), run_folder.is_trained(folder)
    return RunState(
        folder=folder,
        config=run_folder.read_config(folder),
        rounds=rounds,
        trains=trains,
        playing=max(_round_in_lock(folder) if trains else 0, len(rounds)),
        finished=summary.read_summary(folder) is not None,
        waiting=tuple(request for request in pending.requests if request.id not in recorded_ids),
        unread=tuple(pending.unread.values()),
        became=tuple((record.round, outcome) for record in rounds for outcome in record.steering),
    )


def _round_in_lock(folder: Path) -> int:
    """Return the round being played, from the lock file; it may be ahead of rounds.jsonl."""
    words = read_plain(folder / LOCK).decode(errors="replace").split()
    return int(words[1]) if len(words) > 1 and words[1].isdecimal() else 0


def ask(
    run: str | Path,
    op: str,
    *,
    agent: int | None = None,
    source: int | None = None,
    values: Mapping[str, Any] | None = None,
) -> tuple[Request, RunState]:
    """Write a request to a run, which carries it out between two rounds.

    The arguments are the fields of `evo_grpo.types.Request`. Returns the request as written, and
    the state of the run before the request.

    Raises:
        ConfigError: The request cannot be carried out.
        RunDirError: The run belongs to a comparison, cannot be resumed, or has a link in place of
            a file.
    """
    state = state_of(run)
    _check_folder(state)
    request = Request(
        id="",  # `write_request` assigns it
        op=op,
        agent=agent,
        source=source,
        values=dict(values or {}),
        after=state.playing - int(state.between),
        asked=time.time(),
    )
    if state.over:
        problem = _over(state)
    elif op in ON_RUN:
        problem = _process_problem(state, op)
    elif op in ON_AGENTS:
        problem = _agents_problem(state, request)
    else:
        problem = f"steer: expected one of {', '.join((*ON_AGENTS, *ON_RUN))}, got {op!r}"
    if problem:
        raise ConfigError(problem)
    return write_request(state.folder, request), state


def cancel(run: str | Path) -> int:
    """Remove the pending requests to a run; return their number."""
    folder = run_folder.expect_run(run)
    pending = read_requests(folder)
    ids = {request.id for request in pending.requests} | {Path(n).stem for n in pending.unread}
    ids -= carried_out(run_folder.read_rounds(folder))
    remove_requests(folder, ids)
    return len(ids)


def _check_folder(run: RunState) -> None:
    """Raise RunDirError for a folder whose run takes no requests."""
    folder = run.folder
    if run_folder.config_text(folder).startswith(BASELINE):
        raise RunDirError(
            f"{folder}: expected a run, got a population of the comparison of "
            f"{folder.parent.parent}, which does not take requests; steer that run"
        )
    if not run.trains and not run.over:
        run_folder.refuse_objects(folder, "so no command can resume it to carry out the request")


def _over(run: RunState) -> str:
    """Return the message for a request to a run whose rounds are all played."""
    state, when = "has played all of its", "now"
    if run.trains and not run.finished:
        state, when = "judges its winner after", "once it has ended"
    return (
        f"{run.folder}: expected a run with rounds to play, got one that {state} "
        f"{len(run.rounds)}; extend it {when} with: evo-grpo resume {run.folder} --rounds N"
    )


def _process_problem(run: RunState, op: str) -> str:
    """Return why a request of `ON_RUN`, such as a pause, cannot be carried out; "" if it can."""
    folder = run.folder
    ops = [request.op for request in run.waiting if request.op in ON_RUN]
    last_op = ops[-1] if ops else ""
    paused = last_op == "pause" or (run.paused and "continue" not in ops)
    if not run.trains:
        problem = (
            f"expected a run that a process trains, got {folder}, which no process trains at the "
            f"moment; continue it with: evo-grpo resume {folder}"
        )
    elif op != "continue" and run.in_last_round:
        problem = (
            f"expected a run with a round after the one it plays, got {folder} in round "
            f"{run.playing + 1}, its last one, after which it judges its winner and ends"
        )
    elif op == "continue" and not paused:
        problem = f"expected a paused run, got {folder}, which trains"
    elif op == "pause" and paused:
        problem = (
            f"expected a run that trains, got {folder}, which is paused or will be after this "
            f"round; continue it with: evo-grpo steer {folder} continue"
        )
    else:
        return ""
    return f"{op}: {problem}"


def _agents_problem(run: RunState, request: Request) -> str:
    """Return why a request of `ON_AGENTS` would be refused after the pending requests, or ""."""
    plan, boundary = _next_plan(run, request.after)
    for earlier in run.waiting:
        if earlier.op in ON_AGENTS:
            plan, _ = steer(plan, earlier, boundary)
    _, outcome = steer(plan, request, boundary)
    return f"{request}: {outcome.refused}" if outcome.refused else ""


def _next_plan(run: RunState, after: int) -> tuple[NextRound, RoundEnd]:
    """Return the earliest plan that a new request can change, and the `RoundEnd` before it."""
    space, next_id = run.config.search_space(), family.next_member_id(run.rounds)
    if not run.rounds:
        size, adapter = run.config.population.size, run_folder.adapter_of(run.config.model)
        hparams = run.config.algorithm.first_hparams(space, adapter)
        plan = NextRound(tuple(Member(n, Slot(n)) for n in range(size)), (hparams,) * size, ())
    else:
        record = run.rounds[-1].extended()
        plan = NextRound(record.members, record.next_hparams, ())
    if run.rounds and after == run.rounds[-1].round:
        played = {agent.member: agent.agent for agent in run.rounds[-1].agents}
    else:  # selection is still to come: assume that all agents stay
        played = {member.id: member.agent for member in plan.members}
    return plan, RoundEnd(max(after, 0), played, space, max(next_id, len(plan.members)))

"""What a person asks of a run while it trains: read between two rounds, carried out, recorded.

The first rank reads the requests and changes the plan of the next round, which is made of plain
values; all ranks get the plan and carry it out as any other. So a request is over once the record
of its round holds what became of it, and a resume repeats it from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from evo_grpo.evolve.steer import ON_RUN, Boundary, Plan, steer
from evo_grpo.population.ranks.team import Team
from evo_grpo.population.round import Steerer
from evo_grpo.record.family import next_member_id
from evo_grpo.record.observer import Observer
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.requests import (
    carried_out,
    number_of,
    read_requests,
    remove_requests,
)
from evo_grpo.record.run_dir import RunDir
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.types import Request, Steering

SECONDS_BETWEEN_LOOKS = 0.25
SECONDS_BETWEEN_WORDS = 1.0
"""While a run is paused, its ranks speak to each other so often: they must not wait for days in one
message, nor longer for a signal than a process has to end."""


@dataclass(frozen=True)
class _Told:
    """What the first rank tells the others: the round as it is from now on, and what follows.

    `notes` are what a person should hear that no round says.
    """

    record: RoundRecord
    paused: bool
    stopping: bool
    notes: tuple[str, ...]


@final
class RunSteering(Steerer):
    """Carries out what is asked of a run through its folder; see `round.Steerer`.

    The first rank has the folder open and reads it; on the others it is None.

    Attributes:
        stopping: Whether the process is to end before the next round.
    """

    def __init__(
        self,
        path: Path,
        folder: RunDir | None,
        hp_config: HyperparameterConfig,
        team: Team,
        observer: Observer,
    ) -> None:
        self.path = path  # as it was given, for messages
        self._place = path.absolute()
        self.folder = folder
        self.hp_config = hp_config
        self.team = team
        self.observer = observer
        self.stopping = False
        self._paused = False
        # Of the first rank alone.
        self._amend: Callable[[RoundRecord], None] | None = None
        self._new: tuple[Steering, ...] = ()
        self._next_id = 0
        self._over: set[str] = set()
        self._told_of: set[str] = set()

    def resumed(self, rounds: Sequence[RoundRecord]) -> RoundRecord:
        """Carry out what was asked for while nobody trained; nothing is written yet.

        What was asked of a process, to pause or to stop, ended with that process. Returns the last
        round as it is to be recorded.
        """

        def look() -> _Told:
            self._over |= carried_out(rounds)
            self._next_id = next_member_id(rounds)
            told = self._look(rounds[-1], last=False, resumes=True)
            self._new = told.record.steering[len(rounds[-1].steering) :]
            return told

        return self.team.lead(look).record

    def begin(self, rounds: Sequence[RoundRecord], amend: Callable[[RoundRecord], None]) -> None:
        """Begin with the rounds that are left, once the earlier ones are restored.

        `amend` records what was asked for once its round had been recorded.
        """
        if self.folder is None:
            return
        self._amend = amend
        self.folder.tell_round(len(rounds))
        # Those that are not recorded yet are removed once they are.
        keep = {one.request.id for one in self._new}
        over = carried_out(rounds) | {
            one.id
            for one in read_requests(self._place).requests
            if one.op in ON_RUN and not self._is_for_us(one)
        }
        remove_requests(self._place, over - keep)
        if self._new:
            amend(rounds[-1])
        for one in self._new:
            self._note(f"asked for before this process: {_in_words(one)}")

    def steered(self, record: RoundRecord, *, next_id: int, last: bool) -> RoundRecord:
        """See `round.Steerer`."""
        self._next_id = next_id
        return self._heard(self.team.lead(lambda: self._look(record, last=last)))

    def wait(self, record: RoundRecord) -> RoundRecord:
        """See `round.Steerer`."""
        number = record.round + 1
        if self._paused and not self.stopping:
            self._note(
                f"paused after round {number}; go on with: evo-grpo steer {self.path} continue"
            )
        while self._paused and not self.stopping:
            before = record
            record = self._heard(self.team.lead(lambda: self._listen(before)))  # noqa: B023 -- called at once
            if not self._paused and not self.stopping:
                self._note(f"round {number + 1} begins, as asked for")
        if self.stopping:
            self._note(f"the process ends after round {number}, as asked for")
        return record

    def _heard(self, told: _Told) -> RoundRecord:
        self._paused, self.stopping = told.paused, told.stopping
        for note in told.notes:
            self._note(note)
        return told.record

    def _listen(self, record: RoundRecord) -> _Told:
        """Wait a while for requests, and record what became of them."""
        until = time.monotonic() + SECONDS_BETWEEN_WORDS
        while True:
            told = self._look(record, last=False)
            new = told.record.steering[len(record.steering) :]
            if new:
                assert self._amend is not None, "the first rank writes"
                self._amend(told.record)
                said = (_in_words(one) for one in new if one.request.op not in ON_RUN)
                return replace(told, notes=(*told.notes, *said))
            if time.monotonic() >= until or told.notes:
                return told
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _look(self, record: RoundRecord, *, last: bool, resumes: bool = False) -> _Told:
        """Carry out what is there; on the first rank, which with `resumes` begins with it."""
        if self.folder is not None:
            # First: what is asked for from now on names the next round, and waits for its end.
            self.folder.tell_round(record.round + 1)
        found = read_requests(self._place)
        notes = [
            f"{text}; it is left alone: withdraw it with: evo-grpo steer {self.path} cancel"
            for name, text in found.unread.items()
            if self._first_time(name)
        ]
        fresh = [request for request in found.requests if request.id not in self._over]
        plan, done = self._plan(record, fresh, notes, last=last)
        paused, stopping = self._paused, self.stopping
        for request in (one for one in fresh if one.op in ON_RUN):
            later = request.op == "stop-after-round" and request.after > record.round
            if self._is_for_us(request) if resumes else later:
                continue  # it is for this process, which has not begun, or for another round
            why = _refused(request, paused=paused, last=last, resumes=resumes)
            done.append(Steering(request, why))
            if why:
                notes.append(_in_words(done[-1]))
            elif request.op == "stop-after-round":
                stopping = True
            else:
                paused = request.op == "pause"
        self._over |= {one.request.id for one in done}
        if done:
            record = replace(
                record,
                members=plan.members,
                next_hparams=plan.hparams,
                decisions=plan.decisions,
                steering=(*record.steering, *sorted(done, key=lambda one: one.request.id)),
                next_member=self._next_id,
            )
        return _Told(record, paused, stopping, tuple(notes))

    def _plan(
        self, record: RoundRecord, fresh: Sequence[Request], notes: list[str], *, last: bool
    ) -> tuple[Plan, list[Steering]]:
        """Carry out what is asked of agents; after the last round it is kept instead."""
        plan, done = Plan(record.members, record.next_hparams, record.decisions), list[Steering]()
        played = {agent.member: agent.agent for agent in record.agents}
        for request in (one for one in fresh if one.op not in ON_RUN):
            if last and self._first_time(request.id):
                notes.append(
                    f"{request}: kept, for no round follows; carried out by: evo-grpo resume "
                    f"{self.path} --rounds N"
                )
            elif not last and request.after <= record.round:
                boundary = Boundary(record.round, played, self.hp_config, self._next_id)
                plan, became = steer(plan, request, boundary)
                done.append(became)
                self._next_id = max([self._next_id, *(one.id + 1 for one in plan.members)])
        return plan, done

    def _is_for_us(self, request: Request) -> bool:
        """Return whether something was asked for since this process has the run."""
        return self.folder is not None and number_of(request.id) > self.folder.asked_before

    def _note(self, text: str) -> None:
        """Tell the observer, and on the first rank whoever reads the log."""
        if self.folder is not None:
            self.folder.note(text)
        self.observer.note(text)

    def _first_time(self, name: str) -> bool:
        """Return whether a person has not been told of it."""
        first = name not in self._told_of
        self._told_of.add(name)
        return first


def _refused(request: Request, *, paused: bool, last: bool, resumes: bool) -> str:
    """Return why a request to the process is not carried out, an empty string where it is."""
    if resumes:
        return "the process that it was asked of has ended"
    if last:
        return "no round follows"
    if request.op == "pause" and paused:
        return "the run is paused already"
    if request.op == "continue" and not paused:
        return "the run is not paused"
    return ""


def _in_words(one: Steering) -> str:
    return f"{one.request}: refused: {one.refused}" if one.refused else f"{one.request}: done"

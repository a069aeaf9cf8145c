"""What a run says, as values in the order in which it said them: the one way to read a run's log.

The log is files to which the run appends: rounds.jsonl has a line per finished round, metrics/ a
file per round with a line per step and agent, notes.jsonl what belongs to no round, summary.json
the end. A reader remembers how far it is by a `Cursor`. An entry may come twice, after a reader
was killed or a run was resumed; it then has the same place and the same values.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import NonNegativeInt, TypeAdapter

from evo_grpo.errors import CheckpointError
from evo_grpo.record.config import read_config
from evo_grpo.record.files import reading, to_line
from evo_grpo.record.folder import expect_run, is_trained, parse_rounds, round_name
from evo_grpo.record.names import METRICS, NOTES, ROUNDS, SUMMARY
from evo_grpo.record.plain import MOST_BYTES_OF_LINES, open_plain, refuse_oversized, stamp_of
from evo_grpo.record.records import to_json
from evo_grpo.record.step_metrics import WHERE, row_of
from evo_grpo.record.summary import read_summary
from evo_grpo.schema.validated import validated
from evo_grpo.settings import RunConfig
from evo_grpo.types import Slot

if TYPE_CHECKING:
    from evo_grpo.record.records import RoundRecord

_log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""How long `entries` waits before it looks again whether a run has said more."""


@dataclass(frozen=True)
class RunStarted:
    """A run has a folder.

    Attributes:
        run: The folder.
        config: The settings of the run.
    """

    run: Path
    config: RunConfig


@dataclass(frozen=True)
class StepDone:
    """Agents have taken a GRPO step.

    Attributes:
        round: 0-based.
        step: Of the round, 0-based.
        number: GRPO steps of the run by then, from 1.
        agents: What was measured, by slot; names and units as `evo_grpo.record.vocabulary` has
            them, None where a value was not finite.
    """

    round: int
    step: int
    number: int
    agents: Mapping[Slot, Mapping[str, float | None]]


@dataclass(frozen=True)
class RoundDone:
    """A round is finished; it comes again where a person changed its plan afterwards.

    Attributes:
        number: GRPO steps of the run by its end.
        record: The round.
    """

    number: int
    record: RoundRecord


@dataclass(frozen=True)
class Noted:
    """Something happened that belongs to no round.

    Attributes:
        time: In seconds since 1970.
        text: A sentence.
    """

    time: float
    text: str


@dataclass(frozen=True)
class RunFinished:
    """A run has come to its end.

    Attributes:
        number: GRPO steps of the run.
        summary: What summary.json holds.
    """

    number: int
    summary: Mapping[str, Any]


Entry = RunStarted | StepDone | RoundDone | Noted | RunFinished


@dataclass(frozen=True)
class Cursor:
    """How far a reader is with the log of a run.

    Attributes:
        started: Whether `RunStarted` was read.
        rounds: Finished rounds that were read.
        place: Byte of rounds.jsonl at which the last of them begins.
        last: Digest of the last of them, which a person may have changed since.
        steps: Bytes that were read of the metrics of the round after them.
        notes: Bytes that were read of notes.jsonl.
        summary: Digest of the summary that was read, empty for none.
    """

    started: bool = False
    rounds: NonNegativeInt = 0
    place: NonNegativeInt = 0
    last: str = ""
    steps: NonNegativeInt = 0
    notes: NonNegativeInt = 0
    summary: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cursor:
        """Build a cursor from what `to_json` returned.

        Raises:
            ValueError: It names the field that is not what `to_json` returns.
        """
        return validated(_CURSOR, data)


_CURSOR = TypeAdapter(Cursor)
START = Cursor()


def entries(
    run: str | Path, after: Cursor = START, *, follow: bool = False
) -> Iterator[tuple[Cursor, Entry]]:
    """Yield what a run has said, oldest first, with the cursor that stands behind it.

    Args:
        run: The run folder; it is only read.
        after: What was read before.
        follow: Wait for more until the run has ended, or no process trains it any more.

    Raises:
        RunNotFoundError: It is no run folder.
        CheckpointError: A line is damaged, naming it.
        RunFailedError: The disk refuses to be read.
    """
    folder = expect_run(run)
    with reading(folder, ""):
        config = read_config(folder)
    seen: tuple[int, ...] | None = ()
    while True:
        # Asked before: what a run says in its last moments is read all the same.
        trained, now = follow and is_trained(folder), stamp_of(folder / ROUNDS)
        if now != seen:
            after = _no_further(folder, after)
        more = _new(folder, after, config, rounds=now != seen)
        for after, entry in more:
            yield after, entry
        seen = now
        if not trained:
            return
        time.sleep(POLL_SECONDS)


def _no_further(folder: Path, at: Cursor) -> Cursor:
    """Return a cursor that is no further than the log: a power cut may take its last round.

    The round then comes again once it is played again.
    """
    path = folder / ROUNDS
    if not at.rounds or _read(path, 0, 0)[1] > at.place:
        return at
    finished = len(_placed(path))
    if finished >= at.rounds:
        return at
    _log.warning(
        "%s: has %d rounds, of which a reader has read %d; it goes on from there",
        path,
        finished,
        at.rounds,
    )
    return replace(at, rounds=finished, place=0, last="", steps=0, summary="")


def _new(
    folder: Path, at: Cursor, config: RunConfig, *, rounds: bool = True
) -> Iterator[tuple[Cursor, Entry]]:
    """Yield what a log has by now behind a cursor; `rounds` says whether it may have more."""
    summary = read_summary(folder)  # before the rounds, all of which are there by then
    per_round = config.population.steps_per_round
    if not at.started:
        at = replace(at, started=True)
        yield at, RunStarted(folder, config)
    for line, end in _lines(folder / NOTES, at.notes):
        at = replace(at, notes=end)
        yield at, _note(folder / NOTES, line)
    for place, record in _rounds(folder, at) if rounds else ():
        digest = _digest(to_json(record))
        if record.round == at.rounds:  # its steps are whole
            for at, step in _steps(folder, at, per_round, whole=True):  # noqa: B020 -- at goes on from there
                yield at, step
        elif digest == at.last:
            at = replace(at, place=place)
            continue
        at = replace(at, rounds=record.round + 1, place=place, last=digest, steps=0)
        yield at, RoundDone(at.rounds * per_round, record)
    for at, step in _steps(folder, at, per_round, whole=False):  # noqa: B020 -- at goes on from there
        yield at, step
    if summary is not None and (digest := _digest(summary)) != at.summary:
        if summary["rounds"] > at.rounds:
            raise CheckpointError(
                f"{folder / ROUNDS}: expected {summary['rounds']} rounds, as {SUMMARY} says, got "
                f"{at.rounds} whole lines; put the file back as it was, from a copy"
            )
        at = replace(at, summary=digest)
        yield at, RunFinished(at.rounds * per_round, summary)


def _rounds(folder: Path, at: Cursor) -> list[tuple[int, RoundRecord]]:
    """Return the last round that was read and those after it, each with its place."""
    path = folder / ROUNDS
    first = max(0, at.rounds - 1)
    with reading(path, ""):
        if at.rounds and _begins_line(path, at.place):
            try:
                placed = _placed(path, start=at.place, first=first)
            except CheckpointError:
                placed = []  # the file was put back from a copy, or the line is damaged
            if placed:
                return placed
        placed = _placed(path)
    return placed[first:]


def _placed(path: Path, *, start: int = 0, first: int = 0) -> list[tuple[int, RoundRecord]]:
    """Return the rounds of rounds.jsonl from a line on, each with the byte at which it begins."""
    found = parse_rounds(path, start=start, first=first)
    return list(zip(found.places, found.records, strict=True))


def _begins_line(path: Path, place: int) -> bool:
    data, _ = _read(path, max(0, place - 1), 1)
    return place == 0 or data == b"\n"


def _steps(
    folder: Path, at: Cursor, per_round: int, *, whole: bool
) -> Iterator[tuple[Cursor, StepDone]]:
    """Yield the steps of the round after those that were read.

    Unless the round is whole, its last step is left until another follows.
    """
    path = folder / METRICS / f"{round_name(at.rounds)}.jsonl"
    step, agents, place = -1, dict[Slot, Mapping[str, float | None]](), at.steps

    def done() -> tuple[Cursor, StepDone]:
        number = at.rounds * per_round + step + 1
        return replace(at, steps=place), StepDone(at.rounds, step, number, agents)

    for line, end in _lines(path, at.steps):
        row = row_of(path, line)
        if row["step"] != step and agents:
            yield done()
            agents = {}
        step, place = row["step"], end
        agents[Slot(row["agent"])] = {k: v for k, v in row.items() if k not in WHERE}
    if agents and whole:
        yield done()


def _lines(path: Path, start: int) -> Iterator[tuple[bytes, int]]:
    """Yield the whole lines of a file from a byte on, each with its end; none without a file.

    Where a resume began the file anew, with other steps, it is shorter than it was, or no line
    begins at that byte: it is read from its start.
    """
    with reading(path, ""):
        data, length = _read(path, start)
        if length < start or not _begins_line(path, start):
            start = 0
            data, _ = _read(path, 0)
    for line in data.splitlines(keepends=True):
        start += len(line)
        if line.endswith(b"\n"):
            yield line, start


def _read(path: Path, start: int, most: int = -1) -> tuple[bytes, int]:
    """Return a part of a file, and the length of all of it; nothing where there is none."""
    try:
        descriptor = open_plain(path, os.O_RDONLY)
    except FileNotFoundError:
        return b"", 0
    with os.fdopen(descriptor, "rb") as file:
        refuse_oversized(path, MOST_BYTES_OF_LINES)
        length = os.fstat(file.fileno()).st_size
        file.seek(start)
        return file.read(max(0, length - start) if most < 0 else most), length


def _note(path: Path, line: bytes) -> Noted:
    try:
        data = json.loads(line)
        return Noted(float(data["time"]), str(data["text"]))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: expected a note with a time and a text, but {error!r}; remove the line"
        ) from error


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(to_line(data, sort_keys=True).encode(errors="replace")).hexdigest()

"""Reads the log of a run as a sequence of entries. All readers of a log use `entries`.

The log is a set of files to which the run appends: rounds.jsonl has a line per finished round;
metrics/ has a file per round, with a line per step and agent. notes.jsonl has events that belong to
no round, and summary.json has the final result. After a reader was killed or a run was resumed, an
entry may be read again, with the same position and the same values.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, TypeAdapter

from evo_grpo.errors import CheckpointError, RunDirError
from evo_grpo.record.files import expecting, reading, to_line
from evo_grpo.record.folder import expect_run, is_trained, parse_rounds, read_config, round_name
from evo_grpo.record.history import WHERE, row_of
from evo_grpo.record.names import METRICS, NOTES, ROUNDS, SUMMARY
from evo_grpo.record.plain import MAX_LOG_BYTES, opened_plain, stamp_of
from evo_grpo.record.records import RoundRecord, to_json
from evo_grpo.record.summary import read_summary
from evo_grpo.schema.problems import validated
from evo_grpo.settings import RunConfig
from evo_grpo.types import Slot

POLL_SECONDS = 0.5
"""Seconds between two looks for new entries."""


@dataclass(frozen=True)
class RunStarted:
    """The first entry of every log: the folder and the settings of the run."""

    run: Path
    config: RunConfig


@dataclass(frozen=True)
class StepDone:
    """A GRPO step of all agents, the `number`th of the run; `round` and `step` are 0-based.

    `agents` has metrics by slot and name, as in `evo_grpo.record.vocabulary`; None if not finite.
    """

    round: int
    step: int
    number: int
    agents: Mapping[Slot, Mapping[str, float | None]]


@dataclass(frozen=True)
class RoundDone:
    """A finished round; it is read again if a request changes the plan that it recorded.

    `number` counts the GRPO steps of the run up to the end of the round.
    """

    number: int
    record: RoundRecord


@dataclass(frozen=True)
class NoteWritten:
    """An event that belongs to no round: `text` is a sentence, `time` is in seconds since 1970."""

    time: float
    text: str


@dataclass(frozen=True)
class RunFinished:
    """The end of a run after `number` GRPO steps, with the content of summary.json."""

    number: int
    summary: Mapping[str, Any]


_NOTE = TypeAdapter(NoteWritten)
Entry = RunStarted | StepDone | RoundDone | NoteWritten | RunFinished


@dataclass(frozen=True)
class Cursor:
    """The position of a reader in the log of a run.

    Attributes:
        started: Whether the first entry, `RunStarted`, was read.
        rounds: Number of finished rounds that were read.
        place: Byte offset, in rounds.jsonl, of the last round that was read.
        last: Digest of the last round that was read; it changes if a request changes the plan.
        steps: Number of bytes that were read of the metrics file of the next round.
        notes: Number of bytes that were read of notes.jsonl.
        summary: Digest of the summary that was read; "" if none was.
    """

    started: bool = False
    rounds: NonNegativeInt = 0
    place: NonNegativeInt = 0
    last: str = ""
    steps: NonNegativeInt = 0
    notes: NonNegativeInt = 0
    summary: str = ""


START = Cursor()


def entries(
    run: str | Path, after: Cursor = START, *, follow: bool = False
) -> Iterator[tuple[Cursor, Entry]]:
    """Yield the entries of a run's log after a cursor, each with the cursor after the entry.

    With `follow`, wait for new entries until the run has finished or no process trains it.

    Raises:
        CheckpointError: A line is damaged; the message names it.
        RunFailedError: A file cannot be read.
    """
    folder = expect_run(run)
    with reading(folder, ""):
        begin = RunStarted(folder, read_config(folder))
    last_stamp: tuple[int, ...] | None = ()
    while True:
        # Checked before the files are read, so that the last entries of a run are not missed.
        trained, stamp = follow and is_trained(folder), stamp_of(folder / ROUNDS)
        for after, entry in _new(begin, after, rounds=stamp != last_stamp):  # noqa: B020
            yield after, entry
        last_stamp = stamp
        if not trained:
            return
        time.sleep(POLL_SECONDS)


def _new(begin: RunStarted, at: Cursor, *, rounds: bool = True) -> Iterator[tuple[Cursor, Entry]]:
    """Yield the entries after a cursor; `rounds` is False if rounds.jsonl has not changed."""
    folder, per_round = begin.run, begin.config.population.steps_per_round
    summary = read_summary(folder)  # read first: once it exists, all rounds exist
    if not at.started:
        at = replace(at, started=True)
        yield at, begin
    for line, end in _lines(folder / NOTES, at.notes):
        at = replace(at, notes=end)
        yield at, _note(folder / NOTES, line)
    at, placed = _rounds(folder, at) if rounds else (at, [])
    for place, record in placed:
        digest = _digest(to_json(record))
        if record.round == at.rounds:  # the round is finished, so its metrics are complete
            for at, step in _steps(folder, at, per_round, whole=True):  # noqa: B020 -- at advances
                yield at, step
        elif digest == at.last:
            at = replace(at, place=place)
            continue
        at = replace(at, rounds=record.round + 1, place=place, last=digest, steps=0)
        yield at, RoundDone(at.rounds * per_round, record)
    for at, step in _steps(folder, at, per_round, whole=False):  # noqa: B020 -- at advances
        yield at, step
    if summary is not None and (digest := _digest(summary)) != at.summary:
        if summary["rounds"] > at.rounds:
            raise CheckpointError(
                f"{folder / ROUNDS}: expected {summary['rounds']} rounds as in {SUMMARY}, got "
                f"{at.rounds} complete lines; restore the file from a copy"
            )
        at = replace(at, summary=digest)
        yield at, RunFinished(at.rounds * per_round, summary)


def _rounds(folder: Path, at: Cursor) -> tuple[Cursor, list[tuple[int, RoundRecord]]]:
    """Return a cursor to go on from, and a list: the last round that was read, then later rounds.

    Each round comes with its byte offset. If a power cut removed rounds that had been read, the
    cursor is moved back, so that they are read again after they have been played again.
    """
    path = folder / ROUNDS
    last_read = max(0, at.rounds - 1)
    with reading(path, ""):
        if at.rounds:
            # An error: the file was replaced, so that no line begins there, or the line is damaged.
            with suppress(CheckpointError, RunDirError):
                if placed := _placed(path, start=at.place, first=last_read):
                    return at, placed
        placed = _placed(path)
    if len(placed) < at.rounds:
        at = replace(at, rounds=len(placed), place=0, last="", steps=0, summary="")
    return at, placed[max(0, at.rounds - 1) :]


def _placed(path: Path, *, start: int = 0, first: int = 0) -> list[tuple[int, RoundRecord]]:
    """Return the rounds from round `first`, which begins at byte `start`, with byte offsets."""
    parsed = parse_rounds(path, start=start, first=first)
    return list(zip(parsed.places, parsed.records, strict=True))


def _steps(
    folder: Path, at: Cursor, per_round: int, *, whole: bool
) -> Iterator[tuple[Cursor, StepDone]]:
    """Yield the steps of round `at.rounds` that were not read yet, each with the cursor after it.

    Unless `whole`, the last step in the file is left out, because more rows of it may follow.
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
    """Yield the complete lines of a file from byte `start`, each with the byte offset of its end.

    If a resume has replaced the file, so that no line begins there, all lines are yielded.
    """
    with reading(path, ""):
        data = _read(path, max(0, start - 1))
        if start and not data.startswith(b"\n"):
            start, data = 0, _read(path, 0)
    for line in data[start > 0 :].splitlines(keepends=True):
        start += len(line)
        if line.endswith(b"\n"):
            yield line, start


def _read(path: Path, start: int) -> bytes:
    """Return the bytes of a file from byte `start` on; b"" if the file is missing."""
    with suppress(FileNotFoundError), opened_plain(path, MAX_LOG_BYTES) as file:
        file.seek(start)
        return file.read()
    return b""


def _note(path: Path, line: bytes) -> NoteWritten:
    with expecting(path, "a note with a time and a text", f"remove the line {line[:200]!r}"):
        return validated(_NOTE, line)


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(to_line(data, sort_keys=True).encode(errors="replace")).hexdigest()

"""Requests to a run that trains: another process writes a file for each into the run folder.

A request is written atomically and needs no lock. The run removes the file after its rounds record
the outcome of the request.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from pydantic import TypeAdapter

from evo_grpo.errors import RunDirError
from evo_grpo.record.files import atomic_write, remove, seal, unseal, writing
from evo_grpo.record.names import COUNTER, REQUEST, STEERING
from evo_grpo.record.plain import is_folder, open_plain, read_plain, refuse_links
from evo_grpo.record.records import RoundRecord
from evo_grpo.schema.validated import validated
from evo_grpo.schema.validation import shown
from evo_grpo.types import Request

FORMAT = 1
"""Version of a request."""
_SCHEMA = TypeAdapter(Request)
_DIGITS = 20
"""Digits of the number in an id."""


@dataclass(frozen=True)
class PendingRequests:
    """The pending requests of a run.

    Attributes:
        requests: The requests, oldest first.
        unread: File -> error, for files that are truncated, unrecognised or links.
    """

    requests: tuple[Request, ...]
    unread: dict[str, str]


def new_id(folder: Path) -> str:
    """Return an id for a request; later ids are greater, independent of the clock.

    Raises:
        RunDirError: The folder of requests or its counter is a link, or no number is left.
    """
    file = folder / COUNTER
    refuse_links(file.parent)
    if os.path.lexists(file.parent) and not is_folder(file.parent):
        raise RunDirError(f"{file.parent}: expected a folder of the run, got a file; remove it")
    with writing(file, "steer"):
        file.parent.mkdir(exist_ok=True)
        descriptor = open_plain(file, os.O_RDWR | os.O_CREAT)
        try:
            # Concurrent commands take different numbers; closing the file releases the lock.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            number = last_number(folder) + 1
            text = f"{number:0{_DIGITS}d}"
            if len(text) > _DIGITS:
                raise RunDirError(
                    f"{file.parent}: expected requests with numbers of {_DIGITS} digits, got the "
                    "greatest of them, which leaves none; remove that folder"
                )
            os.pwrite(descriptor, text.encode(), 0)
        finally:
            os.close(descriptor)
    return f"{text}-{uuid4().hex[:8]}"


def last_number(folder: Path) -> int:
    """Return the number of the last request to a run, or 0 if there was none."""
    place, found = folder / STEERING, [0]
    with suppress(OSError, ValueError):  # missing, or refused by `refuse_links_in_run`
        found.append(int(read_plain(folder / COUNTER, _DIGITS)))
    with suppress(OSError):
        # The counter may be lost.
        names = os.listdir(place) if is_folder(place) else []
        found += [number_of(name) for name in names if REQUEST.fullmatch(name)]
    return max(found)


def number_of(id: str) -> int:
    """Return the number in the id of a request, or in the name of its file."""
    return int(id.partition("-")[0])


def write_request(folder: Path, request: Request) -> None:
    """Write a request with an id of `new_id` atomically; no lock is needed."""
    file = folder / STEERING / f"{request.id}.json"
    atomic_write(file, seal({"format": FORMAT, **asdict(request)}), "steer")


def read_requests(folder: Path) -> PendingRequests:
    """Return the pending requests; unreadable files are reported in `unread` and raise nothing."""
    place, found, unread = folder / STEERING, list[Request](), dict[str, str]()
    if os.path.lexists(place) and not is_folder(place):
        return PendingRequests(
            (), {STEERING: f"{place}: expected a folder of the run, got something else"}
        )
    with suppress(FileNotFoundError):
        for name in sorted(os.listdir(place)):
            if not REQUEST.fullmatch(name):
                continue
            try:
                found.append(_read(place / name))
            except FileNotFoundError:  # withdrawn in the meantime
                continue
            except RunDirError as error:
                unread[name] = str(error)
            except (OSError, ValueError) as error:
                unread[name] = (
                    f"{place / name}: expected a request as evo-grpo steer writes it, but {error}"
                )
    return PendingRequests(tuple(found), unread)


def carried_out(rounds: Iterable[RoundRecord]) -> set[str]:
    """Return the ids of the requests whose outcome is recorded in rounds."""
    return {one.request.id for record in rounds for one in record.steering}


def remove_requests(folder: Path, ids: Collection[str]) -> None:
    """Remove requests; missing ones are ignored."""
    place = folder / STEERING
    if not is_folder(place):
        return
    for one in sorted(ids):
        remove(place / f"{one}.json")


def _read(file: Path) -> Request:
    data = unseal(read_plain(file))
    if data.pop("format", None) != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}")
    request = validated(_SCHEMA, data)
    if f"{request.id}.json" != file.name:
        raise ValueError(f"its id is {shown(request.id)}, which is not its name")
    return request

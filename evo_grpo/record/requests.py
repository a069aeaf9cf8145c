"""Requests to a run that trains: another process writes a file for each into the run folder.

A request is written atomically and needs no lock. The run removes the file after its rounds record
the outcome of the request.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from pydantic import TypeAdapter

from evo_grpo.errors import RunDirError
from evo_grpo.record.files import atomic_write, remove, seal, unseal, writing
from evo_grpo.record.names import REQUEST, STEERING
from evo_grpo.record.plain import is_folder, read_plain, refuse_links
from evo_grpo.record.records import RoundRecord
from evo_grpo.schema.validated import validated
from evo_grpo.schema.validation import shown
from evo_grpo.types import Request

FORMAT = 1
"""Version of a request."""
_SCHEMA = TypeAdapter(Request)


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
    """Return an id for a request, greater than those of all that are pending.

    Raises:
        RunDirError: The folder of requests is a link or a file.
    """
    place = folder / STEERING
    refuse_links(place)
    if os.path.lexists(place) and not is_folder(place):
        raise RunDirError(f"{place}: expected a folder of the run, got a file; remove it")
    with writing(place, "steer"):
        place.mkdir(exist_ok=True)
    # Not by the clock alone, which may be set back.
    pending = (int(id.partition("-")[0]) for id in ids_of_requests(folder))
    return f"{max([time.time_ns(), *(number + 1 for number in pending)]):020d}-{uuid4().hex[:8]}"


def ids_of_requests(folder: Path) -> frozenset[str]:
    """Return the ids of the pending requests to a run, those of unreadable files too."""
    place = folder / STEERING
    names = os.listdir(place) if is_folder(place) else ()
    return frozenset(Path(name).stem for name in names if REQUEST.fullmatch(name))


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

"""Requests to a run while it trains: a file for each in its folder, written by another process.

The run has the lock of its folder; a request is written without it, under a name of its own, whole
or not at all. The run removes it once its rounds record what became of it.
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
from evo_grpo.record.files import atomic_write, seal, unseal, writing
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
"""Of the number in an id."""


@dataclass(frozen=True)
class Waiting:
    """The requests of a run that are there.

    Attributes:
        requests: In the order in which they were asked for.
        unread: File -> what is wrong with it, for those that are damaged, links or foreign.
    """

    requests: tuple[Request, ...]
    unread: dict[str, str]


def new_id(folder: Path) -> str:
    """Return an id for a request; a later one is greater, whatever the clocks say.

    Raises RunDirError where the folder of requests, or the counter in it, is a link, or the numbers
    are used up.
    """
    file = folder / COUNTER
    _refuse_foreign(file.parent)
    with writing(file, "steer"):
        file.parent.mkdir(exist_ok=True)
        descriptor = open_plain(file, os.O_RDWR | os.O_CREAT)
        try:
            # Two commands at once take one number after the other; closing it gives it back.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            number = last_number(folder) + 1
            text = f"{number:0{_DIGITS}d}"
            if len(text) > _DIGITS:
                raise RunDirError(
                    f"{file.parent}: expected requests with numbers of {_DIGITS} digits, got one "
                    f"that no greater number follows; remove that folder"
                )
            os.pwrite(descriptor, text.encode(), 0)
        finally:
            os.close(descriptor)
    return f"{text}-{uuid4().hex[:8]}"


def last_number(folder: Path) -> int:
    """Return the number of the last request to a run, 0 where there was none."""
    place, found = folder / STEERING, [0]
    with suppress(OSError, ValueError):  # not there, or what `refuse_planted` names
        found.append(int(read_plain(folder / COUNTER, _DIGITS)))
    with suppress(OSError):
        # The counter may be lost, or older than a request of an earlier version.
        names = os.listdir(place) if is_folder(place) else []
        found += [number_of(name) for name in names if REQUEST.fullmatch(name)]
    return max(found)


def number_of(id: str) -> int:
    """Return the number in the id of a request, or in the name of its file."""
    return int(id.partition("-")[0])


def write_request(folder: Path, request: Request) -> None:
    """Write a request with an id of `new_id`, whole or not at all; no lock is needed."""
    file = folder / STEERING / f"{request.id}.json"
    try:
        atomic_write(file, seal({"format": FORMAT, **asdict(request)}), "steer")
    except BaseException:  # Ctrl-C too: nobody would write this file a second time
        with suppress(OSError):
            file.with_name(f".{file.name}.tmp").unlink()
        raise


def read_requests(folder: Path) -> Waiting:
    """Return the requests that are there; a file that is none is told of, and raises nothing."""
    place, found, unread = folder / STEERING, list[Request](), dict[str, str]()
    if os.path.lexists(place) and not is_folder(place):
        return Waiting((), {STEERING: f"{place}: expected a folder of the run, got something else"})
    with suppress(FileNotFoundError):
        for name in sorted(os.listdir(place)):
            if not REQUEST.fullmatch(name):
                continue
            try:
                found.append(_read(place / name))
            except FileNotFoundError:  # withdrawn since
                continue
            except RunDirError as error:
                unread[name] = str(error)
            except (OSError, ValueError) as error:
                unread[name] = (
                    f"{place / name}: expected a request as evo-grpo steer writes it, but {error}"
                )
    return Waiting(tuple(found), unread)


def carried_out(rounds: Iterable[RoundRecord]) -> set[str]:
    """Return the ids of the requests whose end rounds have recorded."""
    return {one.request.id for record in rounds for one in record.steering}


def remove_requests(folder: Path, ids: Collection[str]) -> None:
    """Remove requests, those that are there."""
    place = folder / STEERING
    if not is_folder(place):
        return
    for one in sorted(ids):
        file = place / f"{one}.json"
        with writing(file):
            file.unlink(missing_ok=True)


def _refuse_foreign(place: Path) -> None:
    refuse_links(place)
    if os.path.lexists(place) and not is_folder(place):
        raise RunDirError(f"{place}: expected a folder of the run, got a file; remove it")


def _read(file: Path) -> Request:
    data = unseal(read_plain(file))
    if data.pop("format", None) != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}")
    request = validated(_SCHEMA, data)
    if f"{request.id}.json" != file.name:
        raise ValueError(f"its id is {shown(request.id)}, which is not its name")
    return request

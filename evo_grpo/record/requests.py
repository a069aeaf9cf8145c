"""Requests to a run while it trains: a file for each in its folder, written by another process.

The run has the lock of its folder; a request is written without it, under a name of its own, whole
or not at all. The run removes it once its rounds record what became of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from pydantic import TypeAdapter

from evo_grpo.errors import RunDirError
from evo_grpo.record.files import atomic_write, seal, unseal, writing
from evo_grpo.record.names import REQUEST, STEERING
from evo_grpo.record.plain import is_folder, read_plain, refuse_links
from evo_grpo.schema.validated import validated
from evo_grpo.types import Request
from evo_grpo.validation import shown

FORMAT = 1
"""Version of a request."""
_SCHEMA = TypeAdapter(Request)


@dataclass(frozen=True)
class Waiting:
    """The requests of a run that are there.

    Attributes:
        requests: They, in the order in which they were asked for.
        unread: File -> what is wrong with it, for those that are damaged, links or foreign.
    """

    requests: tuple[Request, ...]
    unread: dict[str, str]


def new_id() -> str:
    """Return an id for a request; a later one is greater."""
    return f"{time.time_ns():020d}-{uuid4().hex[:8]}"


def write_request(folder: Path, request: Request) -> None:
    """Write a request, whole or not at all.

    Args:
        folder: The run folder; this process need not have its lock.
        request: It.

    Raises:
        RunDirError: The folder of requests is a link, or holds one.
        RunFailedError: It cannot be written.
    """
    place = folder / STEERING
    refuse_links(place)
    if os.path.lexists(place) and not is_folder(place):
        raise RunDirError(f"{place}: expected a folder of the run, got a file; remove it")
    file = place / f"{request.id}.json"
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


def remove_requests(folder: Path, ids: Collection[str]) -> None:
    """Remove requests, those that are there.

    Args:
        folder: The run folder.
        ids: Theirs.

    Raises:
        RunFailedError: One cannot be removed.
    """
    place = folder / STEERING
    if not is_folder(place):
        return
    for one in sorted(ids):
        file = place / f"{one}.json"
        with writing(file):
            file.unlink(missing_ok=True)


def _read(file: Path) -> Request:
    data = unseal(read_plain(file))
    if data.pop("format", None) != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}")
    request = validated(_SCHEMA, data)
    if f"{request.id}.json" != file.name:
        raise ValueError(f"its id is {shown(request.id)}, which is not its name")
    return request

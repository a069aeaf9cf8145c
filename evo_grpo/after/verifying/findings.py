"""The findings of a check of a run folder, and a cache of file digests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeVar, final

from evo_grpo.errors import EvoGrpoError
from evo_grpo.record.digests import damaged, sha256_of
from evo_grpo.record.plain import stamp_of

T = TypeVar("T")


@dataclass
class Findings:
    """The findings of a check of a run folder.

    Attributes:
        rounds: Finished rounds.
        files: Files that were checked.
        damage: A sentence for each file that differs from the records.
        notes: A sentence for each leftover of a stop; repeating the stopped command repairs it.
    """

    rounds: int = 0
    files: int = 0
    damage: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    def read(self, read: Callable[[], T]) -> T | None:
        """Return the content of a file; None if reading it raises, which counts as damage."""
        self.files += 1
        try:
            return read()
        except EvoGrpoError as error:
            self.damage.append(str(error))
        except OSError as error:
            self.damage.append(f"{error.filename}: cannot be read ({error.strerror})")
        return None

    def report(self, text: str, *, repaired: bool) -> None:
        """Add a sentence: a note where a resume repairs the state, else damage."""
        (self.notes if repaired else self.damage).append(text)

    def add(self, part: Findings) -> None:
        """Add the findings of a run within the run."""
        self.files += part.files
        self.damage += part.damage
        self.notes += part.notes


@final
class Digests:
    """Computes the SHA-256 of files, once per file unless the file changes."""

    def __init__(self) -> None:
        self._sha256 = cache(_sha256)

    def damaged(self, folder: Path, files: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
        """Yield files with a different digest than expected; see `digests.damaged`."""
        return damaged(folder, files, lambda file: self._sha256(file, stamp_of(file)))

    def same(self, folder: Path, files: Mapping[str, str]) -> bool:
        """Return whether all files of a folder have the expected digests."""
        return next(self.damaged(folder, files), None) is None

    def compare(
        self, folder: Path, files: Mapping[str, str], recorded: str, found: Findings
    ) -> None:
        """Add files with another digest to the damage; `recorded` is, e.g., "round 1 recorded"."""
        found.files += len(files)
        for name, digest in self.damaged(folder, files):
            what = "is missing, but" if digest is None else "has changed since"
            found.damage.append(f"{folder / name}: {what} {recorded} it")


def _sha256(file: Path, stamp: tuple[int, ...] | None) -> str | None:
    del stamp  # part of the key of the cache: a file that was written since is read again
    with suppress(FileNotFoundError):  # removed since by a run in progress
        return sha256_of(file)
    return None

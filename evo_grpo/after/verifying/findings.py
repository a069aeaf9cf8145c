"""What a look through a run folder found, and the digests that it took."""

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
    """What a look through a run folder found.

    Attributes:
        rounds: Finished rounds.
        files: Files that were looked at.
        damage: A sentence for each thing that is not as it was written.
        notes: A sentence for what a stop leaves behind; the command that was stopped makes it good.
    """

    rounds: int = 0
    files: int = 0
    damage: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    def read(self, read: Callable[[], T]) -> T | None:
        """Return what a file holds; None where reading it raises, which is damage."""
        self.files += 1
        try:
            return read()
        except EvoGrpoError as error:
            self.damage.append(str(error))
        except OSError as error:
            self.damage.append(f"{error.filename}: cannot be read ({error.strerror})")
        return None

    def tell(self, text: str, *, mended: bool) -> None:
        """Add a sentence: a note where a stop leaves it so and going on mends it, else damage."""
        (self.notes if mended else self.damage).append(text)

    def add(self, part: Findings) -> None:
        """Add what was found in a run within the run."""
        self.files += part.files
        self.damage += part.damage
        self.notes += part.notes


@final
class Digests:
    """Takes SHA-256 of files, once for each as long as it stays the same file."""

    def __init__(self) -> None:
        self._sha256 = cache(_sha256)

    def damaged(self, folder: Path, files: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
        """Yield what has another digest than expected; see `digests.damaged`."""
        return damaged(folder, files, lambda file: self._sha256(file, stamp_of(file)))

    def same(self, folder: Path, files: Mapping[str, str]) -> bool:
        """Return whether all files of a folder have the digests that are expected."""
        return next(self.damaged(folder, files), None) is None

    def compare(
        self, folder: Path, files: Mapping[str, str], recorded: str, found: Findings
    ) -> None:
        """Add to the damage what is not as it was; `recorded` says by what, with its verb."""
        found.files += len(files)
        for name, digest in self.damaged(folder, files):
            what = "is missing" if digest is None else "has changed"
            found.damage.append(f"{folder / name}: {what}; it is not what {recorded}")


def _sha256(file: Path, stamp: tuple[int, ...] | None) -> str | None:
    del stamp  # a file that was written since is another one to the cache
    with suppress(FileNotFoundError):  # removed since, by a run that goes on
        return sha256_of(file)
    return None

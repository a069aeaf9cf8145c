"""Whether files are still those that were written: by SHA-256, as records and manifests hold it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from evo_grpo.errors import CheckpointError
from evo_grpo.record.plain import MOST_BYTES_OF_WEIGHTS, is_plain, refuse_oversized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path


def check_digests(
    folder: Path, files: Mapping[str, str], recorded_by: str, or_else: str = ""
) -> None:
    """Raise CheckpointError, which names it, for the first file that is missing or was changed.

    `files` are digests (SHA-256) by path below the folder, `recorded_by` says what holds them, with
    its verb, and `or_else` is another remedy than putting a file back.
    """
    for name, found in damaged(folder, files):
        raise CheckpointError(
            f"checkpoint {folder / name}: it is not the one that {recorded_by} (expected sha256 "
            f"{files[name]}, got {found or 'no file'}); put the file back as it was"
            f"{or_else and ', '}{or_else}"
        )


def damaged(
    folder: Path,
    files: Mapping[str, str],
    digest: Callable[[Path], str | None] | None = None,
) -> Iterator[tuple[str, str | None]]:
    """Yield the name of each file that has another SHA-256 than expected, with the one it has.

    That is None where there is no regular file. `digest` returns that of a file; None reads it. A
    file that is longer than any file of an adapter raises RunDirError.
    """
    for name, expected in files.items():
        file = folder / name
        refuse_oversized(file, MOST_BYTES_OF_WEIGHTS)
        found = (digest or sha256_of)(file) if is_plain(file) else None
        if found != expected:
            yield name, found


def sha256_of(file: Path) -> str | None:
    """Return the SHA-256 of a file, None where there is no regular file."""
    if not file.is_file():
        return None
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()

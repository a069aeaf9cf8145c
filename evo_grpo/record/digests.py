"""Whether files are still those that were written: by SHA-256, as records and manifests hold it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from evo_grpo.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path


def check_digests(
    folder: Path, files: Mapping[str, str], recorded_by: str, or_else: str = ""
) -> None:
    """Compare files with their digests.

    Args:
        folder: Where they lie.
        files: SHA-256 by path below the folder.
        recorded_by: What holds the digests, with its verb, for the message.
        or_else: Another remedy than putting a file back.

    Raises:
        CheckpointError: A file is missing or was changed; the message names the first.
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
    """Yield the name of each file that has another digest than expected, with the one it has.

    Args:
        folder: Where they lie.
        files: SHA-256 by path below the folder.
        digest: Returns that of a file; None reads it.

    Yields:
        Its path below the folder, and its SHA-256; None where there is no regular file.
    """
    for name, expected in files.items():
        found = (digest or sha256_of)(folder / name)
        if found != expected:
            yield name, found


def sha256_of(file: Path) -> str | None:
    """Return the SHA-256 of a file, None where there is no regular file."""
    if not file.is_file():
        return None
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()

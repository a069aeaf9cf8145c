"""Compare files with the SHA-256 digests in records and manifests."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from evo_grpo.errors import CheckpointError
from evo_grpo.record.plain import MAX_WEIGHT_BYTES, is_plain, refuse_oversized

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


def sha256_of(file: Path) -> str | None:
    """Return the SHA-256 of a file, or None if there is no regular file."""
    if not file.is_file():
        return None
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def check_digests(
    folder: Path, files: Mapping[str, str], recorded_by: str, or_else: str = ""
) -> None:
    """Raise CheckpointError for the first of `files` (path -> SHA-256) that is missing or changed.

    The message names `recorded_by`, such as "round 1 recorded", and the remedy `or_else`.
    """
    for name, found in damaged(folder, files):
        raise CheckpointError(
            f"checkpoint {folder / name}: it is not the one that {recorded_by} (expected sha256 "
            f"{files[name]}, got {found or 'no file'}); put the file back as it was"
            f"{or_else and ', '}{or_else}"
        )


def damaged(folder: Path, files: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    """Yield the name and SHA-256 of each file whose digest differs; the SHA-256 is None if missing.

    A file that is larger than any file of an adapter raises RunDirError.
    """
    for name, expected in files.items():
        file = folder / name
        refuse_oversized(file, MAX_WEIGHT_BYTES)
        found = sha256_of(file) if is_plain(file) else None
        if found != expected:
            yield name, found

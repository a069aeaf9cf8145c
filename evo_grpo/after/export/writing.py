"""An export as a folder: whole, or nothing that loads, also after a kill or on a full disk."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from evo_grpo.errors import RunDirError
from evo_grpo.record.digests import sha256_of
from evo_grpo.record.files import create_folder, sync_names, sync_tree
from evo_grpo.record.plain import check_relative, is_plain, read_plain

WEIGHTS = "adapter_model.safetensors"
"""PEFT's name for the file of an adapter's tensors."""
ADAPTER = "adapter_config.json"
"""And for that of its configuration."""
CARD = "README.md"
MANIFEST = "export.json"
"""What was exported, and the SHA-256 of each other file."""
BASE = "base"
"""The folder of the base model, where it is part of the export."""
LOADED_BY = ("config.json", ADAPTER)
"""That without which transformers and PEFT load nothing: it goes first, and comes last."""
Fill = Callable[[Path], None]
"""Writes files into a folder."""

_ASIDE = re.compile(r"\.evo-grpo-export-\d+")
"""How the folder is called in which an export is written before it is whole."""
_OURS = re.compile(
    rf"(?:{BASE}/)?(?:README\.md|export\.json|adapter_(?:model\.safetensors|config\.json)"
    r"|(?:generation_|tokenizer_)?config\.json|model[\w.-]*\.(?:safetensors|json)"
    r"|tokenizer[\w.-]*|chat_template[\w.]*|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.\w+|merges\.txt|[\w.]+\.model)"
)
"""Files that an export may have."""


def check_target(out: Path, names: Iterable[str], *, force: bool) -> Path:
    """Refuse a place that holds something; return where it is: a link is followed here, once.

    Other files may lie there with `force`, but nothing else in the place of a file or a folder.
    """
    target = Path(os.path.realpath(out))
    if not target.is_dir():
        if os.path.lexists(target):
            raise RunDirError(f"{out}: expected a folder, found a file; choose another OUT")
        return target
    if not force and any(not _ASIDE.fullmatch(path.name) for path in target.iterdir()):
        raise RunDirError(f"{out}: is not empty; choose another OUT, or replace it with --force")
    for name in names:
        if (target / name).is_dir() and not (target / name).is_symlink():
            raise RunDirError(
                f"{out / name}: expected a file of an earlier export, found a folder; remove it, "
                "or choose another OUT"
            )
    base = target / BASE
    if os.path.lexists(base) and (base.is_symlink() or not base.is_dir()):
        raise RunDirError(
            f"{out / BASE}: expected the folder of an earlier export's base, found a link or a "
            "file; remove it, or choose another OUT"
        )
    return target


def write_export(
    target: Path, contents: Mapping[str, bytes], fills: Sequence[Fill], about: Mapping[str, Any]
) -> list[str]:
    """Write a folder so that it is whole or nothing that loads.

    The files of an earlier export in it are replaced. Where it cannot be written, what was written
    is removed. `about` is what the manifest says besides the files, whose paths are returned.
    """
    there = target.is_dir()
    if not there:
        create_folder(target.parent)
    # Within a folder that is there: the one above it may be another disk, or not ours to write.
    above = target if there else target.parent
    for path in above.iterdir() if there else ():
        if _ASIDE.fullmatch(path.name):  # left by a kill
            _remove_leftover(path)
    aside = above / f".evo-grpo-export-{os.getpid()}"
    aside.mkdir()
    try:
        for fill in fills:
            fill(aside)
        for name, data in contents.items():
            _make_parent(aside, name)
            (aside / name).write_bytes(data)
        digests = {name: sha256_of(aside / name) for name in _files_of(aside)}
        manifest = {**about, "files": digests}
        (aside / MANIFEST).write_bytes(json.dumps(manifest, indent=1).encode() + b"\n")
        sync_tree(aside)
        names = [*digests, MANIFEST]
        if there:
            check_target(target, names, force=True)
            _move_up(aside, target, names)
        else:
            aside.rename(target)
        sync_names(above)
    finally:
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
    return names


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return what the manifest of an export says; None where there is none that can be read."""
    try:
        found = json.loads(read_plain(folder / MANIFEST))
        for name in found["files"]:
            check_relative(name)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return cast("dict[str, Any]", found)


def is_export_file(name: str) -> bool:
    """Return whether an export may have a file of that path."""
    return _OURS.fullmatch(name) is not None


def _files_of(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def _make_parent(folder: Path, name: str) -> None:
    parent = (folder / name).parent
    if not parent.is_dir():
        parent.mkdir()


def _move_up(aside: Path, target: Path, names: Sequence[str]) -> None:
    """Move files into the folder above theirs, all of them or none; others may lie there."""
    ordered = sorted(names, key=lambda name: (name in LOADED_BY, name == WEIGHTS))
    stale = [name for name in _earlier(target) if name not in names]
    for name in reversed(sorted([*stale, *ordered], key=LOADED_BY.__contains__)):
        (target / name).unlink(missing_ok=True)
    moved: list[Path] = []
    try:
        for name in ordered:
            _make_parent(target, name)
            moved.append(target / name)
            (aside / name).rename(target / name)
    except BaseException:  # Ctrl-C too: no half of an export may stay
        for path in reversed(moved):
            with suppress(OSError):
                path.unlink()
        raise
    finally:
        with suppress(OSError):  # not empty, or not there
            (target / BASE).rmdir()


def _earlier(target: Path) -> list[str]:
    """Return the files of an export that is replaced; one without a manifest is of before."""
    manifest = read_manifest(target)
    names = [WEIGHTS, ADAPTER, CARD] if manifest is None else [*manifest["files"], MANIFEST]
    return [
        name
        for name in names
        if _OURS.fullmatch(name)
        and (is_plain(target / name) or (target / name).is_symlink())
        and not (target / name).parent.is_symlink()
    ]


def _remove_leftover(aside: Path) -> None:
    """Remove what an export left that was killed, and nothing else that may lie in it."""
    if aside.is_symlink() or (aside / BASE).is_symlink():
        return
    with suppress(OSError):
        for name in filter(_OURS.fullmatch, _files_of(aside)):
            (aside / name).unlink(missing_ok=True)
        with suppress(OSError):
            (aside / BASE).rmdir()
        aside.rmdir()

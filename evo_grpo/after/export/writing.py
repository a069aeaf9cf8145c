"""Writes an export: a complete folder, or nothing that loads, also after a kill or a full disk."""

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
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.problems import Problems

WEIGHTS = "adapter_model.safetensors"
"""PEFT's name for the file of an adapter's tensors."""
ADAPTER = "adapter_config.json"
"""PEFT's name for the file of an adapter's configuration."""
CARD = "README.md"
MANIFEST = "export.json"
"""The file with the exported agent, and the SHA-256 of each other file."""
BASE = "base"
"""The folder of the base model, where it is part of the export."""
LOADED_BY = ("config.json", ADAPTER)
"""Files that transformers and PEFT need to load: removed first, and written last."""
Fill = Callable[[Path], None]
"""Writes files into a folder."""

_ASIDE = re.compile(r"\.evo-grpo-export-\d+")
"""Name of the folder of an export that is not complete yet."""
_OURS = re.compile(
    rf"(?:{BASE}/)?(?:README\.md|export\.json|adapter_(?:model\.safetensors|config\.json)"
    r"|(?:generation_|tokenizer_)?config\.json|model[\w.-]*\.(?:safetensors|json)"
    r"|tokenizer[\w.-]*|chat_template[\w.]*|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.\w+|merges\.txt|[\w.]+\.model)"
)
"""Files that an export may have."""


def check_target(out: Path, names: Iterable[str], *, force: bool) -> Path:
    """Check that an export may be written to a folder, and return its real path.

    With `force` the folder may contain other files, but nothing of another type under a name of the
    export.
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
    """Write the folder of an export; return the paths of its files.

    The files of an earlier export are replaced. After an error the written files are removed. Even
    after a kill, the folder is either complete or cannot be loaded.
    `about` is the content of the manifest except the files.
    """
    there = target.is_dir()
    if not there:
        create_folder(target.parent)
    # Inside an existing folder: its parent may be another disk, or not writable.
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
    """Return the manifest of an export; None if there is no readable one."""
    try:
        found = json.loads(read_plain(folder / MANIFEST))
        for name in found["files"]:
            check_relative(name)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return cast("dict[str, Any]", found)


OF_ANSWERS = ("prompt", "max_output_tokens")
"""Hyperparameters of an agent that act when it answers; an export keeps those that it has."""


def exported_values(folder: Path) -> Hparams:
    """Return the hyperparameters of an export that act when it answers, if it has its own."""
    found = read_manifest(folder) or {}
    try:
        return Hparams(**{name: found[name] for name in OF_ANSWERS if name in found})
    except Problems:  # changed by hand
        return Hparams()


def is_export_file(name: str) -> bool:
    """Return whether an export may have a file of this path."""
    return _OURS.fullmatch(name) is not None


def _files_of(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def _make_parent(folder: Path, name: str) -> None:
    parent = (folder / name).parent
    if not parent.is_dir():
        parent.mkdir()


def _move_up(aside: Path, target: Path, names: Sequence[str]) -> None:
    """Move the files of a folder into its target, all of them or none."""
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
    except BaseException:  # Ctrl-C too: a part of an export must not stay
        for path in reversed(moved):
            with suppress(OSError):
                path.unlink()
        raise
    finally:
        with suppress(OSError):  # not empty, or missing
            (target / BASE).rmdir()


def _earlier(target: Path) -> list[str]:
    """Return the files of an earlier export."""
    manifest = read_manifest(target)
    return [
        name
        for name in ([] if manifest is None else [*manifest["files"], MANIFEST])
        if _OURS.fullmatch(name)
        and (is_plain(target / name) or (target / name).is_symlink())
        and not (target / name).parent.is_symlink()
    ]


def _remove_leftover(aside: Path) -> None:
    """Remove the files that a killed export left in its folder, and no others."""
    if aside.is_symlink() or (aside / BASE).is_symlink():
        return
    with suppress(OSError):
        for name in filter(_OURS.fullmatch, _files_of(aside)):
            (aside / name).unlink(missing_ok=True)
        with suppress(OSError):
            (aside / BASE).rmdir()
        aside.rmdir()

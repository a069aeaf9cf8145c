"""Writes an export: a complete folder, or nothing that loads, also after a kill or a full disk."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from evo_grpo.errors import RunDirError
from evo_grpo.record.digests import sha256_of
from evo_grpo.record.files import create_folder, sync_names, sync_tree
from evo_grpo.record.plain import check_relative, read_plain
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

_ASIDE = ".evo-grpo-export-"
"""How the name of the folder of an export begins that is not complete yet."""

_OURS = re.compile(
    rf"(?:{BASE}/)?(?:README\.md|export\.json|adapter_(?:model\.safetensors|config\.json)"
    r"|(?:generation_|tokenizer_)?config\.json|model[\w.-]*\.(?:safetensors|json)"
    r"|tokenizer[\w.-]*|chat_template[\w.]*|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.\w+|merges\.txt|[\w.]+\.model)"
)
"""Files that an export may have."""


def check_target(out: Path, *, force: bool) -> Path:
    """Check that an export may be written to a folder, and return its real path.

    The folder is new or empty; with `force` it may be an earlier export, with no other or changed
    files.
    """
    target = Path(os.path.realpath(out))
    if not target.is_dir():
        if os.path.lexists(target):
            raise RunDirError(f"{out}: expected a folder, found a file; choose another OUT")
        return target
    names = [p.name for p in target.iterdir() if not p.name.startswith(_ASIDE)]
    if names and not force:
        raise RunDirError(f"{out}: is not empty; choose another OUT, or replace it with --force")
    written: dict[str, str] = (read_manifest(target) or {}).get("files", {})
    for name in _files_of(target) if written else names:
        if name != MANIFEST and sha256_of(target / name) != written.get(name, ""):
            raise RunDirError(
                f"{out}: expected an earlier export to replace, found {name}, which is not as an "
                "export wrote it; move it away, or choose another OUT"
            )
    return target


def write_export(
    target: Path, contents: Mapping[str, bytes], fills: Sequence[Fill], about: Mapping[str, Any]
) -> list[str]:
    """Write the folder of an export; return the paths of its files.

    The files of an earlier export are removed. Even after a kill, the folder is either complete or
    cannot be loaded. `about` is the content of the manifest except the files.
    """
    fresh = not target.exists()
    create_folder(target)
    aside = target / f"{_ASIDE}{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)  # left by a kill
    aside.mkdir()
    try:
        for fill in fills:
            fill(aside)
        for name, data in contents.items():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            (aside / name).write_bytes(data)
        digests = {name: sha256_of(aside / name) for name in _files_of(aside)}
        manifest = {**about, "files": digests}
        (aside / MANIFEST).write_bytes(json.dumps(manifest, indent=1).encode() + b"\n")
        sync_tree(aside)
        _replace(target, aside)
        sync_names(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(OSError):  # it is not empty: the export is there
            if fresh:
                target.rmdir()
    return [*digests, MANIFEST]


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of an export; None if there is no readable one."""
    try:
        found = json.loads(read_plain(folder / MANIFEST))
        found["files"] = dict(found["files"])
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
    """Return the paths of the files in a folder, without those that a kill left."""
    files = [p.relative_to(folder) for p in folder.rglob("*") if not _is_folder(p)]
    return sorted(file.as_posix() for file in files if not file.parts[0].startswith(_ASIDE))


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _replace(target: Path, aside: Path) -> None:
    """Remove what is in a folder, and move the contents of another one there."""
    for path in sorted(target.iterdir(), key=_order, reverse=True):
        if path == aside:
            continue
        if _is_folder(path):
            shutil.rmtree(path)
        else:
            path.unlink()
    for path in sorted(aside.iterdir(), key=_order):
        path.rename(target / path.name)


def _order(path: Path) -> int:
    """Return the place of a file in the order of writing: what loads an export comes last."""
    return 2 if path.name in LOADED_BY else int(path.name != MANIFEST)

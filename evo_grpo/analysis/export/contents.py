"""Collects and writes the contents of an export.

An export has an adapter, the tokenizer, and the base if it is embedded in this package or a GGUF
file. A merged export has one model and the tokenizer.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from evo_grpo import errors
from evo_grpo.record import plain
from evo_grpo.record.choice import ChosenAgent
from evo_grpo.record.files import create_folder, load_json, sync_names, sync_tree
from evo_grpo.record.folder import listed_objects
from evo_grpo.record.names import ATTRIBUTES
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.problems import Problems
from evo_grpo.settings import ModelConfig
from evo_grpo.sources import PACKAGED, Source, embedded_digests, resolve

WEIGHTS = "adapter_model.safetensors"
"""PEFT's name for the file of an adapter's tensors."""
ADAPTER = "adapter_config.json"
"""PEFT's name for the file of an adapter's configuration."""
CARD = "README.md"
MANIFEST = "export.json"
"""The file that describes the exported agent and has the SHA-256 of every other file."""
BASE = "base"
"""The folder of the base model, where it is part of the export."""
LOADED_BY = ("config.json", ADAPTER)
"""Files that transformers and PEFT need to load: removed first, and written last."""
Fill = Callable[[Path], None]
"""Writes files into a folder."""

_ASIDE = ".evo-grpo-export-"
"""Prefix of the folder in which an export is written until it is complete."""

_OURS = re.compile(
    rf"(?:{BASE}/)?(?:README\.md|export\.json|adapter_(?:model\.safetensors|config\.json)"
    r"|(?:generation_|tokenizer_)?config\.json|model[\w.-]*\.(?:safetensors|json)"
    r"|tokenizer[\w.-]*|chat_template[\w.]*|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.\w+|merges\.txt|[\w.]+\.model)"
)
"""Files that an export may have."""


def check_target(out: Path, *, force: bool) -> Path:
    """Return the real path of a folder that is new, empty or, with `force`, an unchanged export.

    Raises RunDirError for any other `out`.
    """
    target = Path(os.path.realpath(out))
    if not target.is_dir():
        if os.path.lexists(target):
            raise errors.RunDirError(f"{out}: expected a folder, found a file; choose another OUT")
        return target
    names = [p.name for p in target.iterdir() if not p.name.startswith(_ASIDE)]
    if names and not force:
        raise errors.RunDirError(
            f"{out}: is not empty; choose another OUT, or replace it with --force"
        )
    digests: dict[str, str] = (read_manifest(target) or {}).get("files", {})
    for name in _files_of(target) if digests else names:
        if name != MANIFEST and plain.sha256_of(target / name) != digests.get(name, ""):
            raise errors.RunDirError(
                f"{out}: expected an earlier export to replace, found {name}, which is not as an "
                "export wrote it; move it away, or choose another OUT"
            )
    return target


def write_export(
    target: Path, contents: Mapping[str, bytes], fills: Sequence[Fill], about: Mapping[str, Any]
) -> list[str]:
    """Write an export into a folder, in place of an earlier export; return the files' paths.

    If the process is killed, the folder is complete or cannot be loaded. `contents` has the bytes
    of files, `fills` write further files, and `about` is the manifest without the files.
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
        digests = {name: plain.sha256_of(aside / name) for name in _files_of(aside)}
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
        manifest = json.loads(plain.read_plain(folder / MANIFEST))
        manifest["files"] = dict(manifest["files"])
        for name in manifest["files"]:
            plain.check_relative(name)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return cast("dict[str, Any]", manifest)


OF_ANSWERS = ("prompt", "max_output_tokens")
"""Hyperparameters that act when an agent answers; the manifest has those of the agent."""


def exported_values(folder: Path) -> Hparams:
    """Return the exported agent's hyperparameters that act when it answers (`OF_ANSWERS`)."""
    manifest = read_manifest(folder) or {}
    try:
        return Hparams(**{name: manifest[name] for name in OF_ANSWERS if name in manifest})
    except Problems:  # changed by hand
        return Hparams()


def is_export_file(name: str) -> bool:
    """Return whether `name` is the path of a file that an export may have."""
    return _OURS.fullmatch(name) is not None


def _files_of(folder: Path) -> list[str]:
    """Return the paths of the files in a folder, without leftovers of a killed process."""
    files = [p.relative_to(folder) for p in folder.rglob("*") if not _is_folder(p)]
    return sorted(file.as_posix() for file in files if not file.parts[0].startswith(_ASIDE))


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _replace(target: Path, aside: Path) -> None:
    """Move the contents of `aside` to `target`, after removing the contents of `target`."""
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
    """Return a sort key for the order of writing; files that loading needs are written last."""
    return 2 if path.name in LOADED_BY else int(path.name != MANIFEST)


INSIDE = f"./{BASE}"
"""Name of a base that is part of the export, in adapter_config.json."""
_FLOAT = "float32"


@dataclass(frozen=True)
class BaseModel:
    """The base model of an adapter.

    Attributes:
        name: Name in the settings of the run.
        source: The argument of `from_pretrained`; None if the model is not on this machine.
        reference: Name in adapter_config.json.
        own_code: Whether the model needs trust_remote_code.
    """

    name: str
    source: Source | None
    reference: str
    revision: str | None = None
    own_code: bool = False
    dtype: str = _FLOAT
    digest: str | None = None
    quantization: str | None = None

    @property
    def embedded(self) -> bool:
        """Whether the model is part of this package."""
        return self.source is not None and self.source.name in embedded_digests()

    @property
    def is_inside(self) -> bool:
        """Whether the model is part of the export."""
        return self.reference == INSIDE

    @property
    def hub_id(self) -> str | None:
        """Id of the model on the Hub, None if it is not known to be there."""
        if self.name in PACKAGED:
            return PACKAGED[self.name].hub_id
        is_remote = self.source is not None and not self.source.local
        return self.reference if is_remote else None

    @property
    def shown(self) -> str:
        """Name of the model in the export; a local path is shortened to its last part."""
        is_path = self.source is not None and self.source.local
        return self.name.rstrip("/").rpartition("/")[2] if is_path else self.name


@dataclass(frozen=True)
class Contents:
    """The files of an export, except its card.

    Attributes:
        files: Bytes of a file by its path.
        fills: Functions that write further files into the folder.
        dtype: The dtype of a merged model, None for an adapter.
        notes: A sentence for each missing part.
    """

    files: Mapping[str, bytes]
    fills: Sequence[Fill] = ()
    tokenizer: bool = False
    dtype: str | None = None
    rank: int = 8
    notes: Sequence[str] = field(default_factory=tuple[str, ...])


def checked_adapter(choice: ChosenAgent) -> Path:
    """Return the PEFT folder of an agent of a run, after checking its recorded digests."""
    files = {name: digest for name, digest in choice.files.items() if name.startswith("actor/")}
    if not choice.checkpoint or not {f"actor/{WEIGHTS}", f"actor/{ADAPTER}"} <= files.keys():
        raise errors.CheckpointError(
            f"{choice.run}: its records name no checkpoint of {choice.agent.name}, or not all of "
            "its files; put rounds.jsonl and summary.json back as they were"
        )
    folder = plain.inside(choice.run, f"{choice.checkpoint}/actor")
    plain.check_digests(folder.parent, files, "the run recorded", "or repeat the run")
    return folder


def read_adapter_files(choice: ChosenAgent) -> dict[str, bytes]:
    """Read the two files of an agent's adapter, and check their recorded digests."""
    folder = checked_adapter(choice)
    return {
        WEIGHTS: plain.read_plain(folder / WEIGHTS, plain.MAX_WEIGHT_BYTES),
        ADAPTER: plain.read_plain(folder / ADAPTER, plain.MAX_JSON_BYTES),
    }


def find_base(
    choice: ChosenAgent, model: ModelConfig, adapter: bytes, quantization: str | None = None
) -> BaseModel:
    """Return an agent's base, by the settings of the run and the agent's adapter_config.json."""
    name, attributes = model.name, _attributes(choice)
    is_object = "model" in _objects(choice, attributes)
    source = None if is_object else _source(name)
    recorded_name = str(_json(adapter, ADAPTER).get("base_model_name_or_path") or name)
    if source is None:
        reference = recorded_name if is_object else name
    elif not source.local:
        reference = source.path
    elif source.gguf_file or name in embedded_digests():
        reference = INSIDE
    else:
        reference = os.path.abspath(source.path)
    revision = model.config.get("revision")
    return BaseModel(
        name,
        source,
        reference,
        revision=revision if isinstance(revision, str) else None,
        own_code=model.trust_remote_code,
        dtype=str(attributes.get("dtype") or _FLOAT),
        digest=attributes.get("base_digest"),
        quantization=quantization,
    )


def adapter_contents(
    choice: ChosenAgent, base: BaseModel, adapter: Mapping[str, bytes]
) -> Contents:
    """Return the contents of an export of an adapter.

    These are the adapter, the tokenizer, and the base if it is embedded or a GGUF file.
    """
    config = _json(adapter[ADAPTER], ADAPTER)
    config["base_model_name_or_path"] = base.reference
    if base.revision is not None:
        config["revision"] = base.revision
    files = {**adapter, ADAPTER: json.dumps(config, indent=2, sort_keys=True).encode()}
    tokenizer, notes = _tokenizer(choice, base)
    fills: list[Fill] = []
    if base.embedded:
        assert base.source is not None, "an embedded base has one"
        files |= {f"{BASE}/{name}": data for name, data in _embedded(base.source).items()}
    elif base.is_inside:
        fills.append(partial(_write_base, base))
        files |= {f"{BASE}/{name}": data for name, data in tokenizer.items()}
    files |= tokenizer
    return Contents(files, fills, bool(tokenizer), rank=_rank(config), notes=notes)


def merged_contents(choice: ChosenAgent, base: BaseModel, adapter: Mapping[str, bytes]) -> Contents:
    """Return the contents of an export of one model that is merged from a base and an adapter."""
    why = (
        "it was given as an object, or is not found"
        if base.source is None
        else f"the adapter was trained over it in {base.quantization} (engine.quantization), whose "
        "rounding would swallow the adapter's changes"
        if base.quantization is not None
        else "it comes with Python of its own (trust_remote_code), which an export does not run"
        if base.own_code
        else ""
    )
    if base.source is None or why:
        raise errors.ModelError(
            f"model {base.name!r}: cannot be merged with the adapter: {why}; export without --merge"
        )
    from evo_grpo.model.exporting import stored_dtype, write_merged

    dtype = stored_dtype(base.source, base.revision, base.dtype)
    tokenizer, notes = _tokenizer(choice, base)
    fill = partial(write_merged, base.source, base.revision, adapter, dtype, base.digest)
    return Contents(tokenizer, [fill], bool(tokenizer), dtype, notes=notes)


def _write_base(base: BaseModel, folder: Path) -> None:
    from evo_grpo.model.exporting import write_base

    assert base.source is not None, "a base is written where its source is a file"
    write_base(base.source, base.dtype, base.digest, folder / BASE)


def _source(name: str) -> Source | None:
    try:
        return resolve(name)
    except errors.EngineUnavailable:
        if name in PACKAGED:
            raise
    except errors.EvoGrpoError:
        pass
    return None


def _tokenizer(choice: ChosenAgent, base: BaseModel) -> tuple[dict[str, bytes], list[str]]:
    """Return the files of the run's tokenizer, or none and a note with the reason."""
    attributes = _attributes(choice)
    parts = [name for name in ("model", "tokenizer") if name in _objects(choice, attributes)]
    if parts or base.source is None:
        why = f"the run was given its {parts[0]} in Python" if parts else "its base is not found"
        return {}, [f"{choice.run}: the export has no tokenizer, because {why}; save it beside it"]
    if base.embedded:
        files = _embedded(base.source)
        return {name: files[name] for name in files if name.startswith("tokenizer")}, []
    from evo_grpo.model.exporting import tokenizer_files

    padding = attributes.get("padding")
    try:
        return tokenizer_files(base.source, base.revision, padding[1] if padding else None), []
    except errors.ModelError as error:
        return {}, [f"the export has no tokenizer of its own, use that of its base: {error}"]


def _embedded(source: Source) -> dict[str, bytes]:
    """Return the files of an embedded model, and check their digests."""
    folder, remedy = Path(source.path), "install evo-grpo again"
    return {
        name: _checked(folder / name, digest, "the package has", remedy)
        for name, digest in embedded_digests()[source.name].items()
    }


def _checked(file: Path, expected: str, whose: str, remedy: str) -> bytes:
    """Read a file, and check its digest."""
    plain.check_digests(file.parent, {file.name: expected}, whose, f"or {remedy}")
    return plain.read_plain(
        file, plain.MAX_JSON_BYTES if file.suffix == ".json" else plain.MAX_WEIGHT_BYTES
    )


def _attributes(choice: ChosenAgent) -> dict[str, Any]:
    """Return the content of a checkpoint's attributes.json; {} if the run recorded no such file."""
    expected = choice.files.get(ATTRIBUTES)
    if expected is None:
        return {}
    file = plain.inside(choice.run, f"{choice.checkpoint}/{ATTRIBUTES}")
    return _json(_checked(file, expected, "the run recorded", "repeat the run"), ATTRIBUTES)


def _objects(choice: ChosenAgent, attributes: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that the run received as Python objects."""
    if attributes:
        return [str(name) for name in attributes.get("objects") or ()]
    return listed_objects(choice.run)


def _json(data: bytes, name: str) -> dict[str, Any]:
    try:
        parsed: Any = load_json(data)
        return {**parsed}
    except (ValueError, TypeError) as error:
        raise errors.CheckpointError(
            f"{name}: expected a JSON mapping of the run ({error}); repeat the run"
        ) from error


def _rank(config: Mapping[str, Any]) -> int:
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    return max((rank for rank in ranks if isinstance(rank, int)), default=8)

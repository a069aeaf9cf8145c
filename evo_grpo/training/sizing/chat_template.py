"""Determines from a model's files whether it has a chat template, without transformers."""

from __future__ import annotations

from pathlib import Path

from evo_grpo.sources import Source, resolve
from evo_grpo.training.sizing.model_size import gguf_header, read_object

CONFIG = "tokenizer_config.json"
#: This file takes precedence over the key in `CONFIG`.
OWN_FILE = "chat_template.jinja"
#: Folder of further templates.
FOLDER = "additional_chat_templates"


def has_chat_template(name: str) -> bool | None:
    """Return whether a model's tokenizer has a chat template; None if this is unknown.

    Raises:
        ModelError: The model does not exist, or its files are damaged.
        EngineUnavailable: See `sources.resolve`.
    """
    source = resolve(name)
    if source.gguf_file is not None:
        file = Path(source.path) / source.gguf_file
        return bool(gguf_header(name, file).values.get("tokenizer.chat_template"))
    return _in_folder(name, Path(source.path)) if source.local else _in_cache(source)


def _in_folder(name: str, folder: Path) -> bool | None:
    if (folder / OWN_FILE).is_file() or any((folder / FOLDER).glob("*.jinja")):
        return True
    file = folder / CONFIG
    return bool(read_object(name, file).get("chat_template")) if file.is_file() else None


def _in_cache(source: Source) -> bool | None:
    """Look for the chat template of a hub model, of which the cache may hold only some files."""
    # Imported here: only a hub id needs it; it is a dependency of transformers.
    from huggingface_hub import try_to_load_from_cache

    config, own = (try_to_load_from_cache(source.path, file) for file in (CONFIG, OWN_FILE))
    if isinstance(own, str):
        return True
    if not isinstance(config, str):
        return None
    if read_object(source.name, Path(config)).get("chat_template"):
        return True
    # None: the file was never requested; otherwise the cache records that it does not exist.
    return None if own is None else False

"""Finds the chat template of a model in its files, without transformers."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from evo_grpo.errors import ModelError
from evo_grpo.model.files import gguf_header, read_object
from evo_grpo.sources import Source, resolve

CONFIG = "tokenizer_config.json"
#: This file takes precedence over the key in `CONFIG`.
OWN_FILE = "chat_template.jinja"
#: Folder of further templates.
FOLDER = "additional_chat_templates"


def has_chat_template(name: str) -> bool | None:
    """Return whether a model's tokenizer has a chat template; see `chat_template_of`."""
    template = chat_template_of(name)
    return None if template is None else bool(template)


def chat_template_of(name: str) -> str | dict[str, str] | None:
    """Return a model's chat template, or several by name; "" if it has none, None if unknown.

    Raises:
        ModelError: The model does not exist, or its files are damaged.
        EngineUnavailable: See `sources.resolve`.
    """
    source = resolve(name)
    if source.gguf_file is not None:
        file = Path(source.path) / source.gguf_file
        return _template(gguf_header(name, file).values.get("tokenizer.chat_template"))
    return _in_folder(name, Path(source.path)) if source.local else _in_cache(source)


def _in_folder(name: str, folder: Path) -> str | dict[str, str] | None:
    files = [folder / OWN_FILE, *sorted((folder / FOLDER).glob("*.jinja"))]
    found = {file.stem: _text(name, file) for file in files if file.is_file()}
    if found:
        return found
    file = folder / CONFIG
    return _template(read_object(name, file).get("chat_template")) if file.is_file() else None


def _template(value: object) -> str | dict[str, str]:
    """Return the chat template in a file of a tokenizer; a list has several, each with a name."""
    if isinstance(value, list):
        entries = [one for one in cast("list[object]", value) if isinstance(one, dict)]
        return {str(one.get("name")): str(one.get("template")) for one in entries}
    return value if isinstance(value, str) else ""


def _text(name: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"model: {name!r}: {file} cannot be read: {error}") from error


def _in_cache(source: Source) -> str | dict[str, str] | None:
    """Look for the chat template of a hub model, of which the cache may hold only some files."""
    # Imported here: only a hub id needs it; it is a dependency of transformers.
    from huggingface_hub import try_to_load_from_cache

    config, own = (try_to_load_from_cache(source.path, file) for file in (CONFIG, OWN_FILE))
    if isinstance(own, str):
        return _text(source.name, Path(own))
    if not isinstance(config, str):
        return None
    if found := _template(read_object(source.name, Path(config)).get("chat_template")):
        return found
    # None: the file was never requested; otherwise the cache records that it does not exist.
    return None if own is None else ""

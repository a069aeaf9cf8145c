"""Reads a model's JSON files and GGUF header, which may come from a stranger, without torch.

Sizes and numbers are bounded. Of a GGUF header, scalar values and the shapes of tensors are read,
and arrays are skipped: with 152,000 tokens this takes 0.03 s, `gguf.GGUFReader` takes 9 s.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from evo_grpo.errors import ModelError
from evo_grpo.schema.validation import MOST_DIGITS
from evo_grpo.sources import Source

MOST_BYTES = 1 << 24
"""Largest JSON file of a model that is read here: 16 MiB."""
MOST_REPEATS = 10_000
"""Most layers; transformers builds an object for each before it reads any weight."""
MOST_EXPERTS = 1 << 17
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_COUNTS = (
    *(*_LAYERS, "num_labels"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WIDTHS = (
    *("hidden_size", "intermediate_size", "vocab_size", "head_dim"),
    *("num_attention_heads", "num_key_value_heads"),
)
_BOUNDS = {
    **dict.fromkeys(_COUNTS, MOST_REPEATS),
    **dict.fromkeys(_EXPERTS, MOST_EXPERTS),
    **dict.fromkeys(_WIDTHS, 1 << 24),
}
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
"""Key of config.json -> key of a GGUF header, without its prefix, the architecture."""
MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
# Type of a value -> its struct format; strings and arrays are preceded by their length.
SCALARS: dict[int, str] = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
)
STRING = 8
ARRAY = 9
MOST_ITEMS = 10_000_000
"""Most strings and arrays of a header, counted together; a large vocabulary has a million."""
MOST_NAMES = 1_000_000
"""Most values and tensors of a header."""
MOST_TEXT = 1 << 26
"""Most bytes of all strings of a header that are kept: 64 MiB."""
MOST_DIMENSIONS = 8
MOST_DEPTH = 4
"""Deepest nesting of arrays of a header."""


def check_config(config: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the key, for a number of layers, experts or features no model has.

    Nested configurations of any depth are checked too, and may have 0 layers.
    """
    parts = [config]
    for part in parts:  # the loop appends to `parts`
        parts += [inner for inner in part.values() if isinstance(inner, dict)]
        for key in _BOUNDS.keys() & part.keys():
            value, most = part[key], _BOUNDS[key]
            if isinstance(value, float) or (isinstance(value, int) and value > most):
                raise ValueError(f"{key}: expected an integer of at most {most:,}, got {value:,}")
    for key in _LAYERS:
        if isinstance(value := config.get(key), int) and value < 1:
            raise ValueError(f"{key}: expected a layer or more, got {value}")


def read_config(name: str, file: Path) -> dict[str, Any]:
    """Return the config.json of a model; raise ModelError if it is implausible."""
    config = read_object(name, file)
    if "model_type" not in config:
        raise ModelError(f"model {name!r}: expected a model_type in {file}, found none")
    try:
        check_config(config)
    except ValueError as error:
        raise ModelError(f"model {name!r}: {file}: {error}; fetch the file anew") from None
    return config


def _integer(digits: str) -> int | float:
    """Return an integer, or a float if it has many digits: some files write "no limit" as 10^30."""
    return int(digits) if len(digits) <= MOST_DIGITS else float(digits)


def read_object(name: str, file: Path) -> dict[str, Any]:
    """Return the object in a model's JSON file; raise ModelError if it contains no object."""
    try:
        size = file.stat().st_size
        if size > MOST_BYTES:
            raise ValueError(f"expected at most {MOST_BYTES:,} bytes, got {size:,}")
        content = json.loads(file.read_bytes(), parse_int=_integer)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"model {name!r}: {file} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"model {name!r}: expected an object in {file}, got {content!r:.50}")
    return content


def gguf_header(name: str, file: Path) -> GgufHeader:
    """Return the header of a model's .gguf file; raise ModelError if it is damaged."""
    # Imported here: only this kind of model needs it.
    from gguf import GGML_QUANT_SIZES

    try:
        return read_header(file, {int(kind): size for kind, size in GGML_QUANT_SIZES.items()})
    except (ValueError, OSError) as error:
        raise ModelError(f"model {name!r}: {file} is not a complete GGUF file: {error}") from None


def gguf_config(name: str, file: Path) -> tuple[GgufHeader, dict[str, Any]]:
    """Return the header of a .gguf file, and its values under the keys of a config.json."""
    header = gguf_header(name, file)
    kind = str(header.values.get("general.architecture"))
    values = {key: header.values.get(f"{kind}.{field}") for key, field in GGUF_KEYS.items()}
    config: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
    if "vocab_size" not in config and (shape := header.shapes.get("token_embd.weight")):
        config["vocab_size"] = shape[-1]
    # llama.cpp stores no output head if it is tied to the embedding.
    config |= {"model_type": kind, "tie_word_embeddings": "output.weight" not in header.shapes}
    try:
        check_config(config)
    except ValueError as error:
        key, _, why = str(error).partition(": ")
        field = f"{kind}.{GGUF_KEYS.get(key, key)}"
        raise ModelError(f"model {name!r}: {file}: {field}: {why}; fetch the file anew") from None
    return header, config


def config_file(source: Source, name: str = "config.json") -> Path | None:
    """Return the path of a model's file in its folder or the hub's cache; None if not cached."""
    if source.local:
        return Path(source.path) / name
    # Imported here: only a hub id needs it; it is a dependency of transformers.
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(source.path, name)
    except ValueError as error:
        raise ModelError(f"model {source.name!r}: expected a hub id owner/name: {error}") from None
    return Path(cached) if isinstance(cached, str) else None


def check_files(source: Source) -> None:
    """Raise ModelError if the config or GGUF header of a model is implausible; load no weights."""
    if source.gguf_file is not None:
        gguf_config(source.name, Path(source.path) / source.gguf_file)
    elif (file := config_file(source)) is not None:
        read_config(source.name, file)


@dataclass(frozen=True)
class GgufHeader:
    """The part of a GGUF file before its weights.

    Attributes:
        values: Key -> number or string, or None for an array.
        shapes: Tensor -> its shape, dimensions in the order of the file.
    """

    values: Mapping[str, object]
    shapes: Mapping[str, tuple[int, ...]]


def read_header(file: Path, sizes: Mapping[int, tuple[int, int]]) -> GgufHeader:
    """Read the header of a .gguf file, and check that the file contains all announced weights.

    `sizes` maps a tensor type to (weights, bytes) of one block: `GGML_QUANT_SIZES` of gguf.
    """
    with file.open("rb") as stream:
        _check(stream.read(len(MAGIC)) == MAGIC, "it does not begin with GGUF")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(data).header(sizes)
            except (struct.error, OverflowError):  # a read past the end of the file
                raise ValueError("its header is truncated") from None


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)


class _Reader:
    """Parses a header; reading past the end of the data raises struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = len(MAGIC)
        self.order = "<"
        self.items = self.kept = 0

    def header(self, sizes: Mapping[int, tuple[int, int]]) -> GgufHeader:
        version = self.number("I")
        if version & 0xFFFF == 0:  # the file has the other byte order
            self.order, self.at = ">", len(MAGIC)
            version = self.number("I")
        expected = " or ".join(map(str, VERSIONS))
        _check(version in VERSIONS, f"expected version {expected}, got {version}")
        tensors, count = self.number("Q"), self.number("Q")
        names = tensors + count
        _check(names <= MOST_NAMES, f"expected at most {MOST_NAMES:,} names, got {names:,}")
        values: dict[str, object] = {}
        for _ in range(count):
            key, kind = self.string(), self.number("I")
            values[key] = self.value(kind)
        shapes: dict[str, tuple[int, ...]] = {}
        end = 0  # end of the weights, relative to their start
        for _ in range(tensors):
            name, dimensions = self.string(), self.number("I")
            _check(dimensions <= MOST_DIMENSIONS, f"tensor {name!r} has {dimensions:,} dimensions")
            shapes[name] = tuple(self.number("Q") for _ in range(dimensions))
            kind, offset = self.number("I"), self.number("Q")
            _check(kind in sizes, f"tensor {name!r} is stored in the unknown type {kind}")
            weights, its_bytes = sizes[kind]
            end = max(end, offset + prod(shapes[name]) * its_bytes // weights)
        alignment = values.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"expected general.alignment >= 1, got {alignment!r}")
        end += -(-self.at // alignment) * alignment
        _check(end <= len(self.data), f"expected {end:,} bytes, got {len(self.data):,}")
        return GgufHeader(values, shapes)

    def number(self, code: str) -> int:
        (value,) = struct.unpack_from(self.order + code, self.data, self.at)
        self.at += struct.calcsize(self.order + code)
        return value

    def string(self) -> str:
        length = self.number("Q")
        self.kept += min(length, len(self.data))
        _check(self.kept <= MOST_TEXT, f"expected at most {MOST_TEXT:,} bytes of text")
        (value,) = struct.unpack_from(f"{min(length, len(self.data) + 1)}s", self.data, self.at)
        self.at += length
        return value.decode("utf-8")

    def value(self, kind: int) -> object:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.skip_array()
        _check(kind in SCALARS, f"a value is of the unknown type {kind}")
        return self.number(SCALARS[kind])

    def skip_array(self, depth: int = 1) -> None:
        kind, count = self.number("I"), self.number("Q")
        self.items += 0 if kind in SCALARS else count
        _check(count <= len(self.data), "its header is truncated")  # an item takes a byte or more
        _check(
            depth <= MOST_DEPTH and self.items <= MOST_ITEMS,
            f"expected arrays of at most {MOST_ITEMS:,} strings, at most {MOST_DEPTH} within "
            f"each other, got {self.items:,}, {depth} deep",
        )
        _check(kind in (*SCALARS, STRING, ARRAY), f"an array is of the unknown type {kind}")
        if kind in SCALARS:
            self.at += count * struct.calcsize(self.order + SCALARS[kind])
        elif kind == STRING:
            length_at = struct.Struct(self.order + "Q").unpack_from
            at, data = self.at, self.data
            for _ in range(count):
                at += 8 + length_at(data, at)[0]
            self.at = at
        else:
            for _ in range(count):
                self.skip_array(depth + 1)

"""Reads the header of a GGUF file: scalar values and the shapes of tensors, without weights.

Skipping arrays, it takes 0.03 s for 152,000 tokens; `gguf.GGUFReader` takes 9 s.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
# Type of a value -> its struct format; strings and arrays are preceded by their length.
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
STRING = 8
ARRAY = 9
MOST_ITEMS = 10_000_000
"""Most strings and arrays of a header, counted together; a large vocabulary has a million."""
MOST_NAMES = 1_000_000
"""Most values and tensors."""
MOST_BYTES = 1 << 26
"""Most bytes of all strings that are kept: 64 MiB."""
MOST_DIMENSIONS = 8
MOST_DEPTH = 4
"""Deepest nesting of arrays."""


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
        if stream.read(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(data).header(sizes)
            except (struct.error, OverflowError):  # a read past the end of the file
                raise ValueError("its header is truncated") from None


class _Reader:
    """Parses a header; a read past the end raises struct.error."""

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
        if version not in VERSIONS:
            raise ValueError(f"expected version {' or '.join(map(str, VERSIONS))}, got {version}")
        tensors, count = self.number("Q"), self.number("Q")
        if tensors + count > MOST_NAMES:
            raise ValueError(f"expected at most {MOST_NAMES:,} names, got {tensors + count:,}")
        values: dict[str, object] = {}
        for _ in range(count):
            key, kind = self.string(), self.number("I")
            values[key] = self.value(kind)
        shapes: dict[str, tuple[int, ...]] = {}
        end = 0  # end of the weights, relative to their start
        for _ in range(tensors):
            name = self.string()
            if (dimensions := self.number("I")) > MOST_DIMENSIONS:
                raise ValueError(f"tensor {name!r} has {dimensions:,} dimensions")
            shapes[name] = tuple(self.number("Q") for _ in range(dimensions))
            kind, offset = self.number("I"), self.number("Q")
            if kind not in sizes:
                raise ValueError(f"tensor {name!r} is stored in the unknown type {kind}")
            weights, its_bytes = sizes[kind]
            end = max(end, offset + prod(shapes[name]) * its_bytes // weights)
        alignment = values.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"expected general.alignment >= 1, got {alignment!r}")
        begin = -(-self.at // alignment) * alignment
        if begin + end > len(self.data):
            raise ValueError(f"expected {begin + end:,} bytes, got {len(self.data):,}")
        return GgufHeader(values, shapes)

    def number(self, code: str) -> int:
        (value,) = struct.unpack_from(self.order + code, self.data, self.at)
        self.at += struct.calcsize(self.order + code)
        return value

    def string(self) -> str:
        length = self.number("Q")
        self.kept += min(length, len(self.data))
        if self.kept > MOST_BYTES:
            raise ValueError(f"expected at most {MOST_BYTES:,} bytes of text in its header")
        (value,) = struct.unpack_from(f"{min(length, len(self.data) + 1)}s", self.data, self.at)
        self.at += length
        return value.decode("utf-8")

    def value(self, kind: int) -> object:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.skip_array()
        if kind not in SCALARS:
            raise ValueError(f"a value is of the unknown type {kind}")
        return self.number(SCALARS[kind])

    def skip_array(self, depth: int = 1) -> None:
        kind, count = self.number("I"), self.number("Q")
        self.items += 0 if kind in SCALARS else count
        if count > len(self.data):  # an item takes a byte or more
            raise ValueError("its header is truncated")
        if depth > MOST_DEPTH or self.items > MOST_ITEMS:
            raise ValueError(
                f"expected arrays of at most {MOST_ITEMS:,} strings, at most {MOST_DEPTH} within "
                f"each other, got {self.items:,}, {depth} deep"
            )
        if kind in SCALARS:
            self.at += count * struct.calcsize(self.order + SCALARS[kind])
        elif kind == STRING:
            length_at = struct.Struct(self.order + "Q").unpack_from
            at, data = self.at, self.data
            for _ in range(count):
                at += 8 + length_at(data, at)[0]
            self.at = at
        elif kind == ARRAY:
            for _ in range(count):
                self.skip_array(depth + 1)
        else:
            raise ValueError(f"an array is of the unknown type {kind}")

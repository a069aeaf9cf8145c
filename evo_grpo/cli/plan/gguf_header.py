"""The header of a GGUF file: its plain values and the sizes of its tensors, without any weight.

The package gguf makes an array of every token and merge of the vocabulary on its way, a hundred
thousand of them; here they are passed over.
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
# Type of a value -> its format in the module struct; texts and arrays have a length before them.
PLAIN = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT = 8
ARRAY = 9


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says before its weights.

    Attributes:
        values: Key -> number or text; arrays are left out.
        shapes: Tensor -> its sizes, in the order of the file.
    """

    values: Mapping[str, object]
    shapes: Mapping[str, tuple[int, ...]]


def read_header(file: Path, sizes: Mapping[int, tuple[int, int]]) -> GgufHeader:
    """Read a header and check that the weights behind it are all there.

    Args:
        file: A .gguf file.
        sizes: Type of a tensor -> (weights, bytes) of one block; `GGML_QUANT_SIZES` of gguf.

    Raises:
        ValueError: It is no GGUF file, or is cut off.
        OSError: It cannot be read.
    """
    with file.open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(data).header(sizes)
            except (struct.error, OverflowError):  # behind the end, by more or by far more
                raise ValueError("its header is cut off") from None


class _Reader:
    """Walks through a header; what lies behind the end raises struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = len(MAGIC)
        self.order = "<"

    def header(self, sizes: Mapping[int, tuple[int, int]]) -> GgufHeader:
        version = self.number("I")
        if version & 0xFFFF == 0:  # written by a machine of the other byte order
            self.order, self.at = ">", len(MAGIC)
            version = self.number("I")
        if version not in VERSIONS:
            raise ValueError(f"expected version {' or '.join(map(str, VERSIONS))}, got {version}")
        tensors, count = self.number("Q"), self.number("Q")
        values: dict[str, object] = {}
        for _ in range(count):
            key, kind = self.text(), self.number("I")
            values[key] = self.value(kind)
        shapes: dict[str, tuple[int, ...]] = {}
        end = 0  # of the weights, counted from where they begin
        for _ in range(tensors):
            name = self.text()
            shapes[name] = tuple(self.number("Q") for _ in range(self.number("I")))
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

    def text(self) -> str:
        length = self.number("Q")
        (value,) = struct.unpack_from(f"{min(length, len(self.data) + 1)}s", self.data, self.at)
        self.at += length
        return value.decode("utf-8")

    def value(self, kind: int) -> object:
        if kind == TEXT:
            return self.text()
        if kind == ARRAY:
            return self.pass_over()
        if kind not in PLAIN:
            raise ValueError(f"a value is of the unknown type {kind}")
        return self.number(PLAIN[kind])

    def pass_over(self) -> None:
        kind, count = self.number("I"), self.number("Q")
        if kind in PLAIN:
            self.at += count * struct.calcsize(self.order + PLAIN[kind])
        elif kind == TEXT:
            length_at = struct.Struct(self.order + "Q").unpack_from
            at, data = self.at, self.data
            for _ in range(count):
                at += 8 + length_at(data, at)[0]
            self.at = at
        elif kind == ARRAY:
            for _ in range(count):
                self.pass_over()
        else:
            raise ValueError(f"an array is of the unknown type {kind}")

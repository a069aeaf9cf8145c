"""Pickles a value without its tensors, which ranks send separately.

Pickling an adapter takes longer than sending it over 10 Gbit/s, and copies it several times.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, final

from torch import Tensor


def taken_apart(value: object) -> tuple[bytes, list[Tensor]]:
    """Return the pickle of a value without its plain tensors, and these tensors, contiguous."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


def put_together(pickled: bytes, tensors: Sequence[Tensor]) -> Any:  # noqa: ANN401 -- what was taken apart
    """Return the value that `taken_apart` pickled, with `tensors` inserted."""
    return _Unpickler(io.BytesIO(pickled), tensors).load()


@final
class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: object) -> int | None:
        if type(obj) is not Tensor or obj.requires_grad:  # it is more than its values
            return None
        self.tensors.append(obj.contiguous())
        return len(self.tensors) - 1


@final
class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]

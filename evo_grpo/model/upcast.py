"""A model of half precision that computes in float32 for a while, a layer at a time.

Whether two ways to the same numbers agree cannot be seen in bfloat16: its rounding reaches percents
of a hidden state, and so does a model that places padded rows wrongly. In float32 the first is a
millionth. No model is copied for it: the weights of a layer are widened when it is entered, and put
back when it is left, so that one layer more has to fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

#: What is widened. Smaller types come with scales of their own, and mean nothing without these.
HALF = (torch.bfloat16, torch.float16)


@contextmanager
def in_float32(trunk: nn.Module) -> Generator[None]:
    """Let a model compute in float32, from the weights that it has.

    Embeddings look up in their own dtype, since a table may be larger than any layer, and only what
    they found is widened. Afterwards the weights are the same tensors in the same memory.
    """
    widened = _Widened()
    hooks: list[Any] = []
    with torch.no_grad():
        try:
            for module, whole in _units(trunk):
                if isinstance(module, nn.Embedding):
                    hooks.append(module.register_forward_hook(_widen_result))
                    continue
                hooks += [
                    module.register_forward_pre_hook(
                        widened.entering(whole=whole), with_kwargs=True, prepend=True
                    ),
                    module.register_forward_hook(widened.leaving),
                ]
            yield
        finally:
            for hook in hooks:
                hook.remove()
            widened.put_back_all()


def _units(trunk: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield modules, and whether with all that is inside of them.

    The layers of the outermost lists are taken whole: some read the weights of a part without
    calling it. What is around them holds its own weights alone, for as long as it runs.
    """
    for module in trunk.children():
        if isinstance(module, nn.ModuleList):
            yield from ((layer, True) for layer in module)
        else:
            yield from _units(module)
    yield trunk, False


class _Widened:
    """Weights that are in float32 for now, and what they were."""

    def __init__(self) -> None:
        self.kept: list[list[tuple[Tensor, Tensor]]] = []

    def entering(self, *, whole: bool) -> Callable[..., tuple[Any, Any]]:
        def enter(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, Any]:
            kept: list[tuple[Tensor, Tensor]] = []
            # Known before it is filled: when memory ends in the middle, it is put back.
            self.kept.append(kept)
            for tensors in (module.parameters(recurse=whole), module.buffers(recurse=whole)):
                for tensor in tensors:
                    # A layer that is shared may be widened already.
                    if tensor.dtype in HALF:
                        own = tensor.data
                        tensor.data = own.float()
                        kept.append((tensor, own))
            return _widen(args), _widen(kwargs)

        return enter

    def leaving(self, *_: object) -> None:
        for tensor, own in self.kept.pop():
            tensor.data = own

    def put_back_all(self) -> None:
        # A forward that raised left its modules without leaving them.
        while self.kept:
            self.leaving()


def _widen_result(_: nn.Module, __: tuple[Any, ...], result: Any) -> Any:  # noqa: ANN401 -- of any embedding
    return _widen(result)


def _widen(given: Any) -> Any:  # noqa: ANN401 -- what layers hand each other
    """Return tensors of half precision as float32, within tuples, lists and dicts too."""
    if isinstance(given, Tensor):
        return given.float() if given.dtype in HALF else given
    if type(given) in (tuple, list):
        return type(given)(_widen(part) for part in given)
    if type(given) is dict:
        return {name: _widen(part) for name, part in given.items()}
    return given

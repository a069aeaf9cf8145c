"""A context in which a model of half precision computes in float32, layer by layer.

In bfloat16, rounding changes a hidden state by some per cent, as much as an error such as wrong
positions of padded rows does, so two computations cannot be compared. In float32, rounding changes
it by a millionth. The model is not copied: a layer's weights are converted when it is entered, and
restored when it is left, so that one more layer has to fit into memory.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

#: Dtypes that are converted. Smaller dtypes need separate scales.
HALF = (torch.bfloat16, torch.float16)


@contextmanager
def in_float32(trunk: nn.Module) -> Generator[None]:
    """Make a model compute in float32 within a `with` block, then restore the same tensors.

    Only the output of embeddings is converted, since a table may be larger than any layer.
    """
    originals: list[list[tuple[Tensor, Tensor]]] = []
    hooks: list[Any] = []

    def enter(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, whole: bool
    ) -> tuple[Any, Any]:
        # Stored before it is filled, so that it is restored if memory runs out in the middle.
        originals.append([])
        for tensor in (*module.parameters(recurse=whole), *module.buffers(recurse=whole)):
            if tensor.dtype in HALF:  # a shared layer may be converted already
                data = tensor.data
                tensor.data = data.float()
                originals[-1].append((tensor, data))
        return _widen(args), _widen(kwargs)

    def leave(*_: object) -> None:
        for tensor, data in originals.pop():
            tensor.data = data

    with torch.no_grad():
        try:
            for module, whole in _units(trunk):
                if isinstance(module, nn.Embedding):
                    hooks.append(module.register_forward_hook(lambda *call: _widen(call[-1])))
                    continue
                begin = partial(enter, whole=whole)
                hooks += [
                    module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True),
                    module.register_forward_hook(leave),
                ]
            yield
        finally:
            for hook in hooks:
                hook.remove()
            while originals:  # after an exception, the exit hooks of the modules have not run
                leave()


def _units(trunk: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield each module, and whether the weights of its submodules are converted with it.

    This holds for the layers of the outermost ModuleLists, since some read a submodule's weights
    without calling it. Of the modules around them, only their own weights are converted.
    """
    for module in trunk.children():
        if isinstance(module, nn.ModuleList):
            yield from ((layer, True) for layer in module)
        else:
            yield from _units(module)
    yield trunk, False


def _widen(given: Any) -> Any:  # noqa: ANN401 -- inputs and outputs of layers
    """Return tensors of half precision as float32, within tuples, lists and dicts too."""
    if isinstance(given, Tensor):
        return given.float() if given.dtype in HALF else given
    if type(given) in (tuple, list):
        return type(given)(_widen(part) for part in given)
    if type(given) is dict:
        return {name: _widen(part) for name, part in given.items()}
    return given

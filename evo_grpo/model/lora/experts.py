"""Which modules of a base hold the experts of a mixture as stacked weights, in no linear layer.

"all-linear" passes over them, and so does PEFT unless it is told of `target_parameters`. PEFT's own
table of converted names knows only some of these models, so they are found by what they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn
from transformers.pytorch_utils import Conv1D

from evo_grpo.model.base import SharedBase

#: Weights of more than two dimensions that mix positions, and weights that adapters can go into.
_NO_EXPERTS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.Embedding, Conv1D)


def expert_modules(base: SharedBase) -> frozenset[str]:
    """Return the names of modules in the decoder layers that hold weights of experts themselves.

    Either the class says so, or there is a router: a weight of the same layer with one row for each
    matrix of a stack. The second sign tells them from stacks with a matrix for each head of a
    recurrence, which is no choice between experts. Layers that no token reaches, of a tower for
    images for example, are not looked at.

    Args:
        base: The base, wrapped or not.
    """
    return frozenset(
        name
        for modules in _layers(base).values()
        for name, module in modules.items()
        if not isinstance(module, _NO_EXPERTS)
        and (_says_so(module) or _is_routed(module, modules.values()))
    )


def _layers(base: SharedBase) -> dict[str, dict[str, nn.Module]]:
    """Return the modules of each layer that tokens reach, by name."""
    inside = {id(module) for module in base.trunk.modules()}
    kinds = base.linear_inputs.kinds
    reached = {_layer_of(name) for name, kind in kinds.items() if kind != "unseen"}
    unseen = {_layer_of(name) for name in kinds} - reached
    layers: dict[str, dict[str, nn.Module]] = {}
    for name, module in base.model.named_modules():
        layer = _layer_of(name)
        if layer and layer not in unseen and id(module) in inside:
            layers.setdefault(layer, {})[name] = module
    return layers


def _layer_of(name: str) -> str:
    """Return the part of a module's name up to its place in the list of layers, or nothing."""
    parts = name.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return "" if place is None else ".".join(parts[: place + 1])


def _says_so(module: nn.Module) -> bool:
    # A matrix is enough here: DBRX has the experts of a layer below one another.
    return "expert" in type(module).__name__.lower() and any(s[1:] for s in _shapes(module))


def _is_routed(module: nn.Module, layer: Collection[nn.Module]) -> bool:
    experts = {shape[0] for shape in _shapes(module) if len(shape) > 2} - {1}
    return bool(experts) and any(
        rows in experts for other in layer if other is not module for rows in _rows(other)
    )


def _rows(module: nn.Module) -> Iterator[int]:
    """Yield how many values each matrix of a module makes; a packed one has another shape."""
    if isinstance(module, nn.Linear):
        yield module.out_features
        return
    yield from (shape[0] for shape in _shapes(module) if len(shape) == 2)


def _shapes(module: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]

"""Divides the decoder layers of a base: each process has a part of every layer.

PyTorch's FSDP2 gathers a layer when a pass reaches it, and frees it afterwards. All processes take
part in this exchange, so all must make the same passes; see `evo_grpo.population.ranks.team`.
Each process has the whole head and embedding.
"""

from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import Any, final

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from evo_grpo.errors import ModelError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.digest import base_digest

#: Communication backend by type of device; other devices do not support sharding.
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

#: Time that a layer waits for the other processes to reach it in the same pass.
_PATIENCE = timedelta(minutes=10)


@final
class ShardedLayers:
    """The decoder layers of a base, each divided among all processes before it gets adapters."""

    def __init__(self, base: SharedBase, device: torch.device) -> None:
        layers = decoder_layers(base)
        if device.type not in _BACKENDS:
            raise ModelError(
                f"engine.base: expected engine.device cpu or cuda for sharded, got {device.type}; "
                "set engine.base: replicated"
            )
        base_digest(base)  # while the weights are whole; computed once
        group = dist.new_group(backend=_BACKENDS[device.type], timeout=_PATIENCE)
        assert isinstance(group, dist.ProcessGroup), "every process is in it"
        # PEFT reads this name and expects layers that compute with whole weights.
        mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("fsdp",))
        outside = set(base.trunk.parameters())
        for layer in layers:
            outside -= set(layer.parameters())
        self.layers = [_divide(layer, mesh, set()) for layer in layers]
        base.trunk.register_forward_hook(_own_storage)
        # The rest of the trunk stays whole; wrapping it lets FSDP2 prefetch layers.
        self.trunk = _divide(base.trunk, mesh, outside)
        for tensor in chain(base.model.parameters(), base.model.buffers()):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(device)
        self.trunk.register_forward_hook(self._after_forward)
        self._first: int | None = None
        base.specialized = False  # joined weights would need whole weights
        base.gathered = None

    def join_forward(self) -> None:
        """Send this process's parts of the layers, for a forward of other processes."""
        self._join(self.layers)

    def join_backward(self) -> None:
        """Send this process's parts of the layers, for a backward of other processes."""
        self._join(self.layers[self._first_adapted() :][::-1])

    def _first_adapted(self) -> int:
        """Return the index of the first layer with adapters, where a backward ends."""
        if self._first is None:
            adapted = (any(isinstance(m, LoraLayer) for m in x.modules()) for x in self.layers)
            self._first = next((number for number, has in enumerate(adapted) if has), 0)
            # In a backward each layer prefetches the layer that ran before it. The first adapted
            # layer would prefetch one that is not needed: a layer without adapters, or the last
            # layer of another forward.
            first_layer = self.layers[self._first]
            first_layer.set_modules_to_backward_prefetch([first_layer])
        return self._first

    def _join(self, layers: Sequence[FSDPModule]) -> None:
        for layer in layers:
            layer.unshard()
            layer.reshard()

    def _after_forward(self, *_: object) -> None:
        if torch.is_grad_enabled():
            self._first_adapted()  # sets the prefetch order before the first backward
        else:
            # FSDP2 keeps the order of each forward for its backward; this forward has no backward.
            self.trunk.reset_iter_state()


def _divide(module: nn.Module, mesh: DeviceMesh, left_whole: set[nn.Parameter]) -> Any:  # noqa: ANN401 -- FSDPModule and nn.Module in one
    # True for the trunk too: by default, FSDP2 does not reshard the root after a forward.
    return fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=left_whole)


def decoder_layers(base: SharedBase) -> Sequence[nn.Module]:
    """Return the decoder layers of a base, in the order in which its model runs them."""
    marked = [m for m in base.trunk.modules() if isinstance(m, GradientCheckpointingLayer)]
    inner = {id(m) for layer in marked for m in layer.modules() if m is not layer}
    layers = [layer for layer in marked if id(layer) not in inner]
    if not layers:
        raise ModelError(
            "engine.base: expected a model whose decoder layers transformers marks as such, got "
            f"{type(base.model).__name__} of {base.name!r}; set engine.base: replicated"
        )
    return layers


def _own_storage(module: nn.Module, args: object, output: Any) -> Any:  # noqa: ANN401 -- of any architecture
    """Return the output of a trunk with copied hidden states, since FSDP2 warns about views."""
    del module, args
    if output.last_hidden_state.requires_grad and output.last_hidden_state._is_view():
        output.last_hidden_state = output.last_hidden_state.clone()
    return output

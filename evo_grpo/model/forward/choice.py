"""Chooses what computes a rollout or an optimizer step: modules, joined layers or their kernels.

Kernels are first compared with torch, because compilers, drivers and torch's private
flash-attention API vary, and a wrong gradient raises no error.
"""

import importlib.util
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from evo_grpo.model.base import SharedBase
from evo_grpo.model.forward.fused import FusedForward, population_forward
from evo_grpo.model.forward.prefix import SharedPrefix, find_shared_prefixes
from evo_grpo.model.forward.stacks import RowLayout
from evo_grpo.model.llama.cuda.generate import KernelDecoder
from evo_grpo.model.llama.cuda.learn import KernelForward
from evo_grpo.model.llama.cuda.operators import FAILED, KernelError, interpreted
from evo_grpo.model.llama.decode import LlamaDecoder
from evo_grpo.model.llama.departures import can_join_layers
from evo_grpo.model.llama.train import LlamaForward
from evo_grpo.model.llama.weights import LlamaWeights, layers_of
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.model.out_of_memory import is_out_of_memory
from evo_grpo.model.probing import own_generator, probe_ids
from evo_grpo.settings.engine import Kernels

#: Bounds of the kernels.
MOST_HEAD_DIM, MOST_GROUP, MOST_HIDDEN, MOST_RANK = 256, 16, 16384, 128
_REFUSED = "kernels refused"
#: Allowed relative difference of a gradient: a constant, and a term for each layer. In bf16,
#: rounding gives at most a third of the sum; a kernel that omits its part at least twice the sum.
_MOST, _MOST_OF_A_LAYER = 0.1, 0.01
#: Gradients below this share of the largest are mostly rounding.
_LEAST = 0.01
#: Standard deviation of the noise that is added to adapters, so that no B is zero.
_NOISE = 0.02
#: Tokens of a row, and of its prompt, which is longer than the tiles of kernels.
_COLUMNS, _PROMPT = 180, 150


@final
class ModuleForward:
    """Runs the base and some adapters for one optimizer step through the model's own modules.

    It works for every architecture. Weights do not change within the step. `recompute` turns on
    gradient checkpointing.
    """

    def __init__(self, slots: AdapterSlots, *, recompute: bool = False) -> None:
        self.slots = slots
        self.recompute = recompute

    @contextmanager
    def rows(self, layout: RowLayout, dropout: Sequence[int] | None = None) -> Generator[None]:
        """Set the layout of the next rows, in a context that must span their backward.

        `dropout` has a seed for the LoRA dropout of each row.
        """
        with (
            self._checkpointing(),
            population_forward(self.slots.layers, layout.joined(), dropout=dropout),
        ):
            yield

    def hidden_at(self, ids: Tensor, where: Tensor, prefix: SharedPrefix | None = None) -> Tensor:
        """Return the final hidden states (M, H) at flat positions `where` (M,) of ids (B, T).

        `prefix` has the same rows and positions, split into shared prefixes and rests.
        `LlamaForward` uses it; the modules run whole rows.
        """
        return self.slots.base.hidden(ids).flatten(0, 1).index_select(0, where)

    def collect_gradients(self) -> None:
        """Write the gradients to the adapters' parameters; here autograd has already done it."""

    @contextmanager
    def _checkpointing(self) -> Generator[None]:
        """Turn on gradient checkpointing for the layers only; train() would also enable dropout."""
        modules = self.slots.base.trunk.modules() if self.recompute else ()
        layers = [m for m in modules if isinstance(m, GradientCheckpointingLayer)]
        # The layers' own switches: the model's method leaves one more hook on the embeddings at
        # every call, and its name changed within transformers 5.
        for layer in layers:
            vars(layer).update(
                gradient_checkpointing=True,
                training=True,
                _gradient_checkpointing_func=partial(_run_checkpointed, layer),
            )
        try:
            yield
        finally:
            for layer in layers:
                vars(layer).update(gradient_checkpointing=False, training=False)


def _run_checkpointed(layer: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401 -- what the layer takes and returns
    """Run a layer's forward under gradient checkpointing.

    A layer checkpoints only while its `training` is True. Many layers (OPT, XGLM, Falcon, the
    decoders of the Bart family) also use `training` for dropout, which draws from the global
    generator and would not match the rollout. `training` is therefore False while the layer
    computes.
    """

    def in_evaluation(*args: Any) -> Any:  # noqa: ANN401 -- as above
        was_training = layer.training
        vars(layer)["training"] = False
        try:
            return forward(*args)
        finally:
            vars(layer)["training"] = was_training

    return checkpoint(in_evaluation, *args, use_reentrant=False)


#: The forward of an optimizer step.
TrainForward: TypeAlias = LlamaForward | ModuleForward


def open_decoder(
    weights: LlamaWeights, fused: FusedForward, columns: int, wanted: Kernels
) -> LlamaDecoder | KernelDecoder:
    """Return the decoder of a rollout, with kernels if they support the base and its device."""
    base = weights.base
    if _expected(base, weights.dtype, wanted):
        reason = _refusal(base) or _unserved(weights) or _unserved_ranks(fused)
        if reason is None:
            return KernelDecoder(weights, fused, columns)
        _warn(base, f"decodes by torch's operations: {reason}")
    return LlamaDecoder(weights, fused, columns)


def open_forward(
    slots: AdapterSlots,
    adapters: Sequence[str | None],
    *,
    recompute: bool = False,
    plain: bool = False,
) -> TrainForward:
    """Return the forward of one optimizer step, with kernels if they support the base.

    The model's own modules run if `plain` is set, if an adapter has LoRA dropout, and for
    architectures outside the Llama family. In `adapters`, only None may occur more than once.
    `recompute` turns on gradient checkpointing.
    """
    base = slots.base
    dropout = any(slots.lora_config(name).lora_dropout for name in adapters if name is not None)
    if plain or dropout or not can_join_layers(base, slots.layers):
        return ModuleForward(slots, recompute=recompute)
    weights = LlamaWeights.of(base, slots.layers)
    if _expected(base, weights.dtype, base.kernels):
        reason = _refusal(base) or _unsupported_learning(weights) or _unserved(weights)
        if reason is None and base.device.type == "cuda":
            reason = differs(slots, adapters)
        if reason is None:
            return KernelForward(slots, adapters, recompute=recompute)
        _warn(base, f"learns by torch's operations: {reason}")
    return LlamaForward(slots, adapters, recompute=recompute)


def serves_head(base: SharedBase) -> bool:
    """Return whether a kernel supports the head of a base; see `logprobs`."""
    return _expected(base, base.dtype, base.kernels) and _refusal(base) is None


def give_up_kernels(base: SharedBase, error: KernelError) -> None:
    """Use torch's operations from now on, after a kernel could not be compiled or launched."""
    base.derived[FAILED] = True
    base.head_kernels = False
    _warn(base, f"computes by torch's operations: a kernel failed ({error})")


def _expected(base: SharedBase, dtype: torch.dtype, wanted: Kernels) -> bool:
    """Return whether to try kernels: `auto` tries them on CUDA in half precision."""
    by_itself = base.device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    return not base.derived.get(FAILED) and (wanted == "on" or (wanted == "auto" and by_itself))


def _warn(base: SharedBase, what: str) -> None:
    """Warn that a base computes without kernels, once for each reason."""
    warned: set[str] = base.derived.setdefault(_REFUSED, set())
    if what not in warned:
        warned.add(what)
        warnings.warn(f"engine.kernels: model {base.name!r} {what}", UserWarning, stacklevel=3)


def _refusal(base: SharedBase) -> str | None:
    """Return why kernels do not run on the device of a base; None if they may."""
    kind, device = base.device.type, base.device
    if kind == "cpu" and not interpreted():
        return "on a CPU they run in Triton's interpreter alone, TRITON_INTERPRET=1"
    old = kind == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) < (8,))
    if kind == "mps" or old:
        return "they need an NVIDIA GPU of compute capability 8.0 or newer"
    if kind in ("cpu", "cuda") and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None


def _unserved(weights: LlamaWeights) -> str | None:
    """Return why kernels do not support the layers of a base; None if they do."""
    base, d = weights.base, weights.description
    if not d.family.kernels:
        return f"they do not serve {base.model.config.model_type}"
    if weights.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"they do not serve {weights.dtype}"
    hidden, group = weights.layers[0].out.weight.shape[0], d.heads // d.kv_heads
    if d.head_dim > MOST_HEAD_DIM or d.head_dim % 2 or group > MOST_GROUP or hidden > MOST_HIDDEN:
        return (
            f"they serve heads of up to {MOST_HEAD_DIM} features, groups of up to {MOST_GROUP} and "
            f"{MOST_HIDDEN} hidden features, got {d.head_dim}, {group} and {hidden}"
        )
    return None


def _unserved_ranks(fused: FusedForward) -> str | None:
    """Return why kernels do not decode with the adapters of a rollout; None if they do."""
    names = [name for name in fused.layout.adapters if name is not None]
    rank = max((x.r.get(name, 0) for x in fused.layers.values() for name in names), default=0)
    return f"they serve ranks of up to {MOST_RANK}, got {rank}" if rank > MOST_RANK else None


def _unsupported_learning(weights: LlamaWeights) -> str | None:
    """Return why kernels do not learn with a base; None if they may."""
    base, size = weights.base, weights.description.head_dim
    if base.device.type == "cuda" and (weights.dtype == torch.float32 or size % 8):
        return f"flash attention does not serve {weights.dtype} with heads of {size} features"
    return None


def differs(slots: AdapterSlots, adapters: Sequence[str | None]) -> str | None:
    """Return how gradients by kernels differ from torch's, or how they fail; None if they agree.

    The gradients are compared once per base, on at most two of the adapters.
    """
    base = slots.base
    names = [name for name in adapters if name is not None][:2]
    differences: dict[object, float] = base.derived.setdefault("kernels compared", {})
    key = base.device, base.dtype
    try:
        if names and key not in differences:
            differences[key] = _largest_difference(slots, names)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    difference = differences.get(key, 0.0)
    if difference <= _MOST + _MOST_OF_A_LAYER * len(layers_of(base)):
        return None
    return f"gradients differ by {difference:.0%} from those of torch's operations"


def _largest_difference(slots: AdapterSlots, names: Sequence[str]) -> float:
    """Return the largest relative difference of a gradient by kernels and by torch."""
    parameters = [p for name in names for p in slots.parameters(name)]
    originals = [(p.detach().clone(), p.grad) for p in parameters]
    device = slots.base.device
    try:
        with own_generator(device), torch.autocast(device.type, enabled=False):
            generator = torch.Generator().manual_seed(0)
            for p in parameters:
                noise = torch.randn(p.shape, generator=generator, device="cpu") * _NOISE
                p.add_(noise.to(p))
            ours, theirs = (
                _gradients(kind, slots, names) for kind in (KernelForward, LlamaForward)
            )
    finally:
        for p, (value, grad) in zip(parameters, originals, strict=True):
            p.data.copy_(value)
            p.grad = grad
    sizes = torch.stack([grad.norm() for grad in theirs])
    errors = torch.stack([(a - b).norm() for a, b in zip(ours, theirs, strict=True)])
    largest = (errors / sizes.clamp(min=_LEAST * float(sizes.max()))).max()
    return float(largest.nan_to_num(float("inf")))


def _gradients(kind: type[LlamaForward], slots: AdapterSlots, names: Sequence[str]) -> list[Tensor]:
    """Return the adapters' fp32 gradients for a batch of two rows of one prompt per adapter."""
    base, rows = slots.base, 2 * len(names)
    ids = probe_ids(base.vocabulary, rows, min(_COLUMNS, base.context_length or _COLUMNS)).numpy()
    prompt = min(_PROMPT, ids.shape[1] // 2)
    ids[1::2, :prompt] = ids[::2, :prompt]
    masks = np.zeros(ids.shape, bool)
    masks[:, prompt:] = True
    token_rows, token_columns = np.nonzero(masks)
    where = torch.as_tensor(token_rows * ids.shape[1] + token_columns - 1, device=base.device)
    prefix = find_shared_prefixes(np.arange(rows) // 2, ids, masks, base.device)
    step = kind(slots, names)
    with torch.enable_grad(), step.rows(RowLayout(tuple(names), (2,) * len(names))):
        hidden = step.hidden_at(torch.as_tensor(ids, device=base.device), where, prefix)
        # A projection of each state whose gradient the last norm does not cancel.
        signs = torch.arange(hidden.shape[1], device=base.device) % 3 - 1
        base.backward((hidden.float() * signs).sum())
    step.collect_gradients()
    parameters = [p for name in names for p in slots.parameters(name)]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    return [grad.float() for grad in grads]

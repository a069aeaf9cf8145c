"""The choice between the kernels of a decode step and torch's operations."""

from __future__ import annotations

import importlib.util
import logging

import torch

from evo_grpo.model.base import SharedBase
from evo_grpo.model.forward.fused import FusedForward
from evo_grpo.model.llama.cuda.decode import KernelDecoder
from evo_grpo.model.llama.cuda.operators import interpreted
from evo_grpo.model.llama.decode import LlamaDecoder
from evo_grpo.model.llama.weights import LlamaWeights
from evo_grpo.model.out_of_memory import is_out_of_memory
from evo_grpo.settings.engine import Kernels
from evo_grpo.working import working

_log = logging.getLogger(__name__)

#: Bounds of the kernels.
MOST_HEAD_DIM, MOST_GROUP, MOST_HIDDEN, MOST_RANK = 256, 16, 16384, 128
_WORKING, _FAILED, _SAID = "kernels that ran", "kernels that failed", "kernels refused"


def open_decoder(
    weights: LlamaWeights, fused: FusedForward, columns: int, wanted: Kernels
) -> LlamaDecoder | KernelDecoder:
    """Return the decoder of a rollout: that by kernels where they serve the base and its device.

    Kernels that cannot be compiled or run are not tried again, and the reason is logged once.
    """
    base = weights.base
    reason = None if wanted == "off" else _refusal(weights, fused, wanted)
    if wanted == "off" or reason == "":
        return LlamaDecoder(weights, fused, columns)
    if reason is None:
        decoder = KernelDecoder(weights, fused, columns)
        reason = _failure(decoder)
        if reason is None:
            return decoder
    said: set[str] = base.derived.setdefault(_SAID, set())
    if reason not in said:
        said.add(reason)
        _log.warning(
            "engine.kernels: model %r decodes by torch's operations: %s", base.name, reason
        )
    return LlamaDecoder(weights, fused, columns)


def _refusal(weights: LlamaWeights, fused: FusedForward, wanted: Kernels) -> str | None:
    """Return why kernels do not serve a base, "" where nobody expects them; None if they may."""
    base, auto = weights.base, wanted == "auto"
    if auto and (base.device.type != "cuda" or weights.dtype == torch.float32):
        return ""
    if base.device.type == "mps":
        return "they need an NVIDIA GPU of compute capability 8.0 or newer"
    if base.device.type == "cpu" and not interpreted():
        return "on a CPU they run in Triton's interpreter alone, TRITON_INTERPRET=1"
    if base.device.type == "cuda" and (
        torch.version.hip or torch.cuda.get_device_capability(base.device) < (8, 0)
    ):
        return "they need an NVIDIA GPU of compute capability 8.0 or newer"
    if base.device.type in ("cpu", "cuda") and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return base.derived.get(_FAILED) or _unserved(weights, fused)


def _unserved(weights: LlamaWeights, fused: FusedForward) -> str | None:
    """Return why kernels do not serve the layers of a base; None if they do."""
    base, d = weights.base, weights.description
    if not d.family.kernels:
        return f"they do not serve {base.model.config.model_type}"
    if base.compiled is not None:
        return "engine.compile compiles the decode step instead"
    if weights.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"they do not serve {weights.dtype}"
    hidden, group = weights.layers[0].out.weight.shape[0], d.heads // d.kv_heads
    if d.head_dim > MOST_HEAD_DIM or d.head_dim % 2 or group > MOST_GROUP or hidden > MOST_HIDDEN:
        return (
            f"they serve heads of up to {MOST_HEAD_DIM} features, groups of up to {MOST_GROUP} and "
            f"{MOST_HIDDEN} hidden features, got {d.head_dim}, {group} and {hidden}"
        )
    names = [name for name in fused.layout.adapters if name is not None]
    rank = max((one.r.get(n, 0) for one in fused.layers.values() for n in names), default=0)
    return None if rank <= MOST_RANK else f"they serve ranks of up to {MOST_RANK}, got {rank}"


def _failure(decoder: KernelDecoder) -> str | None:
    """Run a step of one row, unless one like it has run; return why it failed, None if it ran.

    This also compiles the kernels, which a capture of CUDA graphs does not allow.
    """
    base: SharedBase = decoder.weights.base
    if base.device.type != "cuda":
        return None
    ran: set[object] = base.derived.setdefault(_WORKING, set())
    if decoder.signature in ran:
        return None
    try:
        with working("compile the kernels of the decode step"):
            decoder.rehearse()
            torch.cuda.synchronize(base.device)
    except Exception as error:  # a compiler, a driver and Triton raise errors of many types
        if is_out_of_memory(error):
            raise
        lines = str(error).splitlines() or [""]
        reason = f"they failed ({type(error).__name__}: {lines[0][:200]})"
        base.derived[_FAILED] = reason
        return reason
    ran.add(decoder.signature)
    return None

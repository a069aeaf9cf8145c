"""Quantises a frozen base to 8 or 4 bits by bitsandbytes; products use dequantised weights.

The int8 product of bitsandbytes rounds activations too, and treats columns with outliers
separately, which it searches among all rows of a batch (LLM.int8, arXiv:2208.07339): an agent's
result would depend on the rows of other agents. Here a layer's weight is dequantised to the compute
dtype for one product. Rows stay independent, and sampling and training agree.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from evo_grpo.errors import EngineUnavailable, ModelError
from evo_grpo.sources import Source

Quantization = Literal["int8", "nf4"]

#: Weights per scale in NF4 (arXiv:2305.14314).
NF4_BLOCK = 64


def quantization_keywords(
    kind: Quantization, source: Source, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Return the keywords with which `from_pretrained` quantises while it loads.

    int8 has one scale per output feature, nf4 one per 64 weights; `dtype` is for computing, and for
    weights that are not quantised. EngineUnavailable is raised if bitsandbytes is not installed,
    ModelError if it does not run on the device, or for a GGUF file.
    """
    problem = ""
    if source.gguf_file is not None:
        problem = (
            f"expected a model of float weights, got the GGUF file {source.name!r}, which is "
            "quantised as it is; leave engine.quantization out, or name the original model"
        )
    elif device.type not in ("cpu", "cuda"):
        problem = (
            f"expected a device cpu or cuda, got {device.type!r}; set engine.device, or leave "
            "engine.quantization out"
        )
    if problem:
        raise ModelError(f"quantization: {problem}")
    try:
        import_module("bitsandbytes")  # transformers uses it
    except ImportError as error:
        raise EngineUnavailable(
            f"quantization={kind!r} needs the package bitsandbytes: install it with "
            f'pip install "evo-grpo[bitsandbytes]", or leave engine.quantization out ({error})'
        ) from error
    from transformers import BitsAndBytesConfig

    keywords: dict[str, Any] = {
        "int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
        "nf4": {
            "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype,
        },
    }[kind]  # fmt: skip
    config = BitsAndBytesConfig(**keywords)
    # A quantised model cannot be moved afterwards.
    return {"quantization_config": config, "device_map": {"": str(device)}}


def use_plain_products(model: nn.Module, kind: Quantization, name: str) -> None:
    """Make a model's quantised layers multiply by their weights in the compute dtype.

    nf4 with a width that 64 does not divide raises ModelError: bitsandbytes 0.50 packs it wrongly.
    """
    for layer, module in model.named_modules():
        if is_quantized(module):
            features = cast("int", module.in_features)
            if kind == "nf4" and features % NF4_BLOCK:
                raise ModelError(
                    f"quantization: expected widths that {NF4_BLOCK} divides for nf4, got "
                    f"{features} in {layer} of {name!r}; set engine.quantization: int8"
                )
            vars(module)["forward"] = partial(_forward, module)


def is_quantized(module: nn.Module) -> bool:
    """Return whether a module is a linear layer of bitsandbytes."""
    return type(module).__module__.startswith("bitsandbytes.") and isinstance(module, nn.Linear)


def dequantized_weight(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """Return a quantised layer's weight as (out, in) of `dtype`, a floating-point dtype."""
    import bitsandbytes.functional as quantised

    weight: Any = module.weight
    state = getattr(weight, "quant_state", None)
    if state is not None:
        return quantised.dequantize_4bit(weight.data, state).to(dtype)
    # Scales (out,) are the greatest magnitude of each row, which is 127 in int8.
    return (weight.data * (weight.SCB[:, None] / 127)).to(dtype)


def _forward(module: nn.Module, x: Tensor) -> Tensor:
    """Return x (..., in) times the layer's weight, plus its bias: (..., out) of x's dtype."""
    apply = cast("Callable[..., Tensor]", _Product.apply)
    bias = cast("Tensor | None", module.bias)
    return apply(x, module, None if bias is None else bias.to(x.dtype))


class _Product(torch.autograd.Function):
    """A product with a frozen weight that is dequantised in forward and backward, and not kept."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, module: nn.Module, bias: Tensor | None) -> Tensor:
        cast("Any", ctx).module = module
        return nn.functional.linear(x, dequantized_weight(module, x.dtype), bias)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of x; the weight and its bias are frozen."""
        (grad,) = grads
        return grad @ dequantized_weight(cast("Any", ctx).module, grad.dtype), None, None

"""Token log-probs from hidden states in chunks: no whole (B, T, V) tensor, in neither direction.

    lp_i = z_i[y_i] - logsumexp(z_i),   z_i = head(h_i) / temperature_i

The head is frozen, so its backward needs d lp / d h = (onehot(y) - softmax(z)) W / temperature.
Recomputing z chunk by chunk there costs one more head matmul and saves the logits.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from evo_grpo.errors import ShapeError

#: Logits held at once, in elements; 2**24 fp32 values are 64 MiB.
CHUNK_ELEMENTS = 1 << 24


class _LinearLogprobs(torch.autograd.Function):
    """Autograd of the chunked log-probs; see the module docstring."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- autograd's own, to which any attribute may be added
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        inverse: Tensor,
        cap: float,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs (M,) fp32 and entropies (M,) fp32."""
        rows = _chunk_rows(weight.shape[0])
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            logits = _logits(hidden[part], weight, bias, cap).mul_(inverse[part, None])
            norm = torch.logsumexp(logits, dim=-1)
            logprobs[part] = logits.gather(-1, targets[part, None])[:, 0] - norm
            # H = logsumexp(z) - sum softmax(z) z, formed in place on the chunk.
            entropies[part] = norm - (logits.sub(norm[:, None]).exp_() * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, inverse)
        ctx.cap = cap
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 -- as in forward
        *grads: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Recompute the logits chunk by chunk; only the hidden states get a gradient."""
        hidden, weight, bias, targets, inverse = ctx.saved_tensors
        rows = _chunk_rows(weight.shape[0])
        out = torch.empty_like(hidden)
        grad = grads[0] * inverse
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            logits = _logits(hidden[part], weight, bias, ctx.cap)
            slope = 1 - (logits / ctx.cap) ** 2 if ctx.cap else None
            dz = torch.softmax(logits.mul_(inverse[part, None]), dim=-1).neg_()
            dz.scatter_add_(
                1, targets[part, None], torch.ones_like(targets[part, None], dtype=dz.dtype)
            )
            dz.mul_(grad[part, None])
            if slope is not None:
                dz.mul_(slope)
            out[part] = (dz.to(weight.dtype) @ weight).to(hidden.dtype)
        return out, None, None, None, None, None


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of target tokens straight from hidden states.

    Args:
        hidden: (M, H) final hidden states, any float dtype.
        weight: (V, H) frozen output embedding.
        targets: (M,) int64 token ids in [0, V).
        temperature: (M,) sampling temperature per token, > 0.
        bias: (V,) or None.
        scale: The model's own multiplier of its logits (Granite, Cohere), 1 for most.
        softcap: The model's own tanh cap of its logits (Gemma), 0 for none.

    Returns:
        (M,) fp32 log-probs in nats, differentiable in `hidden`, and (M,) fp32 entropies in nats
        without gradient.

    Raises:
        ShapeError: When the shapes do not fit.
    """
    if hidden.ndim != 2 or targets.shape != hidden.shape[:1] or temperature.shape != targets.shape:
        raise ShapeError(
            "linear_logprobs: expected hidden (M, H), targets (M,), temperature (M,), got "
            f"{tuple(hidden.shape)}, {tuple(targets.shape)}, {tuple(temperature.shape)}"
        )
    scaled = hidden if scale == 1.0 else hidden * scale
    inverse = temperature.float().reciprocal()
    return cast(
        "tuple[Tensor, Tensor]",
        _LinearLogprobs.apply(scaled, weight, bias, targets, inverse, softcap),
    )


def _chunk_rows(vocabulary: int) -> int:
    return max(1, CHUNK_ELEMENTS // vocabulary)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, cap: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias).float()
    return cap * torch.tanh(logits / cap) if cap else logits

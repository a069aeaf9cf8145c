"""The parts of a decoder layer as autograd functions with few passes over memory.

On small models and on CPUs the passes over activations cost more than the matmuls. Each function
here computes what the model's own modules compute, keeps less for the backward, and writes its
gradient in place where autograd would add several tensors. The base is frozen, so no function has a
gradient for its weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evo_grpo.model.chunks import Chunks


class RmsNorm(torch.autograd.Function):
    """y = x / sqrt(mean(x^2) + eps) * w (arXiv:1910.07467), in fp32 inside as in transformers."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- autograd's own, to which any attribute may be added
        x: Tensor,
        weight: Tensor,
        eps: float,
    ) -> Tensor:
        """Normalize x (..., H) over its last dimension."""
        y, inverse = rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 -- as in forward
        *grads: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Return dx = (g - x mean(g x) / (mean(x^2) + eps)) / sqrt(mean(x^2) + eps), g = dy w."""
        x, weight, inverse = ctx.saved_tensors
        wide = x.float()
        grad = (grads[0] * weight).float()
        along = (grad * wide).sum(-1, keepdim=True)
        along.mul_(inverse.pow(3)).div_(-x.shape[-1])
        return grad.mul_(inverse).addcmul_(wide, along).to(x.dtype), None, None


class SwiGlu(torch.autograd.Function):
    """silu(gate) * up (arXiv:2002.05202) of gate and up side by side."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- as above
        both: Tensor,
    ) -> Tensor:
        """Turn both (..., 2 I) into (..., I)."""
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 -- as above
        *grads: Tensor,
    ) -> tuple[Tensor]:
        """Write both halves of the gradient into one tensor."""
        (both,) = ctx.saved_tensors
        (grad,) = grads
        gate, up = both.chunk(2, dim=-1)
        out = torch.empty_like(both)
        d_gate, d_up = out.chunk(2, dim=-1)
        torch.mul(grad, torch.nn.functional.silu(gate), out=d_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=d_gate)
        return (out,)


class Rotate(torch.autograd.Function):
    """Rotary positions (arXiv:2104.09864) on q and k, and the split into heads."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- as above
        joined: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        kv_heads: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate and split.

        Args:
            ctx: Autograd's.
            joined: (B, T, (heads + 2 kv_heads) D): q, k and v side by side.
            cos: (T, D).
            sin: (T, D), its first half negated.
            heads: Query heads.
            kv_heads: Key and value heads.

        Returns:
            q (B, heads, T, D), k and v (B, kv_heads, T, D), contiguous.
        """
        ctx.save_for_backward(cos, sin)
        ctx.sizes = (heads, kv_heads)
        size = cos.shape[-1]
        parts = joined.unflatten(-1, (-1, size)).transpose(1, 2)
        q = rotate(parts[:, :heads], cos, sin)
        k = rotate(parts[:, heads : heads + kv_heads], cos, sin)
        return q, k, parts[:, heads + kv_heads :].contiguous()

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 -- as above
        *grads: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Rotate back, into one tensor for q, k and v."""
        cos, sin = ctx.saved_tensors
        heads, kv_heads = ctx.sizes
        dq, dk, dv = grads
        rows, _, columns, size = dq.shape
        joined = dq.new_empty(rows, columns, (heads + 2 * kv_heads) * size)
        parts = joined.unflatten(-1, (-1, size)).transpose(1, 2)
        half = size // 2
        for g, x in ((dq, parts[:, :heads]), (dk, parts[:, heads : heads + kv_heads])):
            torch.mul(g, cos, out=x)
            x[..., :half].addcmul_(g[..., half:], sin[:, half:])
            x[..., half:].addcmul_(g[..., :half], sin[:, :half])
        parts[:, heads + kv_heads :].copy_(dv)
        return joined, None, None, None, None


class LoraLinear(torch.autograd.Function):
    """y = residual + x W^T + (x A_n^T) B_n for the rows of agent n (arXiv:2106.09685, eq. 3)."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- as above
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        chunks: Chunks,
    ) -> Tensor:
        """Apply the frozen layer and every agent's adapter.

        Args:
            ctx: Autograd's.
            x: (B, T, in), rows sorted by agent.
            residual: (B, T, out) or None.
            weight: (out, in), frozen.
            bias: (out,) or None, frozen.
            a: (N, R, in).
            b: (N, R, out), which carries the scaling.
            chunks: How the rows fall to the agents.

        Returns:
            (B, T, out).
        """
        y = linear(x, residual, weight, bias)
        pieces = chunks.split(x)
        low = torch.bmm(pieces, chunks.per_chunk(a.to(x.dtype)).transpose(1, 2))
        chunks.add_product(y, low, chunks.per_chunk(b.to(x.dtype)))
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.chunks = chunks
        return y

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 -- as above
        *grads: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Gradients of x, residual, a and b."""
        x, weight, a, b, low = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        grad = grads[0].contiguous()
        pieces = chunks.spread(grad)
        d_low = torch.bmm(pieces, chunks.per_chunk(b.to(x.dtype)).transpose(1, 2))
        d_a = torch.bmm(d_low.transpose(1, 2), chunks.split(x))
        d_b = torch.bmm(low.transpose(1, 2), pieces)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = torch.matmul(grad, weight)
            chunks.add_product(d_x, d_low, chunks.per_chunk(a.to(x.dtype)))
        return (
            d_x,
            grad if ctx.needs_input_grad[1] else None,
            None,
            None,
            chunks.per_agent(d_a.to(a.dtype), len(a)),
            chunks.per_agent(d_b.to(b.dtype), len(b)),
            None,
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalized x (..., H), and 1 / sqrt(mean(x^2) + eps) (..., 1) in fp32."""
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * inverse).to(x.dtype).mul_(weight), inverse


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (..., D) by tables that broadcast to it; sin has its first half negated.

    Returns:
        Contiguous, of x's shape.
    """
    half = x.shape[-1] // 2
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(x, cos, out=y)
    y[..., :half].addcmul_(x[..., half:], sin[..., :half])
    y[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return y


def linear(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return residual + x W^T + bias, (B, T, in) -> (B, T, out)."""
    if residual is None:
        return torch.nn.functional.linear(x, weight, bias)
    flat = torch.addmm(residual.flatten(0, -2), x.flatten(0, -2), weight.t())
    if bias is not None:
        flat.add_(bias)
    return flat.view(residual.shape)

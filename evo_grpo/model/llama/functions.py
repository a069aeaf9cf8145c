"""Autograd functions for the operations of a decoder layer, with few passes over memory.

On small models and CPUs these passes cost more than the matmuls. Each function computes what the
model's own modules compute, saves fewer tensors for the backward, and writes gradients into one
tensor where autograd would add several tensors. The base is frozen, so its weights get no gradient.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from evo_grpo.model.forward.stacks import Chunks
from evo_grpo.model.llama.adapter_views import JoinedAdapters

#: The context of an autograd function, to which any attribute may be added.
Context: TypeAlias = Any


@dataclass(frozen=True)
class Span:
    """Consecutive tokens, from `start` on, that form B rows of equal length T.

    Attributes:
        chunks: Assignment of the rows to the agents.
        cos: (T, D) or (B, 1, T, D), the rotary table of the tokens' positions.
        sin: Like cos, with the first half negated; None without rotary positions, where cos is 1.
    """

    start: int
    rows: int
    columns: int
    chunks: Chunks
    cos: Tensor
    sin: Tensor | None

    @property
    def stop(self) -> int:
        """Index after the last token."""
        return self.start + self.rows * self.columns

    def rows_of(self, x: Tensor) -> Tensor:
        """View the span's tokens in x (M, F) as (B, T, F)."""
        return x[self.start : self.stop].view(self.rows, self.columns, x.shape[-1])


class RmsNorm(torch.autograd.Function):
    """y = x / sqrt(mean(x^2) + eps) * w (arXiv:1910.07467), in fp32 as in transformers.

    In half precision, results are rounded before and after multiplying by the weight; with
    `rounds_once`, only after it.
    """

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        eps: float,
        rounds_once: bool = False,
    ) -> Tensor:
        """Normalize x (..., H) over its last dimension."""
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        y = wide * inverse
        return y.mul_(weight).to(x.dtype) if rounds_once else y.to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return dx = (g - x mean(g x) / (mean(x^2) + eps)) / sqrt(mean(x^2) + eps), g = dy w."""
        x, weight, inverse = ctx.saved_tensors
        wide, grad = x.float(), (grads[0] * weight).float()
        along = (grad * wide).sum(-1, keepdim=True)
        along.mul_(inverse.pow(3)).div_(-x.shape[-1])
        return grad.mul_(inverse).addcmul_(wide, along).to(x.dtype), None, None, None


class Glu(torch.autograd.Function):
    """SiLU(gate) * up or tanh GELU(gate) * up (arXiv:2002.05202), of concatenated gate and up."""

    @staticmethod
    def forward(ctx: Context, both: Tensor, gelu: bool) -> Tensor:
        """Compute the product (..., I) from gate and up, concatenated as `both` (..., 2 I)."""
        gate, up = both.chunk(2, dim=-1)
        active = activated(gate, gelu)
        # Keep the activated gate: an exponential costs more than memory; the modules keep it too.
        ctx.save_for_backward(both, active)
        ctx.gelu = gelu
        return active * up

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None]:
        """Overwrite gate and up, which nothing else uses, with their gradients."""
        both, active = ctx.saved_tensors
        (grad,) = grads
        gate, up = both.chunk(2, dim=-1)
        d_active = grad * up
        torch.mul(grad, active, out=up)
        if ctx.gelu:
            gate.copy_(torch.ops.aten.gelu_backward(d_active, gate, approximate="tanh"))
        else:
            torch.ops.aten.silu_backward.grad_input(d_active, gate, grad_input=gate)
        return both, None


def activated(gate: Tensor, gelu: bool, *, in_place: bool = False) -> Tensor:
    """Apply tanh GELU or SiLU to a gate; `in_place` lets SiLU overwrite it."""
    if gelu:
        return torch.nn.functional.gelu(gate, approximate="tanh")
    return torch.nn.functional.silu(gate, inplace=in_place)


class Rotate(torch.autograd.Function):
    """Applies rotary positions (arXiv:2104.09864) to q and k; splits q, k, v by span and head."""

    @staticmethod
    def forward(
        ctx: Context, joined: Tensor, heads: int, kv_heads: int, spans: tuple[Span, ...]
    ) -> tuple[Tensor, ...]:
        """Rotate and split concatenated q, k and v (M, (heads + 2 kv_heads) D).

        Returns for each span q (B, heads, T, D), k and v (B, kv_heads, T, D), contiguous.
        """
        ctx.spans, ctx.heads, ctx.kv_heads = spans, heads, kv_heads
        out: list[Tensor] = []
        for span in spans:
            parts = heads_of(span.rows_of(joined), span)
            out.append(rotate(parts[:, :heads], span.cos, span.sin))
            out.append(rotate(parts[:, heads : heads + kv_heads], span.cos, span.sin))
            out.append(parts[:, heads + kv_heads :].contiguous())
        return tuple(out)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Write the gradients of q, k and v of all spans into one tensor."""
        spans: tuple[Span, ...] = ctx.spans
        heads, kv_heads = ctx.heads, ctx.kv_heads
        size = grads[0].shape[-1]
        joined = grads[0].new_empty(spans[-1].stop, (heads + 2 * kv_heads) * size)
        for i, span in enumerate(spans):
            dq, dk, dv = grads[3 * i : 3 * i + 3]
            parts = heads_of(span.rows_of(joined), span)
            rotate_back(dq, span.cos, span.sin, out=parts[:, :heads])
            rotate_back(dk, span.cos, span.sin, out=parts[:, heads : heads + kv_heads])
            parts[:, heads + kv_heads :].copy_(dv)
        return joined, None, None, None


def heads_of(x: Tensor, span: Span) -> Tensor:
    """View x (B, T, heads * D) as (B, heads, T, D)."""
    return x.unflatten(-1, (-1, span.cos.shape[-1])).transpose(1, 2)


class LoraLinear(torch.autograd.Function):
    """y = residual + x W^T + (x A_n^T) B_n for the tokens of agent n (arXiv:2106.09685, eq. 3)."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        spans: tuple[Span, ...],
        adapters: JoinedAdapters,
        a: Tensor,
        *b: Tensor,
    ) -> Tensor:
        """Apply the frozen layer and every agent's adapter: x (M, in) to (M, out).

        The residual is (M, out), the frozen weight (out, in) and bias (out,). `a` (N, R, in) and
        `b`, (N, size, rank) for each part, are also in `adapters`, but autograd needs them as
        arguments.
        """
        y = linear(x, residual, weight, bias)
        down, blocks = adapters.down(a, x.dtype), adapters.blocks(b, x.dtype)
        scale = adapters.scales(x.dtype)
        lows: list[Tensor] = []
        for span in spans:
            chunks = span.chunks
            low = torch.bmm(chunks.split(span.rows_of(x)), chunks.per_chunk(down).transpose(1, 2))
            lows.append(low.mul_(chunks.per_chunk(scale)))
            for rows, columns, up in blocks:
                outputs = span.rows_of(y)[..., columns]
                chunks.add_product(outputs, low[..., rows], chunks.per_chunk(up))
        ctx.save_for_backward(x, weight, a, *b, *lows)
        ctx.spans, ctx.adapters = spans, adapters
        return y

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, residual, a and b."""
        spans: tuple[Span, ...] = ctx.spans
        adapters: JoinedAdapters = ctx.adapters
        x, weight, a, *b_and_lows = ctx.saved_tensors
        b, lows = b_and_lows[: len(adapters.b)], b_and_lows[len(adapters.b) :]
        grad = grads[0].contiguous()
        down, blocks = adapters.down(a, x.dtype), adapters.blocks(b, x.dtype)
        scale = adapters.scales(x.dtype)
        d_x = torch.mm(grad, weight) if ctx.needs_input_grad[0] else None
        d_a: Tensor | None = None
        d_b: list[Tensor] = []
        for span, low in zip(spans, lows, strict=True):
            chunks = span.chunks
            pieces = chunks.spread(span.rows_of(grad))
            d_low = torch.empty_like(low)
            for number, (rows, columns, up) in enumerate(blocks):
                piece = pieces[..., columns]
                torch.bmm(piece, chunks.per_chunk(up).transpose(1, 2), out=d_low[..., rows])
                span_d_b = torch.bmm(piece.transpose(1, 2), low[..., rows])
                span_d_b = chunks.per_agent(span_d_b.to(a.dtype), len(a))
                if span is spans[0]:
                    d_b.append(span_d_b)
                else:
                    d_b[number].add_(span_d_b)
            d_low.mul_(chunks.per_chunk(scale))
            span_d_a = torch.bmm(d_low.transpose(1, 2), chunks.split(span.rows_of(x)))
            span_d_a = chunks.per_agent(span_d_a.to(a.dtype), len(a))
            d_a = span_d_a if d_a is None else d_a.add_(span_d_a)
            if d_x is not None:
                chunks.add_product(span.rows_of(d_x), d_low, chunks.per_chunk(down))
        d_residual = grad if ctx.needs_input_grad[1] else None
        return d_x, d_residual, None, None, None, None, d_a, *adapters.apart(d_b)


def glu(both: Tensor, *, gelu: bool) -> Tensor:
    """Apply `Glu` to `both` (..., 2 I), which may be overwritten if it needs no gradient."""
    if both.requires_grad:
        return Glu.apply(both, gelu)
    gate, up = both.chunk(2, dim=-1)
    return activated(gate, gelu, in_place=True).mul_(up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """Rotate x (..., D) by tables that broadcast to it; sin has its first half negated.

    If sin is None, x is only multiplied by cos. Returns `out`, or a contiguous tensor of x's shape.
    """
    half = x.shape[-1] // 2
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    torch.mul(x, cos, out=y)
    if sin is None:
        return y
    y[..., :half].addcmul_(x[..., half:], sin[..., :half])
    y[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return y


def rotate_back(grad: Tensor, cos: Tensor, sin: Tensor | None, *, out: Tensor) -> None:
    """Write the gradient of `rotate`'s input to `out`; `grad` is the gradient of its output."""
    half = grad.shape[-1] // 2
    torch.mul(grad, cos, out=out)
    if sin is None:
        return
    out[..., :half].addcmul_(grad[..., half:], sin[..., half:])
    out[..., half:].addcmul_(grad[..., :half], sin[..., :half])


def linear(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return residual + x W^T + bias, (M, in) -> (M, out)."""
    if residual is None:
        return torch.nn.functional.linear(x, weight, bias)
    y = torch.addmm(residual, x, weight.t())
    return y if bias is None else y.add_(bias)

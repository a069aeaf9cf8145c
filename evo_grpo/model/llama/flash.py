"""Attention of rows that share prefixes, by flash kernels that read each key once a prefix.

Every prefix and every rest attends to itself, and the rests of a prefix, as one long query, to the
keys of that prefix; the two outputs of a rest are joined by their log-sum-exps. With the joined
output and log-sum-exp, the backward of each of the two calls is its part of the gradient
(Dao 2023, arXiv:2307.08691, eq. 4). So the forward copies no key for a row or for a head of a
group, and there is no mask. Keys of prefixes of unequal length are packed, once a prefix.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from evo_grpo.model.forward.prefix import SharedPrefix
from evo_grpo.model.llama.attention import Attention
from evo_grpo.model.llama.kernels import Context, Span, rotate, rotate_back

_LIBRARY = torch.library.Library("evo_grpo_flash", "DEF")  # operators exist as long as it does
_SEGMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor queries, Tensor keys, int longest_query, int longest_key,"
    " bool causal, float scale"
)
_LIBRARY.define(f"forward({_SEGMENTS}) -> (Tensor, Tensor, Tensor, Tensor)")
_OUTPUTS = "Tensor grad, Tensor out, Tensor sums, Tensor state, Tensor unused"
_LIBRARY.define(f"backward({_OUTPUTS}, {_SEGMENTS}) -> (Tensor, Tensor, Tensor)")

#: Offsets (segments + 1,) int32 of queries and of keys, the longest of both, whether it is causal.
Offsets: TypeAlias = tuple[Tensor, Tensor, int, int, bool]


def flash_serves(like: Tensor, head_dim: int) -> bool:
    """Return whether flash kernels serve tensors like one on its device.

    torch calls their operators private, so that each release may change what they mean: see
    `llama.cuda.comparison`.
    """
    return (
        like.device.type == "cuda"
        and like.dtype in (torch.float16, torch.bfloat16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and not torch.version.hip
        and torch.cuda.get_device_capability(like.device) >= (8, 0)
    )


class Segments:
    """Which tokens of a micro-batch attend to which, as flash kernels take it.

    Attributes:
        alone: Every row, or every prefix and rest, for itself.
        over: The rests of each prefix over its keys; None without prefixes.
        real: Places of the real tokens of the prefixes; None if all are real.
        start: First token of the rests.
    """

    def __init__(self, prefix: SharedPrefix | None, ids: Tensor, *, in_order: bool) -> None:
        self._in_order = in_order
        self.real: Tensor | None = None
        self.start = 0
        self.over: Offsets | None = None
        if prefix is None:
            rows, columns = ids.shape
            own = torch.arange(rows + 1, dtype=torch.int32, device=ids.device) * columns
            self.alone: Offsets = own, own, columns, columns, True
            return
        assert prefix.segments is not None
        own, queries, keys = (part.int() for part in prefix.segments[:3])
        self.real = prefix.segments[3]
        self.start, after = prefix.ids.numel(), prefix.rest.shape[1]
        longest = max(prefix.ids.shape[1], after)
        self.alone = own, own, longest, longest, True
        self.over = queries, keys, max(prefix.rows) * after, max(prefix.lengths), False

    def attend(self, q: Tensor, kv: Tensor, scale: float) -> tuple[list[Tensor], list[Tensor]]:
        """Return outputs (M, heads, D), log-sum-exps (heads, M) fp32 and a state of each part.

        `kv` are keys and values (2, M, kv heads, D). The second part is empty without prefixes.
        """
        first = list(_forward(q, *kv, *self.alone, scale))
        if self.over is None:
            return first, []
        return first, list(_forward(q[self.start :], *self._of_prefixes(kv), *self.over, scale))

    def gradients(
        self, grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, sums: Tensor,
        more_sums: Tensor | None, states: list[Tensor], scale: float,
    ) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
        """Return dq, dk and dv of each part, given the joined outputs and log-sum-exps.

        Those of keys and values in the second part are of the real tokens of the prefixes.
        """
        context = _in_a_fixed_order if self._in_order else nullcontext
        with context():
            first = list(_backward(grad, out, sums, *states[:2], q, *kv, *self.alone, scale))
        if self.over is None or more_sums is None:
            return first, []
        before, rest = self._of_prefixes(kv), slice(self.start, None)
        with context():
            more = _backward(
                grad[rest], out[rest], more_sums, *states[2:], q[rest], *before, *self.over, scale
            )
        return first, list(more)

    def _of_prefixes(self, kv: Tensor) -> Tensor:
        """Return keys and values of the prefixes' real tokens."""
        return kv[:, : self.start] if self.real is None else kv.index_select(1, self.real)


@contextmanager
def _in_a_fixed_order() -> Generator[None]:
    """Let the kernel add gradients of queries in a fixed order, not by atomic sums.

    A mode that only warns would leave the order open. Memory is not filled, as this mode does.
    """
    settings: Any = torch.utils.deterministic
    before, fills = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fills
        torch.set_deterministic_debug_mode(before)


class SharedAttention:
    """Attention of one micro-batch of shared prefixes and the rests of its rows.

    Args:
        heads: Query heads.
        kv_heads: Key and value heads.
        spans: The prefixes, and the rests.
        prefix: The prefix of each row, whose rows lie side by side.
        scale: Factor of the scores.
        in_order: Whether gradients are added in a fixed order.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        spans: tuple[Span, ...],
        prefix: SharedPrefix,
        scale: float,
        *,
        in_order: bool = True,
    ) -> None:
        self.heads, self.kv_heads, self.spans, self.scale = heads, kv_heads, spans, scale
        self.segments = Segments(prefix, prefix.ids, in_order=in_order)
        self.tables = [_by_token(spans, name) for name in ("cos", "sin")]

    def __call__(self, joined: Tensor) -> Tensor:
        """Attend: q, k and v side by side (M, (heads + 2 kv_heads) D) to (M, heads * D)."""
        return _Shared.apply(joined, self)


AnyAttention: TypeAlias = Attention | SharedAttention


def _by_token(spans: tuple[Span, ...], name: str) -> Tensor | None:
    """Return cos or sin (M, 1, D) of all tokens; None without rotary positions."""
    parts: list[Tensor] = []
    for span in spans:
        table: Tensor | None = getattr(span, name)
        if table is None:
            return None
        table = table.reshape(-1, span.columns, table.shape[-1])
        parts.append(table.expand(span.rows, -1, -1).flatten(0, 1))
    return torch.cat(parts)[:, None]


class _Shared(torch.autograd.Function):
    """See `SharedAttention`."""

    @staticmethod
    def forward(ctx: Context, joined: Tensor, plan: SharedAttention) -> Tensor:
        cos, sin = plan.tables
        assert cos is not None
        both = plan.heads + plan.kv_heads
        parts = joined.unflatten(-1, (both + plan.kv_heads, -1))
        q, k = rotate(parts[:, :both], cos, sin).split((plan.heads, plan.kv_heads), dim=1)
        kv = torch.stack([k, parts[:, both:]])
        (out, sums, *state), (more, more_sums, *more_state) = plan.segments.attend(
            q, kv, plan.scale
        )
        start = plan.segments.start
        own_sums = sums[:, start:]
        whole = torch.logaddexp(own_sums, more_sums)
        share = torch.exp(more_sums - whole).t()[..., None]
        out[start:] = torch.lerp(out[start:].float(), more.float(), share).to(out.dtype)
        own_sums.copy_(whole)
        ctx.save_for_backward(q, kv, out, sums, whole, *state, *more_state)
        ctx.plan = plan
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None]:
        """Gradients of q, k and v, rotated back, into one tensor."""
        plan: SharedAttention = ctx.plan
        q, kv, out, sums, more_sums, *states = ctx.saved_tensors
        grad = grads[0].reshape(out.shape).contiguous()
        (dq, dk, dv), more = plan.segments.gradients(
            grad, q, kv, out, sums, more_sums, states, plan.scale
        )
        start, real = plan.segments.start, plan.segments.real
        dq[start:] += more[0]
        for whole, part in ((dk, more[1]), (dv, more[2])):
            if real is None:
                whole[:start] += part
            else:
                whole.index_add_(0, real, part)  # each key once: in no order
        cos, sin = plan.tables
        assert cos is not None
        joined = grad.new_empty(len(grad), plan.heads + 2 * plan.kv_heads, grad.shape[-1])
        both = plan.heads + plan.kv_heads
        rotate_back(dq, cos, sin, out=joined[:, : plan.heads])
        rotate_back(dk, cos, sin, out=joined[:, plan.heads : both])
        joined[:, both:] = dv
        return joined.flatten(1), None


def _on_cuda(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, longest_query: int,
    longest_key: int, causal: bool, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    return torch.ops.aten._flash_attention_forward(
        q, k, v, queries, keys, longest_query, longest_key, 0.0, causal, False, scale=scale
    )[:4]


def _backward_on_cuda(
    grad: Tensor, out: Tensor, sums: Tensor, state: Tensor, unused: Tensor, q: Tensor, k: Tensor,
    v: Tensor, queries: Tensor, keys: Tensor, longest_query: int, longest_key: int, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, sums, queries, keys, longest_query, longest_key, 0.0, causal, state,
        unused, scale=scale,
    )  # fmt: skip


def _on_cpu(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, longest_query: int,
    longest_key: int, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return outputs (M, heads, D) and log-sum-exps (heads, M) fp32, segment by segment."""
    del longest_query, longest_key
    out, sums = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    for own, seen in _segments(queries, keys):
        mixed, sum_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_dense(q[own], k[seen], v[seen]), 0.0, causal, scale=scale
        )
        out[own], sums[:, own] = mixed[0].transpose(0, 1), sum_[0]
    return out, sums, q.new_empty(0), q.new_empty(0)


def _backward_on_cpu(
    grad: Tensor, out: Tensor, sums: Tensor, state: Tensor, unused: Tensor, q: Tensor, k: Tensor,
    v: Tensor, queries: Tensor, keys: Tensor, longest_query: int, longest_key: int, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    del longest_query, longest_key, state, unused
    found = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for own, seen in _segments(queries, keys):
        dq, *rest = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _heads_first(grad[own]), *_dense(q[own], k[seen], v[seen]), _heads_first(out[own]),
            sums[:, own][None].contiguous(), 0.0, causal, scale=scale,
        )  # fmt: skip
        found[0][own] = dq[0].transpose(0, 1)
        for whole, part in zip(found[1:], rest, strict=True):
            whole[seen] = part[0].unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1)
    return found


def _segments(queries: Tensor, keys: Tensor) -> list[tuple[slice, slice]]:
    """Return the queries and keys of the segments that have both."""
    both = zip(pairwise(queries.tolist()), pairwise(keys.tolist()), strict=True)
    return [(slice(*q), slice(*k)) for q, k in both if q[0] < q[1] and k[0] < k[1]]


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def _dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of a segment as (1, heads, T, D), keys repeated for their groups."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return _heads_first(q), _heads_first(k), _heads_first(v)


_LIBRARY.impl("forward", _on_cuda, "CUDA")
_LIBRARY.impl("backward", _backward_on_cuda, "CUDA")
_LIBRARY.impl("forward", _on_cpu, "CPU")
_LIBRARY.impl("backward", _backward_on_cpu, "CPU")
_forward = torch.ops.evo_grpo_flash.forward.default
_backward = torch.ops.evo_grpo_flash.backward.default

"""Attention of rows that share prefixes, by flash kernels that read each key once per prefix.

Every prefix and every rest attends to itself. The rests of a prefix, as one long query, also attend
to the keys of that prefix; their two outputs are joined by their log-sum-exps. With the joined
output and log-sum-exp, the backward of each of the two calls is its part of the gradient (Dao 2023,
arXiv:2307.08691, eq. 4). So the forward has no mask and copies no key for a row or for a head of a
group. Keys of prefixes of unequal length are packed once.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from evo_grpo.model.forward.prefix import SharedPrefix
from evo_grpo.model.forward.sending import send
from evo_grpo.model.llama.cuda.operators import operator

#: Offsets (segments + 1,) int32 of queries and of keys, the longest of both, whether it is causal.
Offsets: TypeAlias = tuple[Tensor, Tensor, int, int, bool]


class Segments:
    """Which tokens of a micro-batch attend to which, in the format of flash kernels.

    Attributes:
        alone: Every row, or every prefix and rest, attending to itself.
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
        first = list(flash_forward(q, kv[0], kv[1], *self.alone, scale))
        if self.over is None:
            return first, []
        k, v = self._of_prefixes(kv)
        return first, list(flash_forward(q[self.start :], k, v, *self.over, scale))

    def gradients(
        self, grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, sums: Tensor,
        more_sums: Tensor | None, states: list[Tensor], scale: float,
    ) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
        """Return dq, dk and dv of each part, given the joined outputs and log-sum-exps.

        dk and dv of the second part are for the real tokens of the prefixes.
        """
        k, v = kv
        with self._order():
            first = flash_backward(
                grad, out, sums, states[0], states[1], q, k, v, *self.alone, scale
            )
        if self.over is None or more_sums is None:
            return list(first), []
        (k, v), rest = self._of_prefixes(kv), slice(self.start, None)
        with self._order():
            more = flash_backward(
                grad[rest], out[rest], more_sums, states[2], states[3], q[rest], k, v, *self.over,
                scale,
            )  # fmt: skip
        return list(first), list(more)

    def _order(self) -> AbstractContextManager[None]:
        return _in_a_fixed_order() if self._in_order else nullcontext()

    def _of_prefixes(self, kv: Tensor) -> Tensor:
        """Return keys and values of the prefixes' real tokens."""
        return kv[:, : self.start] if self.real is None else kv.index_select(1, self.real)


class WindowSegments(Segments):
    """`Segments` of a layer whose window is shorter than rows.

    In one call, each rest attends to itself and to a copy of the last keys of its prefix, which the
    window reaches. A second call handles the prefixes, or whole rows.
    """

    def __init__(
        self, prefix: SharedPrefix | None, ids: Tensor, window: int, *, in_order: bool
    ) -> None:
        super().__init__(prefix, ids, in_order=in_order)
        self._window, self._rests = window, None
        if prefix is None:
            return
        (count, before), after = prefix.ids.shape, prefix.rest.shape[1]
        places: list[npt.NDArray[np.int64]] = []
        for number, (length, rows) in enumerate(zip(prefix.lengths, prefix.rows, strict=True)):
            stop = number * before + length
            seen = np.arange(stop - min(length, window - 1), stop)
            for _ in range(rows):
                own = self.start + len(places) // 2 * after
                places += [seen, np.arange(own, own + after)]
        lengths = [len(seen) + after for seen in places[::2]]
        rests = np.arange(len(lengths) + 1) * after
        offsets = np.append(0, np.cumsum(lengths)), rests, np.arange(count + 1) * before
        keys, rests, own, self._gather = send([*offsets, np.concatenate(places)], ids.device)
        self.alone = own.int(), own.int(), before, before, True
        self._rests: Offsets | None = rests.int(), keys.int(), after, max(lengths), True

    def attend(self, q: Tensor, kv: Tensor, scale: float) -> tuple[list[Tensor], list[Tensor]]:
        """Return one part with the rows of both calls, since nothing is joined; see `Segments`.

        The last of the states has the log-sum-exps of the rests.
        """
        if self._rests is None:
            return list(flash_forward(q, kv[0], kv[1], *self.alone, scale, self._window)), []
        n, (k, v) = self.start, kv.index_select(1, self._gather)
        first = flash_forward(q[:n], kv[0, :n], kv[1, :n], *self.alone, scale, self._window)
        rests = flash_forward(q[n:], k, v, *self._rests, scale, self._window)
        return [torch.cat([first[0], rests[0]]), first[1], *first[2:], *rests[2:], rests[1]], []

    def gradients(
        self, grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, sums: Tensor,
        more_sums: Tensor | None, states: list[Tensor], scale: float,
    ) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
        """See `Segments`."""
        n = len(q) if self._rests is None else self.start
        with self._order():
            dq, dk, dv = flash_backward(
                grad[:n], out[:n], sums, states[0], states[1], q[:n], kv[0, :n], kv[1, :n],
                *self.alone, scale, self._window,
            )  # fmt: skip
        if self._rests is None:
            return [dq, dk, dv], []
        k, v = kv.index_select(1, self._gather)
        with self._order():
            rests = flash_backward(
                grad[n:], out[n:], states[4], states[2], states[3], q[n:], k, v, *self._rests,
                scale, self._window,
            )  # fmt: skip
        both = kv.new_zeros(len(q), 2, *kv.shape[2:], dtype=torch.float32)
        # The keys of a prefix have gradients of several rows: added in fp32, in a fixed order.
        both.index_put_((self._gather,), torch.stack(rests[1:], 1).float(), accumulate=True)
        both[:n] += torch.stack([dk, dv], 1)
        whole = both.transpose(0, 1).to(kv.dtype, memory_format=torch.contiguous_format)
        whole = whole.contiguous()  # fp32 as it was keeps its strides
        return [torch.cat([dq, rests[0]]), whole[0], whole[1]], []


@contextmanager
def _in_a_fixed_order() -> Generator[None]:
    """Make the kernel add gradients of queries in a fixed order, not by atomic sums.

    A mode that only warns would leave the order open; filling memory is switched off.
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


@operator()
def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, longest_query: int,
    longest_key: int, causal: bool, scale: float, window: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return outputs (M, heads, D), log-sum-exps (heads, M) fp32, and the state for the backward.

    The last query of a segment is at its last key; a window of 0 means none.
    """
    if q.device.type == "cuda":
        return torch.ops.aten._flash_attention_forward(
            q, k, v, queries, keys, longest_query, longest_key, 0.0, causal, False, scale=scale,
            **_reach(window),
        )[:4]  # fmt: skip
    out, sums = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    for own, seen in _segments(queries, keys):
        mixed, sum_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_dense(q[own], k[seen], v[seen]), 0.0, causal and not window, scale=scale,
            attn_mask=_mask(q[own], k[seen], window),
        )  # fmt: skip
        out[own], sums[:, own] = mixed[0].transpose(0, 1), sum_[0]
    return out, sums, q.new_empty(0), q.new_empty(0)


@operator()
def flash_backward(
    grad: Tensor, out: Tensor, sums: Tensor, state: Tensor, unused: Tensor, q: Tensor, k: Tensor,
    v: Tensor, queries: Tensor, keys: Tensor, longest_query: int, longest_key: int, causal: bool,
    scale: float, window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk and dv."""
    if q.device.type == "cuda":
        return torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, sums, queries, keys, longest_query, longest_key, 0.0, causal,
            state, unused, scale=scale, **_reach(window),
        )  # fmt: skip
    found = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for own, seen in _segments(queries, keys):
        dq, *rest = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _heads_first(grad[own]), *_dense(q[own], k[seen], v[seen]), _heads_first(out[own]),
            sums[:, own][None].contiguous(), 0.0, causal and not window, scale=scale,
            attn_mask=_mask(q[own], k[seen], window),
        )  # fmt: skip
        found[0][own] = dq[0].transpose(0, 1)
        for whole, part in zip(found[1:], rest, strict=True):
            whole[seen] = part[0].unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1)
    return found


def _reach(window: int) -> dict[str, int]:
    """Return the reach of a query as keywords of torch's operators on CUDA."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _mask(q: Tensor, k: Tensor, window: int) -> Tensor | None:
    """Return the mask (queries, keys) of a window, 0 or -inf; None without one."""
    if not window:
        return None
    last = torch.arange(len(q))[:, None] + len(k) - len(q)
    places = torch.arange(len(k))
    seen = (places <= last) & (places > last - window)
    return torch.where(seen, 0.0, float("-inf")).to(q.dtype)


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

"""Attention of rows that share prefixes, by flash kernels that read a prefix once for all its rows.

Every prefix and every rest attends to itself. The rests of a prefix, as one long query, also attend
to the keys of that prefix. Each rest thus has two outputs, which are joined by their log-sum-exps.
So the forward has no mask and copies no key for a row or for a head of a group. Given the joined
output and log-sum-exp, the backward of each call returns its part of the gradient (Dao 2023,
arXiv:2307.08691, eq. 4). Keys of prefixes of unequal length are packed once.
"""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from evo_grpo.model.forward.prefix import SharedPrefix
from evo_grpo.model.forward.sending import send
from evo_grpo.model.llama.cuda import operators
from evo_grpo.model.llama.cuda.operators import operator

#: Offsets (segments + 1,) int32 of queries and of keys, the longest of both, whether it is causal.
Offsets: TypeAlias = tuple[Tensor, Tensor, int, int, bool]


class Segments:
    """Which tokens of a micro-batch attend to which, in the format of flash kernels.

    Attributes:
        alone: Offsets for every row, or every prefix and rest, to attend to itself.
        over: Offsets for the rests of each prefix to attend to the prefix; None without prefixes.
        real: Indices of the prefixes' real tokens; None if none is padding.
        start: First token of the rests.
    """

    def __init__(self, prefix: SharedPrefix | None, ids: Tensor, *, in_order: bool) -> None:
        self._in_order = in_order
        self.real: Tensor | None = None
        self.start = 0
        self.over: Offsets | None = None
        if prefix is None:
            rows, columns = ids.shape
            offsets = torch.arange(rows + 1, dtype=torch.int32, device=ids.device) * columns
            self.alone: Offsets = offsets, offsets, columns, columns, True
            return
        assert prefix.segments is not None
        offsets, queries, keys = (part.int() for part in prefix.segments[:3])
        self.real = prefix.segments[3]
        self.start, rest_columns = prefix.ids.numel(), prefix.rest.shape[1]
        longest = max(prefix.ids.shape[1], rest_columns)
        self.alone = offsets, offsets, longest, longest, True
        self.over = queries, keys, max(prefix.rows) * rest_columns, max(prefix.lengths), False

    def attend(self, q: Tensor, kv: Tensor, scale: float) -> tuple[Tensor, list[Tensor]]:
        """Return outputs (M, heads, D) and tensors for `gradients`; `kv` is (2, M, kv heads, D)."""
        out, sums, *state = flash_forward(q, kv[0], kv[1], *self.alone, scale)
        if self.over is None:
            return out, [sums, *state]
        k, v = self._of_prefixes(kv)
        prefix_out, prefix_sums, *prefix_state = flash_forward(
            q[self.start :], k, v, *self.over, scale
        )
        operators.join_parts(prefix_out, out, sums, prefix_sums)
        return out, [sums, *state, prefix_sums, *prefix_state]

    def gradients(
        self, grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, kept: list[Tensor], scale: float
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return dq, dk and dv of the attention `alone`, and a list of those of `over` or [].

        In the second list, dq has the tokens of the rests; dk and dv have the prefixes' real
        tokens.
        """
        alone_grads = self._backward(grad, out, *kept[:3], q, *kv, *self.alone, scale)
        if self.over is None:
            return alone_grads, []
        rests, prefixes = slice(self.start, None), self._of_prefixes(kv)
        return alone_grads, self._backward(
            grad[rests], out[rests], *kept[3:], q[rests], *prefixes, *self.over, scale
        )

    def _backward(self, *given: Any) -> list[Tensor]:
        with _in_a_fixed_order() if self._in_order else nullcontext():
            return list(flash_backward(*given))

    def _of_prefixes(self, kv: Tensor) -> Tensor:
        """Return keys and values of the prefixes' real tokens."""
        return kv[:, : self.start] if self.real is None else kv.index_select(1, self.real)


class WindowSegments(Segments):
    """`Segments` for a layer whose window is shorter than some rows.

    One call of the kernel computes the rests: each attends to itself and to copies of the last keys
    of its prefix, which the window reaches. Another call computes the prefixes. Without shared
    prefixes, there is one call for whole rows.
    """

    def __init__(
        self, prefix: SharedPrefix | None, ids: Tensor, window: int, *, in_order: bool
    ) -> None:
        super().__init__(prefix, ids, in_order=in_order)
        self._window, self._rests = window, None
        if prefix is None:
            return
        (count, width), rest_width = prefix.ids.shape, prefix.rest.shape[1]
        tokens: list[npt.NDArray[np.int64]] = []
        for number, (length, rows) in enumerate(zip(prefix.lengths, prefix.rows, strict=True)):
            stop = number * width + length
            reached = np.arange(stop - min(length, window - 1), stop)
            for _ in range(rows):
                offset = self.start + len(tokens) // 2 * rest_width
                tokens += [reached, np.arange(offset, offset + rest_width)]
        lengths = [len(reached) + rest_width for reached in tokens[::2]]
        rests = np.arange(len(lengths) + 1) * rest_width
        offsets = np.append(0, np.cumsum(lengths)), rests, np.arange(count + 1) * width
        keys, rests, offset, self._gather = send([*offsets, np.concatenate(tokens)], ids.device)
        self.alone = offset.int(), offset.int(), width, width, True
        self._rests: Offsets | None = rests.int(), keys.int(), rest_width, max(lengths), True

    def attend(self, q: Tensor, kv: Tensor, scale: float) -> tuple[Tensor, list[Tensor]]:
        """See `Segments`; results of the rests follow those of the prefixes."""
        n = len(q) if self._rests is None else self.start
        k, v = kv[:, :n]
        out, *state = flash_forward(q[:n], k, v, *self.alone, scale, self._window)
        if self._rests is None:
            return out, state
        k, v = kv.index_select(1, self._gather)
        rest_out, *rest_state = flash_forward(q[n:], k, v, *self._rests, scale, self._window)
        return torch.cat([out, rest_out]), state + rest_state

    def gradients(
        self, grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, kept: list[Tensor], scale: float
    ) -> tuple[list[Tensor], list[Tensor]]:
        """See `Segments.gradients`."""
        n = len(q) if self._rests is None else self.start
        dq, dk, dv = self._backward(
            grad[:n], out[:n], *kept[:3], q[:n], *kv[:, :n], *self.alone, scale, self._window
        )
        if self._rests is None:
            return [dq, dk, dv], []
        rest_kv = kv.index_select(1, self._gather)
        rest_grads = self._backward(
            grad[n:], out[n:], *kept[3:], q[n:], *rest_kv, *self._rests, scale, self._window
        )
        kv_sums = kv.new_zeros(len(q), 2, *kv.shape[2:], dtype=torch.float32)
        # The keys of a prefix have gradients of several rows: added in fp32, in a fixed order.
        kv_sums.index_put_((self._gather,), torch.stack(rest_grads[1:], 1).float(), accumulate=True)
        kv_sums[:n] += torch.stack([dk, dv], 1)
        kv_grads = kv_sums.transpose(0, 1).to(kv.dtype, memory_format=torch.contiguous_format)
        kv_grads = kv_grads.contiguous()  # `to` does nothing in fp32
        return [torch.cat([dq, rest_grads[0]]), *kv_grads], []


@contextmanager
def _in_a_fixed_order() -> Generator[None]:
    """Make the kernel add gradients of queries in a fixed order, not by atomic sums.

    Torch's deterministic mode "warn" would not fix the order. New memory is not filled meanwhile.
    """
    settings: Any = torch.utils.deterministic
    mode, fills = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fills
        torch.set_deterministic_debug_mode(mode)


@operator()
def flash_forward(  # noqa: PLR0913 -- the arguments of torch
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, longest_query: int,
    longest_key: int, causal: bool, scale: float, window: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return outputs (M, heads, D), log-sum-exps (heads, M) fp32, and the state for the backward.

    The last query of a segment is aligned with its last key; window 0 is no window.
    """
    return torch.ops.aten._flash_attention_forward(
        q, k, v, queries, keys, longest_query, longest_key, 0.0, causal, False, scale=scale,
        **_reach(window),
    )[:4]  # fmt: skip


@operator()
def flash_backward(  # noqa: PLR0913 -- the arguments of torch
    grad: Tensor, out: Tensor, sums: Tensor, state: Tensor, unused: Tensor, q: Tensor, k: Tensor,
    v: Tensor, queries: Tensor, keys: Tensor, longest_query: int, longest_key: int, causal: bool,
    scale: float, window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients dq, dk and dv of `flash_forward`, given the gradient of its outputs."""
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, sums, queries, keys, longest_query, longest_key, 0.0, causal, state,
        unused, scale=scale, **_reach(window),
    )  # fmt: skip


def _reach(window: int) -> dict[str, int]:
    """Return a window as keyword arguments of torch's operators."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}

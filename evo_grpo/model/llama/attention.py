"""Attention of the learn pass, with an implementation chosen by row length and device.

For short rows on a CPU, two batched matmuls and a softmax are faster than torch's blocked kernel.
`ShortAttention` also saves passes over memory: it reads concatenated q, k and v, writes keys and
values into the buffers of the matmuls, behind those of a shared prefix, and writes all gradients
into one tensor. The weights that it saves for the backward grow with the square of the length, so
long rows and other devices use torch's kernel.
"""

from itertools import accumulate

import torch
from torch import Tensor, nn

from evo_grpo.model.forward.prefix import SharedPrefix
from evo_grpo.model.llama.functions import Context, Rotate, Span, heads_of, rotate, rotate_back

#: A row is short if its queries times keys are at most the square of this.
SHORT = 128


class Attention:
    """Attention of one micro-batch, the same in every layer.

    Args:
        heads: Query heads.
        kv_heads: Key and value heads; query head h reads kv head h * kv_heads // heads.
        spans: One span of whole rows; or a span of prefixes and a span of the rests of rows.
        prefix: The prefix of each row, if there are two spans.
        like: A tensor with the dtype and device to use.
        scale: Factor of the scores; None for 1 / sqrt(D).
        window: Number of tokens that a token attends to, itself included; None for all before it.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        spans: tuple[Span, ...],
        prefix: SharedPrefix | None,
        like: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
    ) -> None:
        self.heads, self.kv_heads, self.spans = heads, kv_heads, spans
        default_scale = spans[0].cos.shape[-1] ** -0.5
        self.scale = default_scale if scale is None else scale
        # None for the default: torch rounds it unlike Python.
        self._given_scale = None if self.scale == default_scale else self.scale
        self.source = None if prefix is None else prefix.source
        self._after: Tensor | None = None
        if prefix is not None:
            columns = prefix.ids.shape[1], prefix.rest.shape[1]
            self._after = after_prefix(prefix.row_lengths, *columns, like.dtype, window)
        self._first: Tensor | None = None
        if window is not None and spans[0].columns > window:
            self._first = causal(spans[0].columns, like, window)
        # The rest of a row also attends to its prefix.
        counts = accumulate(span.columns for span in spans)
        scores = max(span.columns * count for span, count in zip(spans, counts, strict=True))
        fits = like.device.type == "cpu" and scores <= SHORT * SHORT
        #: For short rows, the masks added to the scores of each span's S keys, 0 or -inf: (G T, S)
        #: for all rows or (B kv_heads, G T, S), with G = heads // kv_heads query heads stacked
        #: along the tokens. Empty for long rows.
        self.masks = self._masks(like) if fits else ()

    def __call__(self, joined: Tensor) -> Tensor:
        """Map concatenated q, k, v (M, (heads + 2 kv_heads) D) to outputs (M, heads * D)."""
        if self.masks:
            return ShortAttention.apply(joined, self)
        q, k, v, *of_rests = Rotate.apply(joined, self.heads, self.kv_heads, self.spans)
        # Rows are padded on the right, where causal attention does not look.
        mixed = [_attend(q, k, v, self._first, self._given_scale)]
        if self.source is not None:
            q_rest, k_rest, v_rest = of_rests
            keys = torch.cat([k.index_select(0, self.source), k_rest], dim=2)
            values = torch.cat([v.index_select(0, self.source), v_rest], dim=2)
            assert self._after is not None
            mask = self._after if self._after.ndim == 2 else self._after[:, None]
            mixed.append(_attend(q_rest, keys, values, mask, self._given_scale))
        flat = [part.transpose(1, 2).flatten(0, 1).flatten(1) for part in mixed]
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def _masks(self, like: Tensor) -> tuple[Tensor, ...]:
        """Return the mask of each span, repeated for the query heads that share a key head."""
        first_mask = causal(self.spans[0].columns, like) if self._first is None else self._first
        masks = [first_mask] if self._after is None else [first_mask, self._after]
        group = self.heads // self.kv_heads
        tall = [mask.repeat(*(1,) * (mask.ndim - 2), group, 1) for mask in masks]
        return tuple(m if m.ndim == 2 else m.repeat_interleave(self.kv_heads, 0) for m in tall)


def attend_prompts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    window: int | None,
    masks: dict[int, Tensor],
) -> Tensor:
    """Return the attention outputs (NP, Tp, heads * D) of NP prompts that are padded on the right.

    q is (NP, heads, Tp, D), k and v (NP, kv_heads, Tp, D); `masks` caches the mask of each window.
    """
    columns, size = q.shape[2:]
    mask = None
    if window is not None and columns > window:
        mask = masks.get(window)
        if mask is None:
            mask = masks[window] = causal(columns, q, window)
    # Causal attention never looks at padding on the right.
    mixed = _attend(q, k, v, mask, None if scale == size**-0.5 else scale)
    return mixed.transpose(1, 2).flatten(2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return the output of torch's attention with grouped heads; it is causal if `mask` is None."""
    group = q.shape[1] // k.shape[1]
    if mask is not None and q.device.type == "cuda" and group > 1:
        # On CUDA, no kernel with a mask supports grouped heads.
        k, v = (part.repeat_interleave(group, 1) for part in (k, v))
    return nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip


def causal(columns: int, like: Tensor, window: int | None = None) -> Tensor:
    """Return the causal mask (columns, columns) of 0 and -inf, limited to `window` if given."""
    never = torch.full((columns, columns), float("-inf"), dtype=like.dtype, device=like.device)
    mask = never.triu(1)
    return mask if window is None else mask.add_(never.tril_(-window))


def after_prefix(
    lengths: Tensor, prefix: int, rest: int, dtype: torch.dtype, window: int | None = None
) -> Tensor:
    """Return the mask, 0 or -inf, of tokens that attend to a prefix and causally to each other.

    `lengths` (B,) are the numbers of tokens of the rows' prefixes, without padding; (1,) if all are
    equal. With Tp = `prefix` and C = `rest` the mask is (B, C, Tp + C), or (C, Tp + C).
    """
    device = lengths.device
    causal_rest = torch.ones(rest, rest, dtype=torch.bool, device=device).tril_()
    in_prefix = torch.arange(prefix, device=device) < lengths[:, None]
    visible = torch.cat(
        [in_prefix[:, None].expand(-1, rest, -1), causal_rest.expand(len(lengths), -1, -1)], dim=-1
    )
    if window is not None and prefix + rest > window:
        rest_positions = lengths[:, None] + torch.arange(rest, device=device)
        prefix_positions = torch.arange(prefix, device=device).expand(len(lengths), -1)
        positions = torch.cat([prefix_positions, rest_positions], dim=1)
        visible &= rest_positions[:, :, None] - positions[:, None] < window
    mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(
        ~visible, float("-inf")
    )
    return mask[0] if len(lengths) == 1 else mask


class ShortAttention(torch.autograd.Function):
    """softmax(scale q k^T + mask) v, with rotary positions on q and k (arXiv:2104.09864)."""

    @staticmethod
    def forward(ctx: Context, joined: Tensor, plan: Attention) -> Tensor:
        """Map concatenated q, k, v (M, (heads + 2 kv_heads) D) to outputs (M, heads * D)."""
        heads, k_stop = plan.heads, plan.heads + plan.kv_heads
        size = plan.spans[0].cos.shape[-1]
        out = joined.new_empty(joined.shape[0], heads * size)
        saved: list[Tensor] = []
        for span, mask in zip(plan.spans, plan.masks, strict=True):
            parts = heads_of(span.rows_of(joined), span)
            q = rotate(parts[:, :heads], span.cos, span.sin)
            q = q.view(span.rows * plan.kv_heads, -1, size)
            shape = (span.rows, plan.kv_heads, mask.shape[-1], size)
            keys, values = joined.new_empty(shape), joined.new_empty(shape)
            prefix_columns = mask.shape[-1] - span.columns
            if prefix_columns and plan.source is not None:
                for buffer, flat in ((keys, saved[1]), (values, saved[2])):
                    prefixes = flat.view(-1, plan.kv_heads, prefix_columns, size)
                    buffer[:, :, :prefix_columns] = prefixes.index_select(0, plan.source)
            rotate(parts[:, heads:k_stop], span.cos, span.sin, out=keys[:, :, prefix_columns:])
            values[:, :, prefix_columns:] = parts[:, k_stop:]
            keys, values = keys.flatten(0, 1), values.flatten(0, 1)
            scores = torch.baddbmm(mask, q, keys.transpose(1, 2), alpha=plan.scale)
            weights = torch.softmax(scores, dim=-1)
            mixed = torch.bmm(weights, values).view(span.rows, heads, span.columns, size)
            heads_of(span.rows_of(out), span).copy_(mixed)
            saved += [q, keys, values, weights]
        ctx.save_for_backward(*saved)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None]:
        """Write the gradients of q, k and v, rotated back, into one tensor."""
        plan: Attention = ctx.plan
        saved = ctx.saved_tensors
        (grad,) = grads
        size = plan.spans[0].cos.shape[-1]
        heads, k_stop = plan.heads, plan.heads + plan.kv_heads
        joined = grad.new_empty(grad.shape[0], (k_stop + plan.kv_heads) * size)
        prefix_grads: tuple[Tensor, Tensor] | None = None
        for i in reversed(range(len(plan.spans))):
            span = plan.spans[i]
            q, keys, values, weights = saved[4 * i : 4 * i + 4]
            d_mixed = heads_of(span.rows_of(grad), span).reshape(q.shape)
            d_values = torch.bmm(weights.transpose(1, 2), d_mixed)
            d_weights = torch.bmm(d_mixed, values.transpose(1, 2))
            d_scores = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            d_q = torch.bmm(d_scores, keys).view(span.rows, heads, span.columns, size)
            d_keys = torch.bmm(d_scores.transpose(1, 2), q)
            d_keys = d_keys.view(span.rows, plan.kv_heads, -1, size)
            d_values = d_values.view_as(d_keys)
            if prefix_grads is not None:
                d_keys, d_values = d_keys.add_(prefix_grads[0]), d_values.add_(prefix_grads[1])
            prefix_columns = keys.shape[1] - span.columns
            if prefix_columns and plan.source is not None:
                # The gradient of a prefix is the sum over its rows.
                zeros = grad.new_zeros(plan.spans[0].rows, plan.kv_heads, prefix_columns, size)
                prefix_grads = (
                    zeros.index_add(0, plan.source, d_keys[:, :, :prefix_columns]),
                    zeros.index_add(0, plan.source, d_values[:, :, :prefix_columns]),
                )
                d_keys, d_values = d_keys[:, :, prefix_columns:], d_values[:, :, prefix_columns:]
            parts = heads_of(span.rows_of(joined), span)
            cos = span.cos * plan.scale
            sin = None if span.sin is None else span.sin * plan.scale
            rotate_back(d_q, cos, sin, out=parts[:, :heads])
            rotate_back(d_keys, cos, sin, out=parts[:, heads:k_stop])
            parts[:, k_stop:].copy_(d_values)
        return joined, None

"""Attention of the learn pass, chosen by length and device; every head of a key serves a group."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor, nn

from evo_grpo.model.forward.prefix import SharedPrefix
from evo_grpo.model.llama.kernels import Rotate, Span
from evo_grpo.model.llama.short_attention import ShortAttention, ShortRows

#: Rows whose queries times keys are at most the square of this are short: see `ShortAttention`.
SHORT = 128


class Attention:
    """Attention of one micro-batch, the same in every layer.

    Args:
        heads: Query heads.
        kv_heads: Key and value heads; query head h reads kv head h * kv_heads // heads.
        spans: Whole rows, or beginnings and then the rest of each row.
        prefix: Where each row begins, with two spans.
        like: Tells the dtype and device.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        spans: tuple[Span, ...],
        prefix: SharedPrefix | None,
        like: Tensor,
    ) -> None:
        """Make the masks that all layers share."""
        self.heads, self.kv_heads, self.spans = heads, kv_heads, spans
        self.source = None if prefix is None else prefix.source
        self._after: Tensor | None = None
        if prefix is not None:
            lengths = prefix.lengths_of_rows(like.device)
            columns = prefix.ids.shape[1], prefix.rest.shape[1]
            self._after = after_prefix(lengths, *columns, like.dtype)
        # What follows a beginning reads the keys of that too.
        keys = accumulate(span.columns for span in spans)
        scores = max(span.columns * seen for span, seen in zip(spans, keys, strict=True))
        fits = like.device.type == "cpu" and scores <= SHORT * SHORT
        self.short = self._plan(like) if fits else None

    def __call__(self, joined: Tensor) -> Tensor:
        """Attend.

        Args:
            joined: (M, (heads + 2 kv_heads) D): q, k and v side by side, before rotation.

        Returns:
            (M, heads * D).
        """
        if self.short is not None:
            return ShortAttention.apply(joined, self.short)
        q, k, v, *rest = Rotate.apply(joined, self.heads, self.kv_heads, self.spans)
        # Rows are padded on the right, which causal attention never looks at.
        mixed = [
            nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
            )
        ]
        if self.source is not None:
            q_then, k_then, v_then = rest
            keys = torch.cat([k.index_select(0, self.source), k_then], dim=2)
            values = torch.cat([v.index_select(0, self.source), v_then], dim=2)
            mixed.append(self._masked(q_then, keys, values))
        flat = [part.transpose(1, 2).flatten(0, 1).flatten(1) for part in mixed]
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def _masked(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = self._after
        assert mask is not None
        if q.device.type == "cuda" and self.heads != self.kv_heads:
            # Of the kernels that take a mask, none there serves groups of heads.
            k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        wide = mask if mask.ndim == 2 else mask[:, None]
        return nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=wide, enable_gqa=self.heads != k.shape[1]
        )

    def _plan(self, like: Tensor) -> ShortRows:
        """Lay the masks out for the query heads of one key head, one below the other."""
        columns = self.spans[0].columns
        never = torch.full((columns, columns), float("-inf"), dtype=like.dtype)
        masks = [never.triu_(1)] if self._after is None else [never.triu_(1), self._after]
        group = self.heads // self.kv_heads
        tall = [mask.repeat(*(1,) * (mask.ndim - 2), group, 1) for mask in masks]
        wide = [m if m.ndim == 2 else m.repeat_interleave(self.kv_heads, 0) for m in tall]
        return ShortRows(self.heads, self.kv_heads, self.spans, tuple(wide), self.source)


def after_prefix(lengths: Tensor, prefix: int, rest: int, dtype: torch.dtype) -> Tensor:
    """Return the mask of tokens that follow a prefix: all of that, and causally themselves.

    Args:
        lengths: (B,) real lengths of the rows' prefixes, or (1,) for one length of all.
        prefix: P, columns of the prefixes.
        rest: C, columns that follow.
        dtype: Of the mask.

    Returns:
        (C, P + C) for one length, else (B, C, P + C); 0 or -inf.
    """
    device = lengths.device
    own = torch.ones(rest, rest, dtype=torch.bool, device=device).tril_()
    before = torch.arange(prefix, device=device) < lengths[:, None]
    seen = torch.cat(
        [before[:, None].expand(-1, rest, -1), own.expand(len(lengths), -1, -1)], dim=-1
    )
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
    return mask[0] if len(lengths) == 1 else mask

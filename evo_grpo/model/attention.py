"""Attention of the learn pass, chosen by length and device; every head of a key serves a group."""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: Queries and keys up to here attend by two batched matmuls and a softmax on the CPU, which for
#: them are faster than the blocked kernel; the scores they keep grow with the square.
SHORT = 128


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Mix values by softmax(q k / sqrt(D) + mask).

    Args:
        q: (B, heads, T, D).
        k: (B, kv, S, D); head h reads kv head h * kv // heads.
        v: (B, kv, S, D).
        mask: What is added to the scores: (T, S) for all rows or (B, T, S); None for causal
            attention with T = S, by a kernel that needs no mask.

    Returns:
        (B, heads, T, D).
    """
    rows, heads, columns, size = q.shape
    kv = k.shape[1]
    if mask is None:
        # Rows are padded on the right, which causal attention never looks at.
        return nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=heads != kv
        )
    if q.device.type == "cpu" and columns * k.shape[2] <= SHORT * SHORT:
        # The query heads of one key head stand one below the other.
        tall = q.reshape(rows * kv, -1, size)
        added = mask.repeat(*(1,) * (mask.ndim - 2), heads // kv, 1)
        if mask.ndim == 3:
            added = added.repeat_interleave(kv, 0)
        keys = k.flatten(0, 1).transpose(1, 2)
        scores = torch.baddbmm(added, tall, keys, alpha=size**-0.5)
        return torch.bmm(torch.softmax(scores, dim=-1), v.flatten(0, 1)).view(q.shape)
    if q.device.type == "cuda" and heads != kv:
        # Of the kernels that take a mask, none there serves groups of heads.
        k, v = (part.repeat_interleave(heads // kv, 1) for part in (k, v))
    wide = mask if mask.ndim == 2 else mask[:, None]
    return nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=wide, enable_gqa=heads != k.shape[1]
    )


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

"""Attention of one row by the plain formula, with rotary positions."""

import torch

SIZE = 8


def table(columns, start=0):
    angles = (start + torch.arange(columns))[:, None] * 100.0 ** -(torch.arange(4) / 4)
    cos, sin = (f(angles).repeat(1, 2) for f in (torch.cos, torch.sin))
    return cos, torch.cat([-sin[:, :4], sin[:, 4:]], dim=-1)


def turned(x, start):
    cos, sin = table(x.shape[0], start)
    return x * cos + torch.cat([x[..., 4:], x[..., :4]], dim=-1) * sin


def one_row(tokens, heads, kv_heads):
    """Causal attention of one row (T, all heads * D), head by head."""
    columns = tokens.shape[0]
    q, k, v = tokens.view(columns, -1, SIZE).split((heads, kv_heads, kv_heads), dim=1)
    out = []
    for head in range(heads):
        key = head * kv_heads // heads
        scores = turned(q[:, head], 0) @ turned(k[:, key], 0).t() / SIZE**0.5
        hidden = torch.ones(columns, columns, dtype=torch.bool).triu(1)
        out.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, key])
    return torch.cat(out, dim=-1)

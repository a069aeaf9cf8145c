"""Attention in one function against the plain formula, values and gradients."""

import pytest
import tiny
import torch

from evo_grpo.model.forward.prefix import SharedPrefix
from evo_grpo.model.forward.stacks import make_chunks
from evo_grpo.model.llama.attention import Attention, ShortAttention, after_prefix
from evo_grpo.model.llama.functions import Span

CPU, SIZE = torch.device("cpu"), 8


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


def gradients(function, joined):
    own = joined.clone().requires_grad_()
    out = function(own)
    (out * tiny.noise(out.shape, 9)).sum().backward()
    return out.detach(), own.grad


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (4, 1)])
def test_whole_rows(heads, kv_heads):
    rows, columns = 3, 7
    span = Span(0, rows, columns, make_chunks((rows,), columns, 0, CPU), *table(columns))
    joined = tiny.noise((rows * columns, (heads + 2 * kv_heads) * SIZE), 1)
    attention = Attention(heads, kv_heads, (span,), None, joined)

    def plain(x):
        return torch.cat([one_row(row, heads, kv_heads) for row in x.split(columns)])

    for fast, slow in zip(gradients(attention, joined), gradients(plain, joined), strict=True):
        torch.testing.assert_close(fast, slow, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3)])
@pytest.mark.parametrize("lengths", [(5, 5), (2, 5)], ids=["alike", "ragged"])
def test_rows_that_go_on_from_shared_beginnings(heads, kv_heads, lengths):
    source, before, after = (0, 0, 0, 1, 1), 5, 4
    ids = torch.zeros(2, before, dtype=torch.long)
    rest = torch.zeros(len(source), after, dtype=torch.long)
    where = torch.tensor(source)
    prefix = SharedPrefix(ids, lengths, (2,), where, rest, torch.tensor(lengths)[where], where)
    starts = [lengths[s] for s in source]
    tables = [torch.stack(t)[:, None] for t in zip(*(table(after, s) for s in starts), strict=True)]
    spans = (
        Span(0, 2, before, make_chunks((2,), before, 0, CPU), *table(before)),
        Span(2 * before, len(source), after, make_chunks((5,), after, 0, CPU), *tables),
    )
    joined = tiny.noise((spans[1].stop, (heads + 2 * kv_heads) * SIZE), 2)
    attention = Attention(heads, kv_heads, spans, prefix, joined)

    def plain(x):
        beginnings, rests = x[: 2 * before].split(before), x[2 * before :].split(after)
        first = [one_row(row, heads, kv_heads) for row in beginnings]
        then = [
            one_row(torch.cat([beginnings[s][:start], row]), heads, kv_heads)[start:]
            for s, start, row in zip(source, starts, rests, strict=True)
        ]
        return torch.cat([*first, *then])

    for fast, slow in zip(gradients(attention, joined), gradients(plain, joined), strict=True):
        torch.testing.assert_close(fast, slow, atol=2e-6, rtol=2e-6)


def test_finite_differences():
    span = Span(0, 2, 3, make_chunks((2,), 3, 0, CPU), *(t.double() for t in table(3)))
    joined = tiny.noise((6, 4 * SIZE), 3).double().requires_grad_()
    plan = Attention(2, 1, (span,), None, joined)
    assert plan.masks
    assert torch.autograd.gradcheck(lambda x: ShortAttention.apply(x, plan), (joined,))


def test_what_follows_a_prefix_sees_it_and_its_own_past():
    mask = after_prefix(torch.tensor([1, 2]), 2, 2, torch.float32)
    seen = (mask == 0).int().tolist()
    assert seen == [[[1, 0, 1, 0], [1, 0, 1, 1]], [[1, 1, 1, 0], [1, 1, 1, 1]]]

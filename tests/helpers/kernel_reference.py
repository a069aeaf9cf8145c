"""What the kernels compute, by torch on any device: the reference of their tests and benches.

Numbers are those of `kernels`, with sums in fp32 (float64 for float64). The functions have the
arguments of the operators.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from evo_grpo.model.llama.cuda import operators
from evo_grpo.model.llama.cuda.operators import drawn_block, padded


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _normed(y: Tensor, weight: Tensor, eps: float) -> Tensor:
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * _wide(weight)


def _added(
    y: Tensor, low: Tensor, b: Tensor, entries: Tensor, rows: list[tuple[int, int, int]]
) -> None:
    """Add low·B of some rows' own agents to y (B, size); `rows` are (first, count, agent)."""
    size = y.shape[1]
    for first, count, agent in rows:
        start, rank, offset = entries[agent].tolist()
        own = b[offset : offset + rank * padded(size)].view(rank, padded(size))[:, :size]
        part = slice(first, first + count)
        y[part] += _wide(low[part, start : start + rank]) @ _wide(own)


def embed_norm(
    tokens: Tensor, table: Tensor, weight: Tensor, factor: float, eps: float
) -> tuple[Tensor, Tensor]:
    """See `kernels.embed_norm`."""
    x = (_wide(table[tokens]) * factor).to(table.dtype)
    return x, _normed(_wide(x), weight, eps).to(table.dtype)


def qkv(
    z: Tensor, low: Tensor, b: Tensor, adapters: Tensor, rank: int, bias: Tensor | None,
    tiles: Tensor, positions: Tensor, cos: Tensor | None, sin: Tensor | None,
    q_norm: Tensor | None, k_norm: Tensor | None, q_eps: float, k_eps: float,
    q: Tensor, keys: Tensor, values: Tensor,
) -> None:  # fmt: skip
    """See `kernels.qkv`."""
    (rows, heads, size), kv = q.shape, keys.shape[1]
    parts = list(
        _wide(z[:, : (heads + 2 * kv) * size])
        .clone()
        .split([heads * size, kv * size, kv * size], 1)
    )
    for number, part in enumerate(parts):
        if rank:
            _added(part, low, b, adapters[:, number], tiles.tolist())
    y = torch.cat(parts, 1)
    if bias is not None:
        y += _wide(bias)
    turned = list(y.view(rows, -1, size).split([heads, kv, kv], 1))
    for i, (norm, eps) in enumerate(((q_norm, q_eps), (k_norm, k_eps))):
        if norm is not None:
            turned[i] = _normed(turned[i], norm, eps)
        if cos is not None and sin is not None:
            c, s = (_wide(table[positions])[:, None] for table in (cos, sin))
            one, two = turned[i].chunk(2, -1)
            turned[i] = torch.cat([one * c - two * s, two * c + one * s], -1)
    q.copy_(turned[0])
    if keys.ndim == 3:
        keys.copy_(turned[1])
        values.copy_(turned[2])
        return
    every = torch.arange(rows, device=z.device) // (rows // len(keys))
    keys[every, :, positions] = turned[1].to(keys.dtype)
    values[every, :, positions] = turned[2].to(values.dtype)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, window: int
) -> Tensor:
    """See `kernels.attend`."""
    return join_splits(*attend_splits(q, keys, values, positions, scale, window), q)


def attend_splits(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """See `kernels.attend`; one split of all columns."""
    rows, heads, size = q.shape
    group = heads // keys.shape[1]
    mixed, sums = (_wide(q).new_zeros(rows, heads, 1, width) for width in (size, 2))
    for row, last in enumerate(positions.tolist()):
        seen = slice(max(0, last + 1 - window) if window else 0, last + 1)
        k, v = (_wide(part[row, :, seen]).repeat_interleave(group, 0) for part in (keys, values))
        scores = torch.einsum("hd,hcd->hc", _wide(q[row]), k) * scale
        weights = torch.softmax(scores, -1)
        mixed[row, :, 0] = torch.einsum("hc,hcd->hd", weights, v)
        sums[row, :, 0, 0] = scores.logsumexp(-1) / math.log(2)
        sums[row, :, 0, 1] = 1.0
    return mixed, sums


def join_splits(mixed: Tensor, sums: Tensor, q: Tensor) -> Tensor:
    """See `kernels.join_splits`."""
    weights = torch.exp2(sums[..., :1] - sums[..., :1].amax(2, keepdim=True))
    return ((mixed * weights).sum(2) / (sums[..., 1:] * weights).sum(2)).to(q.dtype).flatten(1)


def add_norm(
    z: Tensor, low: Tensor, b: Tensor, adapters: Tensor, rank: int, bias: Tensor | None,
    owners: Tensor, x: Tensor, post: Tensor | None, post_eps: float, weight: Tensor, eps: float,
    factor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `kernels.add_norm`."""
    y = _wide(z[:, : x.shape[1]]).clone()
    if rank:
        rows = [(row, 1, agent) for row, agent in enumerate(owners.tolist())]
        _added(y, low, b, adapters[:, 0], rows)
    if bias is not None:
        y += _wide(bias)
    if post is not None:
        y = _normed(y, post, post_eps)
    out = (_wide(x) + y * factor).to(x.dtype)
    return out, _normed(_wide(out), weight, eps).to(x.dtype)


def gate_up(
    z: Tensor, low: Tensor, b: Tensor, adapters: Tensor, rank: int, bias: Tensor | None,
    tiles: Tensor, size: int, gelu: bool,
) -> Tensor:  # fmt: skip
    """See `kernels.gate_up`."""
    parts = [part.clone() for part in _wide(z[:, : 2 * size]).split(size, 1)]
    for number, part in enumerate(parts):
        if rank:
            _added(part, low, b, adapters[:, number], tiles.tolist())
        if bias is not None:
            part += _wide(bias[number * size : (number + 1) * size])
    gate, up = parts
    gate = (
        torch.nn.functional.gelu(gate, approximate="tanh")
        if gelu
        else torch.nn.functional.silu(gate)
    )
    return (gate * up).to(z.dtype)


def scaled(logits: Tensor, temperature: Tensor, scale: float, cap: float) -> Tensor:
    """Return logits (B, V) divided by the temperatures, as tokens are drawn from."""
    z = _wide(logits) * scale
    z = cap * torch.tanh(z / cap) if cap else z
    return z / temperature[:, None]


def _forbids(drawn: Tensor, minimum: Tensor | None) -> Tensor:
    return torch.zeros_like(drawn, dtype=torch.bool) if minimum is None else drawn < minimum


def weigh_blocks(
    logits: Tensor, temperature: Tensor, drawn: Tensor, minimum: Tensor | None, ends: Tensor,
    scale: float, cap: float,
) -> Tensor:  # fmt: skip
    """See `kernels.weigh_blocks`."""
    z = scaled(logits, temperature, scale, cap)
    allowed = z.masked_fill(_forbids(drawn, minimum)[:, None] & ends, float("-inf"))
    found: list[Tensor] = []
    block = drawn_block(z.shape[1])
    for part in (z, allowed):
        blocks = torch.nn.functional.pad(part, (0, -part.shape[1] % block), value=float("-inf"))
        blocks = blocks.unflatten(1, (-1, block))
        top = blocks.amax(-1)
        safe = top.masked_fill(top == float("-inf"), 0.0)
        found += [top, (blocks - safe[..., None]).exp().sum(-1)]
    return torch.stack(found, -1).float()


def draw_token(
    logits: Tensor, weighed: Tensor, temperature: Tensor, greedy: Tensor | None, draws: Tensor,
    minimum: Tensor | None, limit: Tensor, ends: Tensor, origin: Tensor, scale: float, cap: float,
    drawn: Tensor, finished: Tensor, tokens: Tensor, out_tokens: Tensor, out_logprobs: Tensor,
) -> None:  # fmt: skip
    """See `kernels.draw_token`; draws from cumulative sums of the whole vocabulary."""
    del weighed
    z = scaled(logits, temperature, scale, cap)
    forbids = _forbids(drawn, minimum)
    allowed = z.masked_fill(forbids[:, None] & ends, float("-inf"))
    weights = (allowed - allowed.amax(-1, keepdim=True)).exp().double()
    sums = weights.cumsum(-1)
    uniform = draws.gather(0, drawn[None])[0].clamp(max=1 - 2**-24)
    token = torch.searchsorted(sums, (uniform * sums[:, -1])[:, None], right=True)[:, 0]
    index = torch.arange(z.shape[1], device=z.device)
    last = torch.where(weights > 0, index, 0).amax(-1)
    token = torch.minimum(token, last)
    if greedy is not None:
        token = torch.where(greedy, allowed.argmax(-1), token)
    logprob = torch.log_softmax(z, -1).gather(1, token[:, None])[:, 0]
    place = drawn * out_tokens.shape[1] + origin
    out_tokens.view(-1)[place] = torch.where(finished, -1, token)
    out_logprobs.view(-1)[place] = logprob.float()
    finished |= (ends[token] & ~forbids) | (limit <= drawn + 1)
    tokens.copy_(token)
    drawn.add_(1).clamp_(max=len(draws) - 1)


def head_slopes(
    targets: Tensor, inverse: Tensor, slopes: int, logits: Tensor, above: Tensor, out: Tensor
) -> None:
    """See `kernels.head_slopes`."""
    z = _wide(logits) * inverse[:, None]
    table, place = torch.log_softmax(z, -1), targets[:, None]
    others = z.scatter(1, place, float("-inf"))
    top = others.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    whole = torch.logsumexp(z, -1, keepdim=True)
    entropy = torch.special.entr(table.exp()).sum(-1)
    bound = 1.0 + entropy.abs() + (whole - top)[:, 0].clamp(0.0, 200.0)
    share = (top - whole).exp()[:, 0]
    out.copy_(torch.stack([table.gather(1, place)[:, 0], entropy, share, bound], -1))
    if slopes:
        e = (others - top).exp()
        logits.copy_(e)
        if slopes > 1:
            above.copy_(e * (table.clamp(min=-200.0) + entropy[:, None]) / bound[:, None])


def _tokens(tiles: Tensor) -> list[tuple[slice, int]]:
    return [(slice(at, at + count), agent) for at, count, agent in tiles.tolist()]


def project(x: Tensor, matrix: Tensor, scale: Tensor, tiles: Tensor) -> Tensor:
    """See `learn_kernels.project`."""
    out = x.new_empty(len(x), matrix.shape[1])
    for own, agent in _tokens(tiles):
        out[own] = (_wide(x[own]) @ _wide(matrix[agent]).t() * scale[agent]).to(x.dtype)
    return out


def add_low(low: Tensor, matrix: Tensor, tiles: Tensor, y: Tensor) -> None:
    """See `learn_kernels.add_low`."""
    for own, agent in _tokens(tiles):
        y[own] = (_wide(y[own]) + _wide(low[own]) @ _wide(matrix[agent])).to(y.dtype)


def outer(
    d_low: Tensor, x: Tensor, low: Tensor, grad: Tensor, tiles: Tensor, firsts: Tensor,
    offset: int, out: Tensor,
) -> None:  # fmt: skip
    """See `learn_kernels.outer`."""
    rank, splits = low.shape[1], len(out)
    starts = firsts.tolist()
    for left, right in ((d_low, x), (low, grad)):
        shape = splits, len(starts) - 1, rank, right.shape[1]
        own = out[:, offset : offset + shape[1] * rank * shape[3]].view(shape)
        own.zero_()
        offset += own[0].numel()
        for number, (part, agent) in enumerate(_tokens(tiles)):
            split = (number - starts[agent]) % splits
            own[split, agent] += (_wide(left[part]).t() @ _wide(right[part])).to(own.dtype)


def norm_backward(
    more: Tensor | None, grad: Tensor, x: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """See `learn_kernels.norm_backward`."""
    y = _norm_gradient(_wide(grad), _wide(x), weight, eps)
    return (y if more is None else y + _wide(more)).to(x.dtype)


def _norm_gradient(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the gradient of x; autograd does not run inside of an operator."""
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    grad = grad * _wide(weight)
    return inverse * (grad - x * inverse.square() * (grad * x).mean(-1, keepdim=True))


def glu_backward(gelu: bool, both: Tensor, grad: Tensor) -> None:
    """See `learn_kernels.glu_backward`."""
    gate, up = _wide(both).clone().chunk(2, 1)
    slopes, g = torch.ops.aten, _wide(grad).clone()
    if gelu:
        active = torch.nn.functional.gelu(gate, approximate="tanh")
        d_gate = slopes.gelu_backward(g * up, gate, approximate="tanh")
    else:
        active, d_gate = torch.nn.functional.silu(gate), slopes.silu_backward(g * up, gate)
    both.copy_(torch.cat([d_gate, g * active], 1))
    grad.copy_(active * up)


def qkv_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, more: list[Tensor], places: Tensor | None,
    joined: Tensor | None, positions: Tensor, cos: Tensor | None, sin: Tensor | None,
    q_norm: Tensor | None, k_norm: Tensor | None, q_eps: float, k_eps: float,
) -> Tensor:  # fmt: skip
    """See `learn_kernels.qkv_backward`."""
    heads, kv = dq.shape[1], dk.shape[1]
    whole = [_wide(part).clone() for part in (dq, dk, dv)]
    if places is not None:
        whole[0][len(places) :] += _wide(more[0])
        real = places >= 0
        for own, part in zip(whole[1:], more[1:], strict=True):
            own[: len(places)][real] += _wide(part)[places[real]]
    norms = (q_norm, q_eps), (k_norm, k_eps)
    given = None if joined is None else _wide(joined).view(len(dq), -1, dq.shape[2])
    before = [None] * 2 if given is None else given.split([heads, kv, kv], 1)
    for i, (weight, eps) in enumerate(norms):
        if cos is not None and sin is not None:
            c, s = _wide(cos[positions])[:, None], _wide(sin[positions])[:, None]
            one, two = whole[i].chunk(2, -1)
            whole[i] = torch.cat([one * c + two * s, two * c - one * s], -1)
        if weight is not None:
            whole[i] = _norm_gradient(whole[i], before[i], weight, eps)
    return torch.cat(whole, 1).flatten(1).to(dq.dtype)


def join_parts(more: Tensor, out: Tensor, sums: Tensor, more_sums: Tensor) -> None:
    """See `learn_kernels.join_parts`."""
    start = len(out) - len(more)
    whole = torch.logaddexp(sums[:, start:], more_sums)
    first, second = (torch.exp(x - whole).t()[..., None] for x in (sums[:, start:], more_sums))
    out[start:] = (_wide(out[start:]) * first + _wide(more) * second).to(out.dtype)
    sums[:, start:] = whole
    more_sums.copy_(whole)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, longest_query: int,
    longest_key: int, causal: bool, scale: float, window: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See `attention.flash_forward`; by torch's kernel for a CPU."""
    out, sums = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    for own, seen in _segments(queries, keys):
        mixed, sum_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_dense(q[own], k[seen], v[seen]), 0.0, causal and not window, scale=scale,
            attn_mask=_mask(q[own], k[seen], window),
        )  # fmt: skip
        out[own], sums[:, own] = mixed[0].transpose(0, 1), sum_[0]
    return out, sums, q.new_empty(0), q.new_empty(0)


def flash_backward(
    grad: Tensor, out: Tensor, sums: Tensor, state: Tensor, unused: Tensor, q: Tensor, k: Tensor,
    v: Tensor, queries: Tensor, keys: Tensor, longest_query: int, longest_key: int, causal: bool,
    scale: float, window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `attention.flash_backward`."""
    made = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for own, seen in _segments(queries, keys):
        dq, *rest = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _heads_first(grad[own]), *_dense(q[own], k[seen], v[seen]), _heads_first(out[own]),
            sums[:, own][None].contiguous(), 0.0, causal and not window, scale=scale,
            attn_mask=_mask(q[own], k[seen], window),
        )  # fmt: skip
        made[0][own] = dq[0].transpose(0, 1)
        for whole, part in zip(made[1:], rest, strict=True):
            whole[seen] = part[0].unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1)
    return made


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


#: Attention of torch's own on a card, which Triton does not interpret.
FLASH = "flash_forward", "flash_backward"


def _of_dense(call):
    """The same, given what its kernel takes: tensors without gaps."""

    def checked(*given):
        for x in given:
            for part in x if isinstance(x, list) else [x]:
                assert not isinstance(part, Tensor) or part.is_contiguous(), call.__name__
        return call(*given)

    return checked


@contextmanager
def instead(*names):
    """Let the operators, or those of some names, compute by torch what they launch kernels for."""
    launches = operators.LAUNCHES
    before = dict(launches)
    dense = {project, add_low, outer, norm_backward, glu_backward, qkv_backward, join_parts}
    known = {name: own for name in names or launches if (own := globals().get(name))}
    launches.update({n: _of_dense(own) if own in dense else own for n, own in known.items()})
    try:
        yield
    finally:
        launches.update(before)

"""The Triton kernels that only the learn pass needs; `operators` launches them.

A tile is up to ROWS tokens of one agent; the table `tiles` has its first token, its number of
tokens and its agent. A joined layer has the matrices A (N, R, in) and B (N, R, out) of N agents.
The low columns `low` (M, R) are x A^T of each token's agent, scaled. No program reads numbers of
another agent. Sums are in fp32, in a fixed order.
"""

# pyright: basic, reportMissingImports=false

import triton
import triton.language as tl

from evo_grpo.model.llama.cuda.kernels import _halves, _store_halves


@triton.jit
def _tile(tiles, number, ROWS: tl.constexpr):
    """Return a tile's token indices, a mask of those that exist, and its agent."""
    at = tl.arange(0, ROWS)
    rows = tl.load(tiles + 3 * number) + at
    return rows, at < tl.load(tiles + 3 * number + 1), tl.load(tiles + 3 * number + 2)


@triton.jit
def _dot(left, right, y, EXACT: tl.constexpr):
    if EXACT:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, y, input_precision="ieee")


@triton.jit
def project(
    x, matrix, scale, tiles, out,
    R: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
    BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Write the scaled products of a tile of x (M, SIZE) with some rows of its agent's matrix."""
    rows, present, agent = _tile(tiles, tl.program_id(0), ROWS)
    r = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    agent_matrix = matrix + (agent * R + r[:, None]) * SIZE
    y = tl.zeros([ROWS, RANKS], tl.float32)
    for first_column in range(0, SIZE, BLOCK):
        c = first_column + tl.arange(0, BLOCK)
        inside = (c < SIZE)[None, :]
        left = tl.load(x + rows[:, None] * SIZE + c[None, :], present[:, None] & inside, 0.0)
        right = tl.load(agent_matrix + c[None, :], (r < R)[:, None] & inside, 0.0)
        y = _dot(left, tl.trans(right), y, EXACT)
    y *= tl.load(scale + agent * R + r, r < R, 0.0)[None, :]
    full = present[:, None] & (r < R)[None, :]
    tl.store(out + rows[:, None] * R + r[None, :], y.to(out.dtype.element_ty), full)


@triton.jit
def add_low(
    low, matrix, tiles, y,
    R: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
    BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add a tile's low columns times its agent's matrix to some columns of y (M, SIZE)."""
    rows, present, agent = _tile(tiles, tl.program_id(0), ROWS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (c < SIZE)[None, :]
    pointers = y + rows[:, None] * SIZE + c[None, :]
    total = tl.load(pointers, present[:, None] & inside, 0.0).to(tl.float32)
    for first_rank in tl.static_range(0, R, RANKS):
        r = first_rank + tl.arange(0, RANKS)
        real = (r < R)[None, :]
        left = tl.load(low + rows[:, None] * R + r[None, :], present[:, None] & real, 0.0)
        right = tl.load(
            matrix + (agent * R + r[:, None]) * SIZE + c[None, :], (r < R)[:, None] & inside, 0.0
        )
        total = _dot(left, right, total, EXACT)
    tl.store(pointers, total.to(y.dtype.element_ty), present[:, None] & inside)


@triton.jit
def _outer(
    left, right, tiles, first, last, r, c, out, agent,
    R: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Write a block of left^T right, summed over every SPLITS-th tile of an agent."""
    total = tl.zeros([RANKS, BLOCK], tl.float32)
    inside = (c < SIZE)[None, :]
    for tile in range(first + tl.program_id(2), last, SPLITS):
        rows, present, _ = _tile(tiles, tile, ROWS)
        left_tile = tl.load(
            left + rows[:, None] * R + r[None, :], present[:, None] & (r < R)[None, :], 0.0
        )
        right_tile = tl.load(
            right + rows[:, None] * SIZE + c[None, :], present[:, None] & inside, 0.0
        )
        total = _dot(tl.trans(left_tile), right_tile, total, EXACT)
    tl.store(out + (agent * R + r[:, None]) * SIZE + c[None, :], total, (r < R)[:, None] & inside)


@triton.jit
def outer(
    d_low, x, low, grad, tiles, firsts, out, stride, offset_a, offset_b,
    R: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Write one split of a block of a gradient: d_low^T x for A, or low^T grad for B."""
    chunks: tl.constexpr = (R + RANKS - 1) // RANKS
    agent = tl.program_id(0).to(tl.int64) // chunks
    r = tl.program_id(0) % chunks * RANKS + tl.arange(0, RANKS)
    first, stop = tl.load(firsts + agent).to(tl.int32), tl.load(firsts + agent + 1).to(tl.int32)
    blocks: tl.constexpr = (IN + BLOCK - 1) // BLOCK
    split_out = out + tl.program_id(2).to(tl.int64) * stride
    if tl.program_id(1) < blocks:
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        _outer(
            d_low, x, tiles, first, stop, r, c, split_out + offset_a, agent, R, IN, SPLITS,
            ROWS, RANKS, BLOCK, EXACT,
        )  # fmt: skip
    else:
        c = (tl.program_id(1) - blocks) * BLOCK + tl.arange(0, BLOCK)
        _outer(
            low, grad, tiles, first, stop, r, c, split_out + offset_b, agent, R, OUT, SPLITS,
            ROWS, RANKS, BLOCK, EXACT,
        )  # fmt: skip


@triton.jit
def norm_backward(
    more, grad, x, weight, out, eps, H: tl.constexpr, COLUMNS: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a row of x, plus `more`; `grad` is the normalized row's gradient."""
    c = tl.arange(0, COLUMNS)
    offsets, inside = tl.program_id(0).to(tl.int64) * H + c, c < H
    g = tl.load(grad + offsets, inside, 0.0).to(tl.float32)
    g *= tl.load(weight + c, inside, 0.0).to(tl.float32)
    x_row = tl.load(x + offsets, inside, 0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x_row * x_row, 0) / H + eps)
    y = inverse * (g - x_row * (inverse * inverse * tl.sum(g * x_row, 0) / H))
    if MORE:
        y += tl.load(more + offsets, inside, 0.0).to(tl.float32)
    tl.store(out + offsets, y.to(out.dtype.element_ty), inside)


@triton.jit
def glu_backward(both, grad, SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """Overwrite gate and up with their gradients, and `grad` with the output of the GLU."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < SIZE
    gates, grads = both + row * 2 * SIZE + c, grad + row * SIZE + c
    gate = tl.load(gates, inside, 0.0).to(tl.float32)
    up = tl.load(gates + SIZE, inside, 0.0).to(tl.float32)
    g = tl.load(grads, inside, 0.0).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        share = tl.sigmoid(2.0 * inner)
        slope = 2.0 * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * gate * gate)
    else:
        share = tl.sigmoid(gate)
        slope = 1.0
    slope = share + gate * share * (1.0 - share) * slope
    kind = both.dtype.element_ty
    tl.store(gates, (g * up * slope).to(kind), inside)
    tl.store(gates + SIZE, (g * gate * share).to(kind), inside)
    tl.store(grads, (gate * share * up).to(kind), inside)


@triton.jit
def _add_halves(one, two, pointers, half, full):
    """Add the numbers at pointers to both halves of a head's features."""
    one += tl.load(pointers, full, 0.0).to(tl.float32)
    return one, two + tl.load(pointers + half, full, 0.0).to(tl.float32)


@triton.jit
def qkv_backward(
    dq, dk, dv, more_q, more_k, more_v, places, start, joined, positions, cos, sin, q_norm, k_norm,
    out, tokens, q_eps, k_eps,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, TURN: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one head of 16 tokens of concatenated q, k and v.

    With MORE, `more_q` is added at tokens from `start` on. At earlier tokens, the rows `places` of
    `more_k` and `more_v` are added, except where `places` is negative.
    """
    head = tl.program_id(1)
    rows = tl.program_id(0).to(tl.int64) * 16 + tl.arange(0, 16)
    i = tl.arange(0, HALF)
    half: tl.constexpr = D // 2
    present = rows < tokens
    inside = (i < half)[None, :]
    full = present[:, None] & inside
    if head < HEADS:
        base, more_base = dq + (rows * HEADS + head) * D, more_q
        more_index, has_more = (rows - start) * HEADS + head, rows >= start
    else:
        kv_head = tl.where(head < HEADS + KV, head - HEADS, head - HEADS - KV)
        at = rows * 0
        if MORE:
            at = tl.load(places + rows, present & (rows < start), -1)
        more_index, has_more = at * KV + kv_head, (rows < start) & (at >= 0)
        if head < HEADS + KV:
            base, more_base = dk + (rows * KV + kv_head) * D, more_k
        else:
            base, more_base = dv + (rows * KV + kv_head) * D, more_v
    g1, g2 = tl.zeros([16, HALF], tl.float32), tl.zeros([16, HALF], tl.float32)
    g1, g2 = _add_halves(g1, g2, base[:, None] + i[None, :], half, full)
    if MORE:
        place = more_base + more_index[:, None] * D + i[None, :]
        g1, g2 = _add_halves(g1, g2, place, half, full & has_more[:, None])
    width: tl.constexpr = (HEADS + 2 * KV) * D
    place = rows[:, None] * width + head * D + i[None, :]
    if TURN:
        if head < HEADS + KV:
            angle = tl.load(positions + rows, present, 0)[:, None] * half + i[None, :]
            c = tl.load(cos + angle, full, 0.0).to(tl.float32)
            s = tl.load(sin + angle, full, 0.0).to(tl.float32)
            g1, g2 = g1 * c + g2 * s, g2 * c - g1 * s
    if NORM:
        if head < HEADS + KV:
            of_q, of_k = _halves(q_norm, i, half), _halves(k_norm, i, half)
            g1 *= tl.where(head < HEADS, of_q[0], of_k[0])[None, :]
            g2 *= tl.where(head < HEADS, of_q[1], of_k[1])[None, :]
            x1 = tl.load(joined + place, full, 0.0).to(tl.float32)
            x2 = tl.load(joined + place + half, full, 0.0).to(tl.float32)
            square = (tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D
            inverse = tl.rsqrt(square + tl.where(head < HEADS, q_eps, k_eps))
            along = (tl.sum(g1 * x1, 1) + tl.sum(g2 * x2, 1)) / D * inverse * inverse
            g1 = (g1 - x1 * along[:, None]) * inverse[:, None]
            g2 = (g2 - x2 * along[:, None]) * inverse[:, None]
    _store_halves(out + place, g1, g2, half, full)


@triton.jit
def join_parts(
    more, out, sums, more_sums, start, rows,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Join the two parts of the attention of 16 tokens, from `start` on, for one head.

    `out` (M, HEADS, D) and the log-sum-exps `sums`, `more_sums` (HEADS, M) are overwritten.
    """
    at, d = tl.program_id(0).to(tl.int64) * 16 + tl.arange(0, 16), tl.arange(0, WIDTH)
    head = tl.program_id(1)
    present = at < rows
    full = present[:, None] & (d < D)[None, :]
    sums_at, more_at = sums + head * (start + rows) + start + at, more_sums + head * rows + at
    own_sum, more_sum = tl.load(sums_at, present, 0.0), tl.load(more_at, present, 0.0)
    top = tl.maximum(own_sum, more_sum)
    joined_sum = top + tl.log(tl.exp(own_sum - top) + tl.exp(more_sum - top))
    pointers = out + ((start + at)[:, None] * HEADS + head) * D + d[None, :]
    y = tl.load(pointers, full, 0.0).to(tl.float32)
    z = tl.load(more + (at[:, None] * HEADS + head) * D + d[None, :], full, 0.0).to(tl.float32)
    y = y * tl.exp(own_sum - joined_sum)[:, None] + z * tl.exp(more_sum - joined_sum)[:, None]
    tl.store(pointers, y.to(out.dtype.element_ty), full)
    tl.store(sums_at, joined_sum, present)
    tl.store(more_at, joined_sum, present)

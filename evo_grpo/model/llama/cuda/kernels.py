"""The Triton kernels of a forward pass; each is launched by an operator of `operators`.

Rows are sorted by agent. A tile is up to 16 rows of one agent; the table `tiles` has its first row,
its number of rows and its agent. For a joined linear layer, `z` has x W^T, the low columns `low`
have x A^T of all agents, and `b` has the B of all agents. The table `adapters` holds, for each
agent and each part of the joined layer, its first column in `low`, its rank, and where its B (rank,
outputs) begins in `b`; B has rows of a multiple of 16 numbers. No program reads numbers of another
agent, and the result for a row does not depend on neighbouring rows. Sums are in fp32. With
`EXACT`, products are in fp32 too: for fp32 weights, and in the interpreter, which cannot multiply
bf16.
"""

# pyright: basic, reportMissingImports=false

import triton
import triton.language as tl


@triton.jit
def _rounded(value, like):
    """Round fp32 numbers to the dtype to which `like` points; return them in fp32."""
    return value.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _add_product(
    y, low, low_stride, rows, present, entry, b, b_stride, columns, inside,
    RANK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Return y (16, columns) plus the product of a tile's low columns with its agent's B."""
    start, rank = tl.load(entry), tl.load(entry + 1)
    agent_b = b + tl.multiple_of(tl.load(entry + 2), 16)
    for first_rank in tl.static_range(0, RANK, 16):
        r = first_rank + tl.arange(0, 16)
        real = r < rank
        left = tl.load(
            low + rows[:, None] * low_stride + start + r[None, :],
            present[:, None] & real[None, :], 0.0,
        )  # fmt: skip
        right = tl.load(
            agent_b + r[:, None] * b_stride + columns[None, :], real[:, None] & inside[None, :], 0.0
        )
        if EXACT:
            left, right = left.to(tl.float32), right.to(tl.float32)
        y = tl.dot(left, right, y, input_precision="ieee")
    return y


@triton.jit
def embed_norm(
    tokens, table, weight, x, normed, factor, eps,
    H: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the embedding of a row's token to `x`, and the normalized embedding to `normed`."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, COLUMNS)
    inside = c < H
    y = tl.load(table + tl.load(tokens + row) * H + c, inside, 0.0).to(tl.float32)
    y = _rounded(y * factor, x)
    tl.store(x + row * H + c, y.to(x.dtype.element_ty), inside)
    w = tl.load(weight + c, inside, 0.0).to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / H + eps) * w
    tl.store(normed + row * H + c, y.to(normed.dtype.element_ty), inside)


@triton.jit
def _halves(pointer, i, half):
    """Load both halves of a head's features, in fp32."""
    x1 = tl.load(pointer + i, i < half, 0.0).to(tl.float32)
    return x1, tl.load(pointer + half + i, i < half, 0.0).to(tl.float32)


@triton.jit
def _store_halves(pointers, one, two, half, full):
    """Write both halves of a head's features for each row of a tile."""
    kind = pointers.dtype.element_ty
    tl.store(pointers, one.to(kind), full)
    tl.store(pointers + half, two.to(kind), full)


@triton.jit
def qkv(
    z, z_stride, low, low_stride, b, adapters, bias, tiles, positions, cos, sin, q_norm, k_norm,
    q, keys, values, room, columns, q_eps, k_eps,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, RANK: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr, CACHED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Apply adapter, bias, norm and rotary positions to a head of a tile; write q, k or v.

    Each row of the cache receives `columns` tokens: one in a decode step, a whole prompt in a
    prefill. If not CACHED, keys and values are written like q.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    first_row = tl.load(tiles + 3 * tile).to(tl.int64)
    count, agent = tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    at, i = tl.arange(0, 16), tl.arange(0, HALF)
    rows, present = first_row + at, at < count
    half: tl.constexpr = D // 2
    inside = i < half
    full = present[:, None] & inside[None, :]
    part = tl.where(head < HEADS, 0, tl.where(head < HEADS + KV, 1, 2))
    part_head = head - tl.where(part == 0, 0, tl.where(part == 1, HEADS, HEADS + KV))
    pointers = z + rows[:, None] * z_stride + head * D + i[None, :]
    x1 = tl.load(pointers, full, 0.0).to(tl.float32)
    x2 = tl.load(pointers + half, full, 0.0).to(tl.float32)
    if RANK > 0:
        entry = adapters + (agent * 3 + part) * 3
        stride = tl.where(part == 0, (HEADS * D + 15) // 16 * 16, (KV * D + 15) // 16 * 16)
        features = part_head * D + i
        x1 = _add_product(
            x1, low, low_stride, rows, present, entry, b, stride, features, inside, RANK, EXACT
        )
        x2 = _add_product(
            x2, low, low_stride, rows, present, entry, b, stride, features + half, inside, RANK,
            EXACT,
        )  # fmt: skip
    if BIAS:
        biases = _halves(bias + head * D, i, half)
        x1, x2 = x1 + biases[0][None, :], x2 + biases[1][None, :]
    if NORM:
        if part < 2:
            square = (tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D
            factor = tl.rsqrt(square + tl.where(part == 0, q_eps, k_eps))[:, None]
            q_weight, k_weight = _halves(q_norm, i, half), _halves(k_norm, i, half)
            x1 = x1 * factor * tl.where(part == 0, q_weight[0], k_weight[0])[None, :]
            x2 = x2 * factor * tl.where(part == 0, q_weight[1], k_weight[1])[None, :]
    position = tl.load(positions + rows, present, 0)
    if TURN:
        if part < 2:
            angle = position[:, None] * half + i[None, :]
            c = tl.load(cos + angle, full, 0.0).to(tl.float32)
            s = tl.load(sin + angle, full, 0.0).to(tl.float32)
            x1, x2 = x1 * c - x2 * s, x2 * c + x1 * s
    if part == 0:
        _store_halves(q + (rows[:, None] * HEADS + part_head) * D + i[None, :], x1, x2, half, full)
    else:
        target = rows // columns * KV + part_head
        if CACHED:
            target = target * room + position
        target = target[:, None] * D + i[None, :]
        if part == 1:
            _store_halves(keys + target, x1, x2, half, full)
        else:
            _store_halves(values + target, x1, x2, half, full)


@triton.jit
def attend(
    q, keys, values, positions, out, sums, room, scale,
    KV: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Attend to a row's columns up to its position, for the query heads of one key head.

    If SPLIT is not 0, a program attends to SPLIT columns only. It writes the weighted sums of their
    values in fp32 to `out`, and each head's maximum score and sum of weights to `sums`; see
    `join_splits`.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, d, c = tl.arange(0, PADDED), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    position = tl.load(positions + row).to(tl.int32)
    begin, end = 0, position + 1
    if WINDOW > 0:
        begin = tl.maximum(end - WINDOW, 0)
    if SPLIT > 0:
        begin += tl.program_id(2) * SPLIT
        end = tl.minimum(begin + SPLIT, end)
    heads = (row * KV + head) * GROUP + g
    real = (g < GROUP)[:, None] & (d < D)[None, :]
    query = tl.load(q + heads[:, None] * D + d[None, :], real, 0.0)
    if EXACT:
        query = query.to(tl.float32)
    top = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    mixed = tl.zeros([PADDED, WIDTH], tl.float32)
    base = (row * KV + head) * room * D
    to_two = scale * 1.4426950408889634  # exp(x) is 2 ** (x log2(e))
    for at in range(begin, end, BLOCK):
        visible = at + c < end
        offsets = base + (at + c)[:, None] * D + d[None, :]
        full = visible[:, None] & (d < D)[None, :]
        key = tl.load(keys + offsets, full, 0.0)
        value = tl.load(values + offsets, full, 0.0)
        if EXACT:
            key, value = key.to(tl.float32), value.to(tl.float32)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * to_two
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weights, 1)
        mixed = tl.dot(
            weights.to(value.dtype), value, mixed * rescale[:, None], input_precision="ieee"
        )
        top = new_top
    if SPLIT > 0:
        offsets = heads * tl.num_programs(2) + tl.program_id(2)
        tl.store(sums + 2 * offsets, top, g < GROUP)
        tl.store(sums + 2 * offsets + 1, total, g < GROUP)
        tl.store(out + offsets[:, None] * D + d[None, :], mixed, real)
    else:
        mixed = mixed / total[:, None]
        tl.store(out + heads[:, None] * D + d[None, :], mixed.to(out.dtype.element_ty), real)


@triton.jit
def join_splits(
    mixed, sums, out,
    SPLITS: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Join the results of `attend` for all splits of one head of one row."""
    first_split = tl.program_id(0).to(tl.int64) * SPLITS
    n, d = tl.arange(0, PADDED), tl.arange(0, WIDTH)
    top = tl.max(tl.load(sums + 2 * (first_split + n), n < SPLITS, float("-inf")), 0)
    total = 0.0
    y = tl.zeros([WIDTH], tl.float32)
    for i in range(0, SPLITS):
        weight = tl.exp2(tl.load(sums + 2 * (first_split + i)) - top)
        total += tl.load(sums + 2 * (first_split + i) + 1) * weight
        y += tl.load(mixed + (first_split + i) * D + d, d < D, 0.0) * weight
    pointers = out + tl.program_id(0).to(tl.int64) * D + d
    tl.store(pointers, (y / total).to(out.dtype.element_ty), d < D)


@triton.jit
def _add_ranks(
    y, low, b, stride: tl.constexpr, first, rank, inside, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return y (columns,) plus the product of a row's low columns and B, for CHUNK LoRA ranks."""
    r = first + tl.arange(0, CHUNK)
    left = tl.load(low + r, r < rank, 0.0).to(tl.float32)
    right = tl.load(b + r[:, None] * stride, (r < rank)[:, None] & inside[None, :], 0.0)
    return y + tl.sum(left[:, None] * right.to(tl.float32), 0)


@triton.jit
def add_norm(
    z, z_stride, low, low_stride, b, adapters, bias, owners, x, post, weight, out, normed,
    post_eps, eps, factor,
    H: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr,
    BIAS: tl.constexpr, POST: tl.constexpr,
):  # fmt: skip
    """Add adapter and bias to a linear layer's output, add the residual, normalize; for one row."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, COLUMNS)
    inside = c < H
    # Loaded first, since no kernel before this one writes it.
    w = tl.load(weight + c, inside, 0.0).to(tl.float32)
    y = tl.load(z + row * z_stride + c, inside, 0.0).to(tl.float32)
    residual = tl.load(x + row * H + c, inside, 0.0).to(tl.float32)
    if RANK > 0:
        entry = adapters + 3 * tl.load(owners + row)
        start, rank = tl.load(entry), tl.load(entry + 1)
        agent_b = b + tl.multiple_of(tl.load(entry + 2), 16)
        stride: tl.constexpr = (H + 15) // 16 * 16
        b_pointers, low_pointers = agent_b + c[None, :], low + row * low_stride + start
        if RANK <= 16:
            for first_rank in tl.static_range(0, RANK, CHUNK):
                y = _add_ranks(y, low_pointers, b_pointers, stride, first_rank, rank, inside, CHUNK)
        else:
            # Unrolled, so many would need more registers than there are.
            for first_rank in range(0, rank, CHUNK):
                y = _add_ranks(y, low_pointers, b_pointers, stride, first_rank, rank, inside, CHUNK)
    if BIAS:
        y += tl.load(bias + c, inside, 0.0).to(tl.float32)
    if POST:
        post_weight = tl.load(post + c, inside, 0.0).to(tl.float32)
        y = y * tl.rsqrt(tl.sum(y * y, 0) / H + post_eps) * post_weight
    # As the next layers read it: rounded.
    y = _rounded(residual + y * factor, out)
    tl.store(out + row * H + c, y.to(out.dtype.element_ty), inside)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / H + eps) * w
    tl.store(normed + row * H + c, y.to(normed.dtype.element_ty), inside)


@triton.jit
def gate_up(
    z, z_stride, low, low_stride, b, adapters, bias, tiles, out,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, BIAS: tl.constexpr,
    GELU: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add adapter and bias to columns of gate and up, and multiply the activated gate by up."""
    tile = tl.program_id(0)
    first_row = tl.load(tiles + 3 * tile).to(tl.int64)
    count, agent = tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    at = tl.arange(0, 16)
    rows, present = first_row + at, at < count
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < SIZE
    full = present[:, None] & inside[None, :]
    pointers = z + rows[:, None] * z_stride + c[None, :]
    gate = tl.load(pointers, full, 0.0).to(tl.float32)
    up = tl.load(pointers + SIZE, full, 0.0).to(tl.float32)
    if RANK > 0:
        entry = adapters + 6 * agent
        stride: tl.constexpr = (SIZE + 15) // 16 * 16
        gate = _add_product(
            gate, low, low_stride, rows, present, entry, b, stride, c, inside, RANK, EXACT
        )
        up = _add_product(
            up, low, low_stride, rows, present, entry + 3, b, stride, c, inside, RANK, EXACT
        )
    if BIAS:
        gate += tl.load(bias + c, inside, 0.0).to(tl.float32)[None, :]
        up += tl.load(bias + SIZE + c, inside, 0.0).to(tl.float32)[None, :]
    if GELU:
        # 2 sigmoid(2 x) - 1 is tanh(x).
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * tl.sigmoid(2.0 * inner)
    else:
        gate = gate * tl.sigmoid(gate)
    tl.store(out + rows[:, None] * SIZE + c[None, :], (gate * up).to(out.dtype.element_ty), full)


@triton.jit
def _scaled(raw, temperature, scale, cap, CAP: tl.constexpr):
    """Scale and cap the head's outputs `raw` (BLOCK,) in fp32, and divide by the temperature."""
    z = raw.to(tl.float32) * scale
    if CAP:
        z = cap * (2.0 * tl.sigmoid(2.0 * z / cap) - 1.0)
    return z / temperature


@triton.jit
def _weighed(z):
    """Return the maximum of z and the sum of exp(z - maximum); -inf and 0 if all z are -inf."""
    top = tl.max(z, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.sum(tl.exp(z - safe), 0)


@triton.jit
def weigh_blocks(
    logits, temperatures, drawn, minimum, ends, out, stride, V, scale, cap,
    BLOCK: tl.constexpr, MINIMUM: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Write a logit block's maximum and sum of exponentials, with and without forbidden tokens."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = block * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(logits + row * stride + c, c < V, float("-inf"))
    z = _scaled(raw, tl.load(temperatures + row), scale, cap, CAP)
    z = tl.where(c < V, z, float("-inf"))
    top, total = _weighed(z)
    pointers = out + (row * tl.num_programs(1) + block) * 4
    tl.store(pointers, top)
    tl.store(pointers + 1, total)
    if MINIMUM:
        if tl.load(drawn + row) < tl.load(minimum + row):
            top, total = _weighed(tl.where(tl.load(ends + c, c < V, 0) != 0, float("-inf"), z))
        tl.store(pointers + 2, top)
        tl.store(pointers + 3, total)


@triton.jit
def _place(weights, sums, target, places, end):
    """Return the first index whose cumulative sum exceeds the target, else the last with weight."""
    last_place = tl.max(tl.where(weights > 0, places, 0), 0)
    first_place = tl.min(tl.where((sums > target) & (weights > 0), places, end), 0)
    return tl.minimum(first_place, last_place)


@triton.jit
def draw_token(
    logits, weighed, temperatures, greedy, draws, drawn, minimum, limit, ends, origin, finished,
    tokens, out_tokens, out_logprobs, stride, draws_stride, total_rows, steps, V, scale, cap,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, BLOCKS: tl.constexpr, GREEDY: tl.constexpr,
    MINIMUM: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Draw a row's token; write it, and whether the row has ended.

    A block of the vocabulary is drawn from the blocks' sums; then only that block's logits are
    read.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCKS)
    entries = weighed + (row * COUNT + n) * 4
    tops = tl.load(entries, n < COUNT, float("-inf"))
    masses = tl.load(entries + 1, n < COUNT, 0.0)
    top = tl.max(tops, 0)
    # Log of the sum over all tokens, also those that may not be drawn.
    log_total = tl.log(tl.sum(masses * tl.exp(tops - top), 0)) + top
    step = tl.load(drawn + row)
    forbids = step < 0
    if MINIMUM:
        tops = tl.load(entries + 2, n < COUNT, float("-inf"))
        masses = tl.load(entries + 3, n < COUNT, 0.0)
        top = tl.max(tops, 0)
        forbids = step < tl.load(minimum + row)
    weights = tl.where(n < COUNT, masses * tl.exp(tops - top), 0.0)
    sums = tl.cumsum(weights, 0)
    total = tl.max(sums, 0)
    # Below the total, so that rounding selects no token behind the last one with weight.
    uniform = tl.minimum(tl.load(draws + step * draws_stride + row).to(tl.float32), 0.99999994)
    target = uniform * total
    block = _place(weights, sums, target, n, BLOCKS)
    if GREEDY:
        takes_top = tl.load(greedy + row) != 0
        likeliest = tl.min(tl.where(tops == top, n, BLOCKS), 0)
        block = tl.where(takes_top, tl.minimum(likeliest, COUNT - 1), block)
    mass_before = tl.sum(tl.where(n < block, weights, 0.0), 0)
    c = block * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(logits + row * stride + c, c < V, float("-inf"))
    z = _scaled(raw, tl.load(temperatures + row), scale, cap, CAP)
    real = c < V
    if MINIMUM:
        real = real & ~(forbids & (tl.load(ends + c, c < V, 0) != 0))
    p = tl.where(real, tl.exp(z - top), 0.0)
    token = _place(p, mass_before + tl.cumsum(p, 0), target, c, V)
    if GREEDY:
        likeliest = tl.min(tl.where(real & (z == top), c, V), 0)
        token = tl.where(takes_top, tl.minimum(likeliest, V - 1), token)
    logprob = tl.sum(tl.where(c == token, z, 0.0), 0) - log_total
    was_finished = tl.load(finished + row) != 0
    cell = step * total_rows + tl.load(origin + row)
    tl.store(out_tokens + cell, tl.where(was_finished, -1, token.to(tl.int64)))
    tl.store(out_logprobs + cell, logprob)
    tl.store(tokens + row, token.to(tl.int64))
    ended = (tl.load(ends + token) != 0) & ~forbids
    ended = ended | (tl.load(limit + row) <= step + 1) | was_finished
    tl.store(finished + row, ended.to(tl.uint8))
    tl.store(drawn + row, tl.minimum(step + 1, steps - 1))


@triton.jit
def head_slopes(
    targets, inverse, logits, above, out, stride, V, BLOCK: tl.constexpr, SLOPES: tl.constexpr,
):  # fmt: skip
    """Write a row's log-prob of its target, entropy, and two factors to out (M, 4).

    With SLOPES, the logits are overwritten with exp(z - top), 0 at the target; multiplied by the
    first factor, these are probabilities. With two SLOPES, `above` gets these numbers times
    (log-prob + entropy), divided by the second factor so that float16 can represent them.
    """
    row = tl.program_id(0).to(tl.int64)
    target, per_temperature = tl.load(targets + row), tl.load(inverse + row)
    row_logits = logits + row * stride
    target_logit = tl.load(row_logits + target).to(tl.float32) * per_temperature
    top, total, moment = float("-inf"), 0.0, 0.0
    for at in range(0, V, BLOCK):
        c = at + tl.arange(0, BLOCK)
        raw = tl.load(row_logits + c, (c < V) & (c != target), float("-inf"))
        z = raw.to(tl.float32) * per_temperature
        new_top = tl.maximum(top, tl.max(z, 0))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        e, rescale = tl.exp(z - safe), tl.exp(top - safe)
        shift = tl.where(top == float("-inf"), 0.0, top - safe)
        moment = (moment + total * shift) * rescale + tl.sum(e * tl.where(e > 0, z - safe, 0.0), 0)
        total = total * rescale + tl.sum(e, 0)
        top = new_top
    safe = tl.where(top == float("-inf"), 0.0, top)
    peak = tl.maximum(top, target_logit)
    log_total = tl.log(total * tl.exp(top - peak) + tl.exp(target_logit - peak)) + peak
    logprob, weight = target_logit - log_total, tl.exp(top - log_total)
    p = tl.exp(logprob)
    entropy = -weight * (moment + total * (safe - log_total)) - tl.where(p > 0, p * logprob, p)
    # e |log(e) + top - log_total + entropy| is at most this, where log-probs are at least -200.
    bound = 1.0 + tl.abs(entropy) + tl.minimum(tl.maximum(log_total - safe, 0.0), 200.0)
    tl.store(out + 4 * row, logprob)
    tl.store(out + 4 * row + 1, entropy)
    tl.store(out + 4 * row + 2, weight)
    tl.store(out + 4 * row + 3, bound)
    if SLOPES > 0:
        for at in range(0, V, BLOCK):
            c = at + tl.arange(0, BLOCK)
            z = tl.load(row_logits + c, c < V, float("-inf")).to(tl.float32) * per_temperature
            e = tl.where(c == target, 0.0, tl.exp(z - safe))
            tl.store(row_logits + c, e.to(logits.dtype.element_ty), c < V)
            if SLOPES > 1:
                # exp() of a lower log-prob is 0, and 0 times -inf would be NaN.
                e *= (tl.maximum(z - log_total, -200.0) + entropy) / bound
                tl.store(above + row * stride + c, e.to(above.dtype.element_ty), c < V)

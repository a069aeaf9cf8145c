"""Operators of torch that each launch one kernel, on CUDA or in Triton's interpreter.

Arguments are described in `kernels`. An operator returns new tensors or writes its last arguments.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.library import Library, infer_schema

from evo_grpo.model.out_of_memory import is_out_of_memory

#: Rows of a tile, and of one in learning, where an agent has many.
TILE, LEARN_TILE = 16, 64
#: Columns of the cache in a block, and in a split of an attention to more columns than `UNSPLIT`.
_ATTEND_COLUMNS, _SPLIT = 32, 512
UNSPLIT = 2048
#: Columns of a row of a norm for each warp, and ranks of an adapter that it reads at once.
_NORM_COLUMNS, _NORM_RANKS = 256, 8
#: Columns of a tile of gate and up.
_GATE_COLUMNS = 128
#: Columns of a block of a gradient of A or B.
OUTER_COLUMNS = 128
#: Tokens of a block of the vocabulary.
_DRAW_BLOCK = 4096

#: Key of `SharedBase.derived`: whether a kernel has failed.
FAILED = "kernels failed"


class KernelError(RuntimeError):
    """A kernel could not be compiled or launched; the message has the compiler's reason."""


_Launch = TypeVar("_Launch", bound=Callable[..., Any])
_LIBRARY = Library("evo_grpo", "DEF")  # operators exist as long as it does
#: The launch of each operator; tests replace it by torch operations.
LAUNCHES: dict[str, Callable[..., Any]] = {}


def operator(*written: str) -> Callable[[_Launch], _Launch]:
    """Return a decorator that registers a function as the operator of torch of the same name.

    `written` are the names of the arguments to which the function writes.
    """

    def made(launch: _Launch) -> _Launch:
        name = launch.__name__
        LAUNCHES[name] = launch

        def call(*args: Any) -> Any:  # noqa: ANN401 -- what the operators take and return
            # Triton launches on the current device.
            device = next(x.device for x in args if isinstance(x, Tensor))
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                try:
                    return LAUNCHES[name](*args)
                except Exception as error:
                    if is_out_of_memory(error):
                        raise
                    lines = str(error).splitlines() or [""]
                    text = f"{name}: {type(error).__name__}: {lines[0][:200]}"
                    raise KernelError(text) from error

        _LIBRARY.define(name + infer_schema(launch, mutates_args=written))
        _LIBRARY.impl(name, call, "CPU")
        _LIBRARY.impl(name, call, "CUDA")
        return cast("_Launch", getattr(torch.ops.evo_grpo, name).default)

    return made


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on tensors of the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _kernels() -> Any:  # noqa: ANN401 -- a module of functions that Triton has made objects
    from evo_grpo.model.llama.cuda import kernels

    return kernels


def _learn_kernels() -> Any:  # noqa: ANN401 -- as above
    from evo_grpo.model.llama.cuda import learn_kernels

    return learn_kernels


def padded(size: int) -> int:
    """Round `size` up to a multiple of 16: the row length in memory of a B with `size` outputs."""
    return -(-size // 16) * 16


def _power(size: int, least: int = 1) -> int:
    """Return the least power of two that is at least `size` and `least`."""
    return max(least, 1 << (size - 1).bit_length())


def _exact(x: Tensor) -> bool:
    return x.dtype == torch.float32 or x.device.type == "cpu"


def _flags(x: Tensor) -> Tensor:
    """Return booleans as bytes, which kernels read."""
    return x.view(torch.uint8)


def _norm_warps(columns: int) -> int:
    return min(16, max(1, columns // _NORM_COLUMNS))


@operator()
def embed_norm(
    tokens: Tensor, table: Tensor, weight: Tensor, factor: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Return embeddings (M, H) of tokens (M,), plain and normalized, given the table (V, H)."""
    rows, size = tokens.shape[0], table.shape[1]
    x, normed = table.new_empty(rows, size), table.new_empty(rows, size)
    columns = _power(size)
    _kernels().embed_norm[(rows,)](
        tokens, table, weight, x, normed, factor, eps, H=size, COLUMNS=columns,
        num_warps=_norm_warps(columns),
    )  # fmt: skip
    return x, normed


@operator("q", "keys", "values")
def qkv(
    z: Tensor, low: Tensor, b: Tensor, adapters: Tensor, rank: int, bias: Tensor | None,
    tiles: Tensor, positions: Tensor, cos: Tensor | None, sin: Tensor | None,
    q_norm: Tensor | None, k_norm: Tensor | None, q_eps: float, k_eps: float,
    q: Tensor, keys: Tensor, values: Tensor,
) -> None:  # fmt: skip
    """Write q (M, heads, D), and keys and values: (M, kv, D), or to a cache (B, kv, room, D)."""
    (tokens, heads, size), (rows, kv), cached = q.shape, keys.shape[:2], keys.ndim == 4
    _kernels().qkv[(tiles.shape[0], heads + 2 * kv)](
        z, z.stride(0), low, low.stride(0), b, adapters, z if bias is None else bias, tiles,
        positions, z if cos is None else cos, z if sin is None else sin,
        z if q_norm is None else q_norm, z if k_norm is None else k_norm, q, keys, values,
        keys.shape[2] if cached else 1, tokens // rows, q_eps, k_eps, HEADS=heads, KV=kv, D=size,
        HALF=_power(size // 2, 16), RANK=rank, BIAS=bias is not None, NORM=q_norm is not None,
        TURN=cos is not None, CACHED=cached, EXACT=_exact(z), num_warps=4,
    )  # fmt: skip


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, window: int,
    out: Tensor, sums: Tensor, splits: int,
) -> None:  # fmt: skip
    (rows, heads, size), (_, kv, room, _) = q.shape, keys.shape
    _kernels().attend[(rows, kv, splits)](
        q, keys, values, positions, out, sums, room, scale, KV=kv, GROUP=heads // kv,
        PADDED=_power(heads // kv, 16), D=size, WIDTH=_power(size, 16), WINDOW=window,
        BLOCK=_ATTEND_COLUMNS // (2 if size > 128 else 1), SPLIT=0 if out is sums else _SPLIT,
        EXACT=_exact(q), num_warps=2, num_stages=3,
    )  # fmt: skip


@operator()
def attend(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, window: int
) -> Tensor:
    """Return the attention outputs (B, heads * D) for q (B, heads, D); window 0 is no window."""
    out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
    _attend(q, keys, values, positions, scale, window, out, out, 1)
    return out


@operator()
def attend_splits(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Return fp32 sums (B, heads, splits, D) and (B, heads, splits, 2); see `kernels.attend`."""
    (rows, heads, size), room = q.shape, keys.shape[2]
    splits = -(-min(room, window or room) // _SPLIT)
    mixed = q.new_empty(rows, heads, splits, size, dtype=torch.float32)
    sums = mixed.new_empty(rows, heads, splits, 2)
    _attend(q, keys, values, positions, scale, window, mixed, sums, splits)
    return mixed, sums


@operator()
def join_splits(mixed: Tensor, sums: Tensor, q: Tensor) -> Tensor:
    """Join the results of `attend_splits`; return the outputs (B, heads * D)."""
    rows, heads, splits, size = mixed.shape
    out = q.new_empty(rows, heads * size)
    _kernels().join_splits[(rows * heads,)](
        mixed, sums, out, SPLITS=splits, PADDED=_power(splits, 2), D=size, WIDTH=_power(size, 16),
        num_warps=1,
    )  # fmt: skip
    return out


@operator()
def add_norm(
    z: Tensor, low: Tensor, b: Tensor, adapters: Tensor, rank: int, bias: Tensor | None,
    owners: Tensor, x: Tensor, post: Tensor | None, post_eps: float, weight: Tensor, eps: float,
    factor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return x (M, H) plus the output of a linear layer: the sum, and the sum normalized."""
    rows, size = x.shape
    out, normed = torch.empty_like(x), torch.empty_like(x)
    columns = _power(size)
    _kernels().add_norm[(rows,)](
        z, z.stride(0), low, low.stride(0), b, adapters, z if bias is None else bias, owners, x,
        weight if post is None else post, weight, out, normed, post_eps, eps, factor, H=size,
        COLUMNS=columns, RANK=rank, CHUNK=_NORM_RANKS, BIAS=bias is not None,
        POST=post is not None, num_warps=_norm_warps(columns),
    )  # fmt: skip
    return out, normed


@operator()
def gate_up(
    z: Tensor, low: Tensor, b: Tensor, adapters: Tensor, rank: int, bias: Tensor | None,
    tiles: Tensor, size: int, gelu: bool,
) -> Tensor:  # fmt: skip
    """Return activated gate times up, (M, size): the input of the down projection."""
    out = z.new_empty(z.shape[0], size)
    # An fp32 tile has twice the bytes, and no instruction multiplies it whole.
    block = min(_GATE_COLUMNS // (4 if _exact(z) else 1), _power(size, 16))
    _kernels().gate_up[(tiles.shape[0], -(-size // block))](
        z, z.stride(0), low, low.stride(0), b, adapters, z if bias is None else bias, tiles, out,
        SIZE=size, BLOCK=block, RANK=rank, BIAS=bias is not None, GELU=gelu, EXACT=_exact(z),
        num_warps=4,
    )  # fmt: skip
    return out


def drawn_block(vocabulary: int) -> int:
    """Return the number of tokens in a block of the vocabulary, for drawing."""
    return min(_DRAW_BLOCK, _power(vocabulary, 16))


@operator()
def weigh_blocks(
    logits: Tensor, temperature: Tensor, drawn: Tensor, minimum: Tensor | None, ends: Tensor,
    scale: float, cap: float,
) -> Tensor:  # fmt: skip
    """Return maxima and sums (B, blocks, 4) fp32 of the blocks of logits (B, V); see `kernels`."""
    rows, vocabulary = logits.shape
    block = drawn_block(vocabulary)
    count = -(-vocabulary // block)
    out = temperature.new_empty(rows, count, 4)
    _kernels().weigh_blocks[(rows, count)](
        logits, temperature, drawn, drawn if minimum is None else minimum, _flags(ends), out,
        logits.stride(0), vocabulary, scale, cap, BLOCK=block, MINIMUM=minimum is not None,
        CAP=cap != 0.0, num_warps=4,
    )  # fmt: skip
    return out


@operator("drawn", "finished", "tokens", "out_tokens", "out_logprobs")
def draw_token(
    logits: Tensor, weighed: Tensor, temperature: Tensor, greedy: Tensor | None, draws: Tensor,
    minimum: Tensor | None, limit: Tensor, ends: Tensor, origin: Tensor, scale: float, cap: float,
    drawn: Tensor, finished: Tensor, tokens: Tensor, out_tokens: Tensor, out_logprobs: Tensor,
) -> None:  # fmt: skip
    """Draw the next token of each row, and write it to `tokens` (B,).

    The token and its log-prob are also written to `out_tokens` and `out_logprobs`, both (steps,
    rows of the rollout), at the row's step in `drawn`.
    """
    rows, vocabulary = logits.shape
    count = weighed.shape[1]
    _kernels().draw_token[(rows,)](
        logits, weighed, temperature, tokens if greedy is None else _flags(greedy), draws, drawn,
        drawn if minimum is None else minimum, limit, _flags(ends), origin, _flags(finished),
        tokens, out_tokens, out_logprobs, logits.stride(0), draws.stride(0), out_tokens.shape[1],
        draws.shape[0], vocabulary, scale, cap, BLOCK=drawn_block(vocabulary), COUNT=count,
        BLOCKS=_power(count, 2), GREEDY=greedy is not None, MINIMUM=minimum is not None,
        CAP=cap != 0.0, num_warps=4,
    )  # fmt: skip


@operator("logits", "above", "out")
def head_slopes(
    targets: Tensor, inverse: Tensor, slopes: int, logits: Tensor, above: Tensor, out: Tensor
) -> None:
    """Write log-probs, entropies and factors to `out` (M, 4) fp32, slopes over `logits` (M, V)."""
    rows, vocabulary = logits.shape
    _kernels().head_slopes[(rows,)](
        targets, inverse, logits, above, out, logits.stride(0), vocabulary,
        BLOCK=drawn_block(vocabulary), SLOPES=slopes, num_warps=8,
    )  # fmt: skip


def _ranks(rank: int) -> tuple[int, int]:
    """Return the number of ranks in a block of the learn kernels, and the number of blocks."""
    block = min(LEARN_TILE, _power(rank, 16))
    return block, -(-rank // block)


@operator()
def project(x: Tensor, matrix: Tensor, scale: Tensor, tiles: Tensor) -> Tensor:
    """Return x matrix^T scale (M, R), for x (M, in) and agents' matrix (N, R, in), scale (N, R)."""
    _, rank, size = matrix.shape
    out = x.new_empty(x.shape[0], rank)
    block, blocks = _ranks(rank)
    _learn_kernels().project[(tiles.shape[0], blocks)](
        x, matrix, scale, tiles, out, R=rank, SIZE=size, ROWS=LEARN_TILE, RANKS=block, BLOCK=64,
        EXACT=_exact(x), num_warps=4,
    )  # fmt: skip
    return out


@operator("y")
def add_low(low: Tensor, matrix: Tensor, tiles: Tensor, y: Tensor) -> None:
    """Add the product of `low` (M, R) and each agent's matrix (N, R, out) to y (M, out)."""
    _, rank, size = matrix.shape
    block = min(128, _power(size, 16))
    _learn_kernels().add_low[(tiles.shape[0], -(-size // block))](
        low, matrix, tiles, y, R=rank, SIZE=size, ROWS=LEARN_TILE, RANKS=min(32, _ranks(rank)[0]),
        BLOCK=block, EXACT=_exact(y), num_warps=4,
    )  # fmt: skip


@operator("out")
def outer(
    d_low: Tensor, x: Tensor, low: Tensor, grad: Tensor, tiles: Tensor, firsts: Tensor,
    offset: int, out: Tensor,
) -> None:  # fmt: skip
    """Write the gradients of A (N, R, in) and B (N, R, out) to `out` (S, numbers) fp32.

    Each of the S splits has a part of the sum over tokens. In a split, the gradients start at
    `offset`, A before B. `firsts` (N + 1,) has the index of each agent's first tile.
    """
    agents, (_, rank) = firsts.shape[0] - 1, low.shape
    inputs, outputs, splits = x.shape[1], grad.shape[1], out.shape[0]
    block, blocks = _ranks(rank)
    _learn_kernels().outer[
        (agents * blocks, -(-inputs // OUTER_COLUMNS) - (-outputs // OUTER_COLUMNS), splits)
    ](
        d_low, x, low, grad, tiles, firsts, out, out.stride(0), offset,
        offset + agents * rank * inputs, R=rank, IN=inputs, OUT=outputs, SPLITS=splits,
        ROWS=LEARN_TILE, RANKS=block, BLOCK=OUTER_COLUMNS, EXACT=_exact(x), num_warps=4,
    )  # fmt: skip


@operator()
def norm_backward(
    more: Tensor | None, grad: Tensor, x: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """Return the gradient (M, H) of x, plus `more`; `grad` is the gradient of the normalized x."""
    rows, size = x.shape
    out, columns = torch.empty_like(x), _power(size)
    _learn_kernels().norm_backward[(rows,)](
        grad if more is None else more, grad, x, weight, out, eps, H=size, COLUMNS=columns,
        MORE=more is not None, num_warps=_norm_warps(columns),
    )  # fmt: skip
    return out


@operator("both", "grad")
def glu_backward(gelu: bool, both: Tensor, grad: Tensor) -> None:
    """Overwrite `both` (M, 2 I) with its gradient, and `grad` (M, I) with the output of the GLU."""
    rows, size = grad.shape
    block = min(1024, _power(size, 16))
    _learn_kernels().glu_backward[(rows, -(-size // block))](
        both, grad, SIZE=size, BLOCK=block, GELU=gelu, num_warps=4
    )


@operator()
def qkv_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, more: list[Tensor], places: Tensor | None,
    joined: Tensor | None, positions: Tensor, cos: Tensor | None, sin: Tensor | None,
    q_norm: Tensor | None, k_norm: Tensor | None, q_eps: float, k_eps: float,
) -> Tensor:  # fmt: skip
    """Return the gradient (M, (heads + 2 kv) D) of concatenated q, k and v.

    `more` has further gradients: those of queries are added at the last tokens, those of keys and
    values at the first M' tokens. `places` (M',) has, for each of these first tokens, its row in
    the further gradients of keys and values, or -1. `joined` is the input of the norms of q and k.
    """
    (tokens, heads, size), kv = dq.shape, dk.shape[1]
    out = dq.new_empty(tokens, (heads + 2 * kv) * size)
    unread = out
    more_arguments = (unread,) * 4 if places is None else (*more, places)
    _learn_kernels().qkv_backward[(-(-tokens // 16), heads + 2 * kv)](
        dq, dk, dv, *more_arguments, 0 if places is None else places.shape[0],
        unread if joined is None else joined, positions, unread if cos is None else cos,
        unread if sin is None else sin, unread if q_norm is None else q_norm,
        unread if k_norm is None else k_norm, out, tokens, q_eps, k_eps, HEADS=heads, KV=kv, D=size,
        HALF=_power(size // 2, 16), NORM=q_norm is not None, TURN=cos is not None,
        MORE=places is not None, num_warps=4,
    )  # fmt: skip
    return out


@operator("out", "sums", "more_sums")
def join_parts(more: Tensor, out: Tensor, sums: Tensor, more_sums: Tensor) -> None:
    """Join the outputs `more` (M', heads, D) of the last M' tokens into `out` (M, heads, D).

    The log-sum-exps `sums` (heads, M) and `more_sums` (heads, M') fp32 are overwritten with the
    joined log-sum-exps.
    """
    rows, heads, size = more.shape
    _learn_kernels().join_parts[(-(-rows // 16), heads)](
        more, out, sums, more_sums, out.shape[0] - rows, rows, HEADS=heads, D=size,
        WIDTH=_power(size, 16), num_warps=2,
    )  # fmt: skip

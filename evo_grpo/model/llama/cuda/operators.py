"""The operators of a decode step: each launches one kernel, on CUDA or in Triton's interpreter.

Triton is imported by the first of them that runs. Arguments are as in `kernels`, which says what
each computes. An operator returns new tensors, or writes into its last arguments and returns none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Rows of a tile.
TILE = 16


@dataclass
class Tuning:
    """Sizes of blocks, numbers of warps and of stages; numbers of rows change none of them.

    Attributes:
        qkv_warps: Of a head of a tile.
        attend_columns: Columns of the cache in a block.
        attend_warps: Of a row and key head.
        attend_stages: Blocks of the cache that are read ahead, and one.
        norm_columns: Columns of a row for each warp.
        norm_ranks: Ranks of an adapter that are read at once.
        gate_columns: Columns of a tile.
        gate_warps: Of a tile.
        draw_block: Tokens of a block of the vocabulary.
        draw_warps: Of such a block.
    """

    qkv_warps: int = 4
    attend_columns: int = 32
    attend_warps: int = 2
    attend_stages: int = 3
    norm_columns: int = 256
    norm_ranks: int = 8
    gate_columns: int = 128
    gate_warps: int = 4
    draw_block: int = 4096
    draw_warps: int = 4


#: What the launches below use; a bench may change it.
TUNING = Tuning()


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on tensors of the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _kernels() -> Any:  # noqa: ANN401 -- a module of functions that Triton has made objects
    from evo_grpo.model.llama.cuda import kernels

    return kernels


def padded(size: int) -> int:
    """Return the numbers in a row of a B of so many outputs."""
    return -(-size // 16) * 16


def _power(size: int, least: int = 1) -> int:
    """Return the least power of two that is not below a size."""
    return max(least, 1 << (size - 1).bit_length())


def _exact(x: Tensor) -> bool:
    return x.dtype == torch.float32 or x.device.type == "cpu"


def _flags(x: Tensor | None, instead: Tensor) -> Tensor:
    """Return booleans as bytes, which kernels read."""
    return instead if x is None else x.view(torch.uint8)


def _embed_norm(
    tokens: Tensor, table: Tensor, weight: Tensor, factor: float, eps: float
) -> tuple[Tensor, Tensor]:
    rows, size = tokens.shape[0], table.shape[1]
    x, normed = table.new_empty(rows, size), table.new_empty(rows, size)
    columns = _power(size)
    _kernels().embed_norm[(rows,)](
        tokens, table, weight, x, normed, factor, eps, H=size, COLUMNS=columns,
        num_warps=_norm_warps(columns),
    )  # fmt: skip
    return x, normed


def _norm_warps(columns: int) -> int:
    return min(16, max(1, columns // TUNING.norm_columns))


def _qkv(
    z: Tensor, low: Tensor, b: Tensor, adapters: Tensor, rank: int, bias: Tensor | None,
    tiles: Tensor, positions: Tensor, cos: Tensor | None, sin: Tensor | None,
    q_norm: Tensor | None, k_norm: Tensor | None, q_eps: float, k_eps: float,
    q: Tensor, keys: Tensor, values: Tensor,
) -> None:  # fmt: skip
    (_, heads, size), (_, kv, room, _) = q.shape, keys.shape
    _kernels().qkv[(tiles.shape[0], heads + 2 * kv)](
        z, z.stride(0), low, low.stride(0), b, adapters, z if bias is None else bias, tiles,
        positions, z if cos is None else cos, z if sin is None else sin,
        z if q_norm is None else q_norm, z if k_norm is None else k_norm, q, keys, values, room,
        q_eps, k_eps, HEADS=heads, KV=kv, D=size, HALF=_power(size // 2, 16), RANK=rank,
        BIAS=bias is not None, NORM=q_norm is not None, TURN=cos is not None, EXACT=_exact(z),
        num_warps=TUNING.qkv_warps,
    )  # fmt: skip


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, window: int
) -> Tensor:
    (rows, heads, size), (_, kv, room, _) = q.shape, keys.shape
    out = q.new_empty(rows, heads * size)
    wide = size > 128
    _kernels().attend[(rows, kv)](
        q, keys, values, positions, out, room, scale, KV=kv, GROUP=heads // kv,
        PADDED=_power(heads // kv, 16), D=size, WIDTH=_power(size, 16), WINDOW=window,
        BLOCK=TUNING.attend_columns // (2 if wide else 1), EXACT=_exact(q),
        num_warps=TUNING.attend_warps, num_stages=TUNING.attend_stages,
    )  # fmt: skip
    return out


def _add_norm(
    z: Tensor, low: Tensor, b: Tensor, adapters: Tensor, rank: int, bias: Tensor | None,
    owners: Tensor, x: Tensor, post: Tensor | None, post_eps: float, weight: Tensor, eps: float,
    factor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, size = x.shape
    out, normed = torch.empty_like(x), torch.empty_like(x)
    columns = _power(size)
    _kernels().add_norm[(rows,)](
        z, z.stride(0), low, low.stride(0), b, adapters, z if bias is None else bias, owners, x,
        weight if post is None else post, weight, out, normed, post_eps, eps, factor, H=size,
        COLUMNS=columns, RANK=rank, CHUNK=TUNING.norm_ranks, BIAS=bias is not None,
        POST=post is not None, num_warps=_norm_warps(columns),
    )  # fmt: skip
    return out, normed


def _gate_up(
    z: Tensor, low: Tensor, b: Tensor, adapters: Tensor, rank: int, bias: Tensor | None,
    tiles: Tensor, size: int, gelu: bool,
) -> Tensor:  # fmt: skip
    out = z.new_empty(z.shape[0], size)
    # In fp32 a tile has twice the numbers, and its product is no instruction of its own.
    widest = TUNING.gate_columns // (4 if _exact(z) else 1)
    block = min(widest, _power(size, 16))
    _kernels().gate_up[(tiles.shape[0], -(-size // block))](
        z, z.stride(0), low, low.stride(0), b, adapters, z if bias is None else bias, tiles, out,
        SIZE=size, BLOCK=block, RANK=rank, BIAS=bias is not None, GELU=gelu, EXACT=_exact(z),
        num_warps=TUNING.gate_warps,
    )  # fmt: skip
    return out


def drawn_block(vocabulary: int) -> int:
    """Return the tokens of a block of the vocabulary, where a token is drawn."""
    return min(TUNING.draw_block, _power(vocabulary, 16))


def _weigh_blocks(
    logits: Tensor, temperature: Tensor, drawn: Tensor, minimum: Tensor | None, ends: Tensor,
    scale: float, cap: float,
) -> Tensor:  # fmt: skip
    rows, vocabulary = logits.shape
    block = drawn_block(vocabulary)
    count = -(-vocabulary // block)
    out = temperature.new_empty(rows, count, 4)
    _kernels().weigh_blocks[(rows, count)](
        logits, temperature, drawn, drawn if minimum is None else minimum, _flags(ends, ends), out,
        logits.stride(0), vocabulary, scale, cap, BLOCK=block, MINIMUM=minimum is not None,
        CAP=cap != 0.0, num_warps=TUNING.draw_warps,
    )  # fmt: skip
    return out


def _draw_token(
    logits: Tensor, weighed: Tensor, temperature: Tensor, greedy: Tensor | None, draws: Tensor,
    minimum: Tensor | None, limit: Tensor, ends: Tensor, origin: Tensor, scale: float, cap: float,
    drawn: Tensor, finished: Tensor, tokens: Tensor, out_tokens: Tensor, out_logprobs: Tensor,
) -> None:  # fmt: skip
    rows, vocabulary = logits.shape
    count = weighed.shape[1]
    _kernels().draw_token[(rows,)](
        logits, weighed, temperature, _flags(greedy, tokens), draws, drawn,
        drawn if minimum is None else minimum, limit, _flags(ends, ends), origin,
        _flags(finished, finished), tokens, out_tokens, out_logprobs, logits.stride(0),
        draws.stride(0), out_tokens.shape[1], draws.shape[0], vocabulary, scale, cap,
        BLOCK=drawn_block(vocabulary), COUNT=count, BLOCKS=_power(count, 2),
        GREEDY=greedy is not None, MINIMUM=minimum is not None, CAP=cap != 0.0,
        num_warps=TUNING.draw_warps,
    )  # fmt: skip


_ADAPTED = "Tensor z, Tensor low, Tensor b, Tensor adapters, int rank, Tensor? bias"
_SCHEMAS = (
    "embed_norm(Tensor tokens, Tensor table, Tensor weight, float factor, float eps)"
    " -> (Tensor, Tensor)",
    f"qkv({_ADAPTED}, Tensor tiles, Tensor positions, Tensor? cos, Tensor? sin, Tensor? q_norm,"
    " Tensor? k_norm, float q_eps, float k_eps, Tensor(a!) q, Tensor(b!) keys, Tensor(c!) values)"
    " -> ()",
    "attend(Tensor q, Tensor keys, Tensor values, Tensor positions, float scale, int window)"
    " -> Tensor",
    f"add_norm({_ADAPTED}, Tensor owners, Tensor x, Tensor? post, float post_eps, Tensor weight,"
    " float eps, float factor) -> (Tensor, Tensor)",
    f"gate_up({_ADAPTED}, Tensor tiles, int size, bool gelu) -> Tensor",
    "weigh_blocks(Tensor logits, Tensor temperature, Tensor drawn, Tensor? minimum, Tensor ends,"
    " float scale, float cap) -> Tensor",
    "draw_token(Tensor logits, Tensor weighed, Tensor temperature, Tensor? greedy, Tensor draws,"
    " Tensor? minimum, Tensor limit, Tensor ends, Tensor origin, float scale, float cap,"
    " Tensor(a!) drawn, Tensor(b!) finished, Tensor(c!) tokens, Tensor(d!) out_tokens,"
    " Tensor(e!) out_logprobs) -> ()",
)
#: The launch of each operator, which tests exchange for the same by torch.
LAUNCHES: dict[str, Callable[..., Any]] = {
    "embed_norm": _embed_norm,
    "qkv": _qkv,
    "attend": _attend,
    "add_norm": _add_norm,
    "gate_up": _gate_up,
    "weigh_blocks": _weigh_blocks,
    "draw_token": _draw_token,
}


def _on_cpu(name: str) -> Callable[..., Any]:
    def launch(*args: Any) -> Any:  # noqa: ANN401 -- what the operators take and return
        return LAUNCHES[name](*args)

    return launch


def _on_cuda(name: str) -> Callable[..., Any]:
    def launch(*args: Any) -> Any:  # noqa: ANN401 -- as above
        with torch.cuda.device(args[0].device):  # Triton launches on the current one
            return LAUNCHES[name](*args)

    return launch


def _defined() -> torch.library.Library:
    library = torch.library.Library("evo_grpo", "DEF")
    for schema in _SCHEMAS:
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, _on_cuda(name), "CUDA")
        library.impl(name, _on_cpu(name), "CPU")
    return library


_LIBRARY = _defined()  # operators exist as long as it does
_OPERATORS: Any = torch.ops.evo_grpo
embed_norm: Callable[..., tuple[Tensor, Tensor]] = _OPERATORS.embed_norm.default
qkv: Callable[..., None] = _OPERATORS.qkv.default
attend: Callable[..., Tensor] = _OPERATORS.attend.default
add_norm: Callable[..., tuple[Tensor, Tensor]] = _OPERATORS.add_norm.default
gate_up: Callable[..., Tensor] = _OPERATORS.gate_up.default
weigh_blocks: Callable[..., Tensor] = _OPERATORS.weigh_blocks.default
draw_token: Callable[..., None] = _OPERATORS.draw_token.default

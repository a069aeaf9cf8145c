"""Sparse attention with an index, limited to rows in which it selects all tokens.

DeepSeek-V3.2 and related models (GLM, A.X, Hunyuan, dots, DeepSeek-V4, MiniMax-M3) score all
earlier tokens and attend to the best ones. In transformers, the selection differs between a prefix
and the whole row, so that log-probs of sampling and training differ by nats. In rows no longer than
the number of selected tokens, the two agree.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from evo_grpo.errors import ModelError

#: Tokens of the longest rows with which a model is checked, in decoding.
LEAST = 9


def selection_length(trunk: nn.Module, name: str) -> int | None:
    """Return the length of the longest row in which all tokens are selected; None without a limit.

    Layers that select tokens are recognised by their attributes. A limit below the length of the
    rows with which a model is checked raises ModelError.
    """
    found = [taken for module in trunk.modules() if (taken := _taken(module)) is not None]
    longest = min(found, default=None)
    if longest is not None and longest < LEAST:
        raise ModelError(
            f"model {name!r} ({type(trunk).__name__}): expected attention to {LEAST} tokens or "
            f"more (index_topk and its kin in model.config), got {longest}: {beyond(longest)}; use "
            "a model without sparse attention"
        )
    return longest


def beyond(longest: int) -> str:
    """Return the reason for the limit on rows, as a clause."""
    return (
        f"of more than {longest} tokens its sparse attention leaves some out, and in transformers "
        "others in a prefix than in the whole row, so that log-probs of sampling would not be "
        "those of training"
    )


def remedy(longest: int) -> str:
    """Return the remedy for rows that are too long."""
    return (
        f"set algorithm.max_model_len to {longest} or less, or use a model without sparse attention"
    )


def _taken(module: Any) -> int | None:  # noqa: ANN401 -- a layer of any model
    # In DeepSeek-V4, an entry stands for several tokens.
    one_by_one = _count(module, "index_topk")
    if one_by_one is not None:
        return one_by_one * (_count(module, "compress_rate") or 1)
    # MiniMax-M3 selects whole blocks, including the block of the token itself.
    blocks, size = _count(module, "topk_blocks"), _count(module, "block_size")
    return None if blocks is None or size is None else blocks * size


def _count(module: Any, name: str) -> int | None:  # noqa: ANN401 -- as above
    value = getattr(module, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None

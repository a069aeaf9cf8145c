"""The model behind the decode loop: prefill, expand, keep, step. The decoders pass one suite.

`ModuleDecoder` runs a transformers model through its own modules, prompts of all lengths in one
batch. `EqualLengthDecoder` runs those that this would mislead, a length at a time. `LlamaDecoder`
(in evo_grpo/model/llama/decode.py) computes the same numbers for the common architecture with a
third of the operations.
"""

from __future__ import annotations

import inspect
from typing import Protocol, cast, final

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from evo_grpo.errors import ModelError
from evo_grpo.model.base import SharedBase
from evo_grpo.rollout.native.cache import RowCache


class Decoder(Protocol):
    """One rollout's model and key/value cache. Used inside `population_forward`."""

    def prefill(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Run prompts (NP, Tp) int64, padded on the right, of real lengths (NP,).

        Returns:
            (NP, H) final hidden states at each prompt's last token.
        """
        ...

    def expand(self, source: Tensor, columns: int) -> None:
        """Turn NP prompt rows into B rows, `source` (B,) naming each one's prompt."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these."""
        ...

    def step(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Run one token (B,) per row, at its position (B,) within prompt and completion.

        The mask (B, 1, 1, columns) is True at the cache columns that each row attends to, this
        token's included.

        Returns:
            (B, H) final hidden states.
        """
        ...


@final
class ModuleDecoder:
    """Any model, through its own forward."""

    def __init__(self, base: SharedBase, layers: int) -> None:
        """Keep the pieces; the cache is made by `prefill`."""
        self.base = base
        self.layers = layers
        self.cache = RowCache(layers, 0)

    def prefill(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Run prompts; see `Decoder`."""
        self.cache = RowCache(self.layers, ids.shape[1])
        hidden = self.base.run(input_ids=ids, past_key_values=self.cache, use_cache=True)
        return hidden[torch.arange(len(ids), device=hidden.device), lengths - 1]

    def expand(self, source: Tensor, columns: int) -> None:
        """Turn prompt rows into completion rows; see `Decoder`."""
        self.cache.select(source, columns)

    def keep(self, rows: Tensor) -> None:
        """Drop rows; see `Decoder`."""
        self.cache.select(rows, self.cache.get_max_length())

    def step(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Run one token per row; see `Decoder`."""
        if attention_of(self.base) == "eager":
            # Eager attention adds its mask, and would add True as 1.
            added = torch.zeros(mask.shape, dtype=self.base.dtype, device=mask.device)
            mask = added.masked_fill_(~mask, torch.finfo(added.dtype).min)
        hidden = self.base.run(
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
        )
        return hidden[:, 0]


@final
class EqualLengthDecoder:
    """Any model, as its own `generate` runs it: rows of one length, and the cache it is made for.

    Without padding nothing needs a mask or a position: a model may count the columns of its cache,
    slope its attention by their distance, forget what left its window, or carry a state instead.
    """

    def __init__(self, base: SharedBase) -> None:
        """Keep the base; the cache is made by `prefill`."""
        self.base = base
        self.cache: Cache = DynamicCache()
        taken = inspect.signature(base.trunk.forward).parameters
        self._name = "cache_params" if "cache_params" in taken else "past_key_values"

    def prefill(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Run prompts of one length; see `Decoder`."""
        assert bool((lengths == ids.shape[1]).all()), "prompts of several lengths"
        self.cache = DynamicCache(config=self.base.model.config)
        return self._run(ids)

    def expand(self, source: Tensor, columns: int) -> None:
        """Turn prompt rows into completion rows; see `Decoder`."""
        del columns
        self.keep(source)

    def keep(self, rows: Tensor) -> None:
        """Drop rows; see `Decoder`."""
        self.cache.reorder_cache(cast("torch.LongTensor", rows))

    def step(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Run one token per row; see `Decoder`."""
        del positions, mask
        return self._run(tokens[:, None])

    def _run(self, ids: Tensor) -> Tensor:
        """Return the hidden states (B, H) of the last of ids (B, T), which the cache then holds."""
        return self.base.run(input_ids=ids, use_cache=True, **{self._name: self.cache})[:, -1]


def attention_of(base: SharedBase) -> str:
    """Return the name of the attention that a model was loaded with."""
    return str(getattr(base.trunk.config, "_attn_implementation", None) or "eager")


def check_attention(base: SharedBase) -> None:
    """Refuse transformers' attentions without a mask per row, which `ModuleDecoder` needs.

    One that the user has registered takes no mask, and is decoded by `EqualLengthDecoder`.

    Raises:
        ModelError: For flash, flex and paged attentions.
    """
    if attention_of(base).startswith(("flash", "flex", "paged")) or "/" in attention_of(base):
        raise ModelError(
            f"model {base.name!r} was loaded with attention {attention_of(base)!r}; expected sdpa "
            'or eager: pass attn_implementation="sdpa"'
        )

"""Decoders, which run the model and hold the cache for the decode loop.

`ModuleDecoder` runs a transformers model through its modules, with prompts of all lengths in one
batch, or one prompt length at a time for models that padding would mislead.
`LlamaDecoder` (in evo_grpo/model/llama/decode.py) computes the same for the Llama family with a
third of the operations.
"""

from functools import partial
from typing import Any, Protocol, Self, cast, final

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from evo_grpo.errors import ModelError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.llama.cache import Refill


class Decoder(Protocol):
    """The model and key/value cache of one rollout; called inside `population_forward`.

    NP counts the (agent, prompt) rows, and B the rows of completions.
    """

    def prefill(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Run the prompts; return the final hidden states (NP, H) at the last token of each.

        Prompts `ids` (NP, Tp) int64 are padded on the right; `lengths` (NP,) exclude padding.
        """
        ...

    def expand(self, source: Tensor, columns: int, mask: Tensor) -> None:
        """Expand the cache from NP prompt rows to B completion rows of `columns` columns.

        `source` (B,) has the prompt row of each completion row. `mask` (B, 1, 1, columns) bool is
        True at the columns that a row attends to once they are filled.
        """
        ...

    def keep(self, rows: Tensor) -> None:
        """Remove all rows from the batch but those at the positions `rows`."""
        ...

    def reserve(self, columns: int) -> int | None:
        """Prepare for steps that use at most `columns` columns of the cache.

        Returns a number that stays the same as long as a captured CUDA graph of a step can be
        replayed; None if a step cannot be captured.
        """
        ...

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Run one token (B,) per row at its position (B,); return final hidden states (B, H)."""
        ...


class RefillDecoder(Decoder, Protocol):
    """A decoder that lets rows of other prompts join its batch."""

    def beside(self) -> Self:
        """Return a decoder over the same adapters with an empty cache, for prompts that join."""
        ...

    def refill(self, arrived: Self | None, moves: Refill) -> int:
        """Add the rows of `arrived`, from `beside`, and remove columns to which no row attends.

        `arrived` is None if no row joins, and cannot be used afterwards. `moves` has the new
        positions of rows. Returns the number of used columns.
        """
        ...


class _Layer(CacheLayerMixin):
    """Keys and values (B, heads, columns, D) of one layer; `used` columns are filled."""

    is_sliding = False

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns = columns
        self.used = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, heads, _, _ = key_states.shape
        self.keys = key_states.new_empty(rows, heads, self.columns, key_states.shape[-1])
        self.values = value_states.new_empty(rows, heads, self.columns, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        end = self.used + key_states.shape[-2]
        self.keys[:, :, self.used : end] = key_states
        self.values[:, :, self.used : end] = value_states
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used + query_length, 0

    def get_seq_length(self) -> int:
        return self.used

    def get_max_length(self) -> int:
        return self.columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            new = old.new_empty(beam_idx.shape[0], old.shape[1], self.columns, old.shape[3])
            new[:, :, : self.used] = old[:, :, : self.used].index_select(0, beam_idx)
            setattr(self, name, new)


@final
class ModuleDecoder:
    """Decodes any model through the forward of its modules.

    With `equal`, all prompts have one length, and the model runs as its `generate` does, with a
    `DynamicCache`: without padding, no model needs a mask or positions.
    """

    def __init__(self, base: SharedBase, *, equal: bool = False) -> None:
        self.base = base
        self.equal = equal
        self.cache: Cache = DynamicCache()
        self._mask = torch.zeros(0)

    def prefill(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Run prompts; see `Decoder`."""
        if self.equal:
            assert bool((lengths == ids.shape[1]).all()), "prompts of several lengths"
            self.cache = DynamicCache(config=self.base.model.config)
        else:
            self.cache = Cache(layer_class_to_replicate=partial(_Layer, ids.shape[1]))  # pyright: ignore[reportArgumentType] -- any callable
        hidden = self.base.run(self.cache, input_ids=ids)
        return hidden[torch.arange(len(ids), device=hidden.device), lengths - 1]

    def expand(self, source: Tensor, columns: int, mask: Tensor) -> None:
        """Turn prompt rows into completion rows; see `Decoder`."""
        for layer in self.cache.layers:
            if isinstance(layer, _Layer):
                layer.columns = columns
        self.cache.reorder_cache(cast("torch.LongTensor", source))
        self._mask = mask

    def keep(self, rows: Tensor) -> None:
        """Drop rows; see `Decoder`."""
        self.cache.reorder_cache(cast("torch.LongTensor", rows))
        self._mask = self._mask.index_select(0, rows)

    def reserve(self, columns: int) -> None:
        """Do nothing, because `expand` has made room for all columns, or the cache grows."""
        del columns

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Run one token per row; see `Decoder`."""
        inputs = {"input_ids": tokens[:, None]}
        if not self.equal:
            mask = self._mask[..., : self.cache.get_seq_length() + 1]
            if attention_of(self.base) == "eager":
                # Eager attention adds its mask to the scores, and would add True as 1.
                added = torch.zeros(mask.shape, dtype=self.base.dtype, device=mask.device)
                mask = added.masked_fill_(~mask, torch.finfo(added.dtype).min)
            inputs |= {"position_ids": positions[:, None], "attention_mask": mask}
        return self.base.run(self.cache, **inputs)[:, 0]


def attention_of(base: SharedBase) -> str:
    """Return the name of the attention implementation that a model was loaded with."""
    return str(getattr(base.trunk.config, "_attn_implementation", None) or "eager")


def check_attention(base: SharedBase) -> None:
    """Raise an error for attention implementations of transformers without a mask per row.

    `ModuleDecoder` needs the mask, except for prompts of one length. Attention that the user
    registered is therefore not refused.
    """
    if attention_of(base).startswith(("flash", "flex", "paged")) or "/" in attention_of(base):
        raise ModelError(
            f"model {base.name!r} was loaded with attention {attention_of(base)!r}; expected sdpa "
            'or eager: pass attn_implementation="sdpa"'
        )

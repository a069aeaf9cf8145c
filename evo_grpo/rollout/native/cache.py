"""A preallocated key/value cache for transformers models, one column per decoded token."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


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

    def select(self, rows: Tensor, columns: int) -> None:
        """Copy rows, which may repeat, into a buffer of `columns` columns."""
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            new = old.new_empty(rows.shape[0], old.shape[1], columns, old.shape[3])
            new[:, :, : self.used] = old[:, :, : self.used].index_select(0, rows)
            setattr(self, name, new)
        self.columns = columns


class RowCache(Cache):
    """The key/value cache of a rollout.

    It is prefilled once per (agent, prompt), expanded to G rows each, and shrinks as rows finish.
    """

    def __init__(self, layers: int, columns: int) -> None:
        """Create the cache without memory; the first write determines the shapes."""
        super().__init__(layers=[_Layer(columns) for _ in range(layers)])

    def select(self, rows: Tensor, columns: int) -> None:
        """Copy rows, which may repeat, into buffers of `columns` columns per layer."""
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            layer.select(rows, columns)

"""Caches of the keys and values of decoded rows, with attention of one new token per row.

`GrowingCache` attends only to used columns, because on a CPU the time grows with the columns.
`FixedCache` uses the same memory at each step and holds its position in a tensor, so that a step
needs nothing from the host and a CUDA graph can capture it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

#: Columns in a block of a growing cache: the numbers of a vector register.
_BLOCK = 16

#: Minimum columns that a fixed cache attends to. Masks are read fastest in aligned rows.
_LEAST = 64


@dataclass(frozen=True)
class Refill:
    """B rows that stay in a cache, and J rows that join them.

    Attributes:
        stay_to: (B,) new position of each row that stays.
        join_to: (J,) position of each row that joins.
        source: (J,) for each row that joins, the row of its prompt in the cache of the prompts.
        lengths: (J,) for each row that joins, the length of its prompt.
    """

    stay_to: Tensor
    join_to: Tensor
    source: Tensor
    lengths: Tensor

    def masks(self, mask: Tensor, joining: int, room: int) -> tuple[Tensor, slice, slice, int]:
        """Return the attention mask after the refill, given `mask` (B, 1, 1, used) before it.

        Leading columns to which no row attends are removed. The joining prompts, `joining` columns
        wide, end at the column where the staying rows end. Returns the mask (B + J, 1, 1, room),
        True also at unused columns; the slice of the old columns that are kept; the slice of new
        columns to which they are moved; and the number of columns in use.
        """
        used = mask.shape[-1]
        start = int(mask.any(0).flatten().int().argmax())  # waits for the device
        end = max(used - start, joining)
        out = mask.new_zeros(len(mask) + len(self.source), 1, 1, room)
        out[..., end:] = True
        out[..., end - (used - start) : end].index_copy_(0, self.stay_to, mask[..., start:])
        if len(self.source):
            column = torch.arange(joining, device=mask.device)
            attended = (column < self.lengths[:, None])[:, None, None]
            out[..., end - joining : end].index_copy_(0, self.join_to, attended)
        return out, slice(start, used), slice(end - (used - start), end), end

    def moved(
        self, before: Tensor, joining: Tensor | None, room: int, old: slice, new: slice
    ) -> Tensor:
        """Return a buffer (B + J, heads, room, D) of the keys or values of all rows.

        For rows that stay, columns `old` of `before` (B, heads, columns, D) become columns `new`.
        For rows that join, the columns of their prompts end where `new` ends. `joining` (NP, heads,
        Tp, D) has the keys or values of NP prompts; it is None if no row joins.
        """
        count = len(before) + len(self.source)
        # Zeros: unused columns are multiplied by a weight of 0.
        out = before.new_zeros(count, before.shape[1], room, before.shape[3])
        out[:, :, new].index_copy_(0, self.stay_to, before[:, :, old])
        if joining is not None:
            block = slice(new.stop - joining.shape[2], new.stop)
            out[:, :, block].index_copy_(0, self.join_to, joining.index_select(0, self.source))
        return out


@final
class GrowingCache:
    """A cache that attends only to used columns, by two batched matmuls.

    Keys are stored transposed; the first matmul applies scale and mask. After `expand`, rows are in
    order of agent, prompt and completion. `width` is None, because the number of columns changes at
    each step.
    """

    width = None

    def __init__(self, scale: float, windows: tuple[int | None, ...] = ()) -> None:
        self.scale = scale
        self._windows = windows
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.used = 0
        self._mask: Tensor | None = None
        self._bias: Tensor | None = None
        self._places = torch.zeros(0)
        self._biases: dict[int | None, Tensor] = {}
        self._padding = 0  # maximum columns of padding in a row
        self._first: dict[int | None, int] = {}

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add the next layer's keys and values (NP, kv_heads, Tp, D) of NP prompts."""
        self.keys.append(keys.transpose(2, 3))
        self.values.append(values)
        self.used = values.shape[2]

    def expand(self, source: Tensor, columns: int, mask: Tensor) -> None:
        """Copy the prompt rows `source` (B,) to completion rows with room for `columns` columns.

        The mask (B, 1, 1, columns) is False where a row never attends.
        """
        self._mask = mask[:, 0]
        if self._windows:
            self._padding = int((~self._mask[..., : self.used]).sum(-1).max())
        self._move(source, -(-columns // _BLOCK) * _BLOCK)

    def keep(self, rows: Tensor) -> None:
        """Remove all rows but those at the positions `rows`."""
        assert self._mask is not None
        self._mask = self._mask.index_select(0, rows)
        self._move(rows, self.keys[0].shape[-1])

    def reserve(self, columns: int) -> None:
        """Prepare steps with at most `columns` columns; here `expand` has already done it."""
        del columns

    def begin(self) -> None:
        """Start a step: advance to the next column."""
        if self._bias is None:
            assert self._mask is not None
            keys = self.keys[0]
            bias = keys.new_full((keys.shape[0], 1, keys.shape[-1]), float("-inf"))
            bias[..., : self.used].masked_fill_(self._mask[..., : self.used], 0.0)
            self._bias = bias.repeat_interleave(keys.shape[1], 0)
            if self._windows:
                positions = _places(self._mask, keys.shape[-1])
                self._places = positions.repeat_interleave(keys.shape[1], 0)
        # Kept between steps: each step reveals the column of its token.
        self._bias[..., self.used] = 0.0
        self.used += 1
        if self._windows:
            width = -(-self.used // _BLOCK) * _BLOCK
            now = self._places[..., self.used - 1 : self.used]
            self._biases = _in_windows(
                self._windows, self._bias[..., :width], self._places[..., :width], now, self.used
            )
            # No row reaches the columns before these.
            self._first = {
                window: max(0, self.used - (window or self.used) - self._padding) // _BLOCK * _BLOCK
                for window in self._biases
            }

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v (B, kv_heads, D) of the new tokens; return outputs (B, heads * D) of q."""
        rows, kv_heads, size = k.shape
        keys, values = self.keys[layer], self.values[layer]
        keys[..., self.used - 1] = k
        values[:, :, self.used - 1] = v
        bias, start = self._bias, 0
        if self._windows:
            window = self._windows[layer]
            bias, start = self._biases[window], self._first[window]
        assert bias is not None
        # Whole blocks: a softmax over a ragged width is slow.
        width = -(-self.used // _BLOCK) * _BLOCK
        scores = torch.baddbmm(
            bias[..., start:width],
            q.reshape(rows * kv_heads, -1, size),
            keys.flatten(0, 1)[..., start:width],
            alpha=self.scale,
        )
        mixed = torch.bmm(torch.softmax(scores, dim=-1), values.flatten(0, 1)[:, start:width])
        return mixed.view(rows, -1)

    def _move(self, rows: Tensor, columns: int) -> None:
        """Copy the rows `rows`, which may repeat, to new buffers of `columns` columns by layer."""
        used = self.used
        for i, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            count, heads, size = rows.shape[0], keys.shape[1], keys.shape[2]
            # Zeros: unused columns of a block are multiplied by a weight of 0.
            new_keys = keys.new_zeros(count, heads, size, columns)
            new_keys[..., :used] = keys[..., :used].index_select(0, rows)
            new_values = values.new_zeros(count, heads, columns, size)
            new_values[:, :, :used] = values[:, :, :used].index_select(0, rows)
            self.keys[i], self.values[i] = new_keys, new_values
        self._bias = None


@final
class FixedCache:
    """A cache that attends to `width` columns, by one fused kernel; see `GrowingCache`.

    The width doubles when it is exceeded, so at most half of the columns that are read are unused.
    """

    def __init__(self, scale: float, windows: tuple[int | None, ...] = ()) -> None:
        self.scale = scale
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.width: int | None = None
        self.column = torch.zeros(1, dtype=torch.long)
        self._used = 0  # of the prompts
        self._windows = windows
        self._bias = self._places = torch.zeros(0)
        self._biases: dict[int | None, Tensor] = {}

    def append(self, keys: Tensor, values: Tensor) -> None:
        """See `GrowingCache`."""
        self.keys.append(keys)
        self.values.append(values)
        self._used = values.shape[2]

    def expand(self, source: Tensor, columns: int, mask: Tensor) -> None:
        """See `GrowingCache`."""
        room = -(-columns // _LEAST) * _LEAST
        used = self._used
        for buffers in (self.keys, self.values):
            for i, buffer in enumerate(buffers):
                # Zeros: unused columns are multiplied by a weight of 0.
                expanded = buffer.new_zeros(source.shape[0], buffer.shape[1], room, buffer.shape[3])
                expanded[:, :, :used] = buffer.index_select(0, source)
                buffers[i] = expanded
        self._start(mask, used)

    def _start(self, mask: Tensor, used: int) -> None:
        """Set the bias, position and width from the mask of rows that have `used` columns."""
        like = self.keys[0]
        self._bias = like.new_full((*mask.shape[:-1], like.shape[2]), float("-inf"))
        self._bias[..., :used].masked_fill_(mask[..., :used], 0.0)
        if self._windows:
            self._places = _places(mask, like.shape[2])
        self.column = torch.full((1,), used - 1, device=like.device)
        self.width = None
        self.reserve(used + 1)

    def keep(self, rows: Tensor) -> None:
        """See `GrowingCache`."""
        for buffers in (self.keys, self.values):
            for i, buffer in enumerate(buffers):
                buffers[i] = buffer.index_select(0, rows)
        self._bias = self._bias.index_select(0, rows)
        if self._windows:
            self._places = self._places.index_select(0, rows)

    def refill(self, arrived: FixedCache | None, moves: Refill) -> int:
        """Move the rows that stay, remove unused columns, and add rows of the cache `arrived`.

        `arrived` is emptied; it is None if no row joins. Returns the number of columns then in use.
        """
        room, used = self._bias.shape[-1], int(self.column) + 1
        attended = self._bias[..., :used] == 0
        mask, old, new, end = moves.masks(attended, arrived._used if arrived else 0, room)
        for i, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            joining = arrived.keys[i] if arrived else None
            self.keys[i] = moves.moved(keys, joining, room, old, new)
            joining = arrived.values[i] if arrived else None
            self.values[i] = moves.moved(values, joining, room, old, new)
            if arrived:
                arrived.keys[i] = arrived.values[i] = keys.new_zeros(0)  # frees them
        self._start(mask, end)
        return end

    def reserve(self, columns: int) -> None:
        """See `GrowingCache`."""
        if self.width is None or columns > self.width:
            width = max(_LEAST, 1 << (columns - 1).bit_length())
            self.width = min(width, self._bias.shape[-1])

    def begin(self) -> None:
        """See `GrowingCache`."""
        self.column.add_(1)
        self._bias.index_fill_(3, self.column, 0.0)
        if self._windows:
            width = self.width or self._bias.shape[-1]
            now = self._places.index_select(3, self.column)
            self._biases = _in_windows(
                self._windows, self._bias[..., :width], self._places[..., :width], now, width
            )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `GrowingCache`."""
        layer_bias = self._biases[self._windows[layer]] if self._windows else self._bias
        rows, kv_heads, size = k.shape
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(2, self.column, k[:, :, None])
        values.index_copy_(2, self.column, v[:, :, None])
        # The query heads of one key head take the place of a row's tokens: kernels with a mask
        # do not support grouped heads.
        q = q.reshape(rows, kv_heads, -1, size)
        bias = layer_bias[..., : self.width].expand(-1, kv_heads, q.shape[2], -1)
        mixed = nn.functional.scaled_dot_product_attention(
            q,
            keys[:, :, : self.width],
            values[:, :, : self.width],
            attn_mask=bias,
            scale=self.scale,
        )
        return mixed.reshape(rows, -1)


def cache_for(
    device: torch.device, scale: float, windows: tuple[int | None, ...] = ()
) -> GrowingCache | FixedCache:
    """Return the cache that is faster on a device, for scores multiplied by `scale`.

    `windows` has the attention window of each layer, None for none; empty if no layer has one.
    """
    return (GrowingCache if device.type == "cpu" else FixedCache)(scale, windows)


def _places(mask: Tensor, columns: int) -> Tensor:
    """Return each column's token position (..., columns); `mask` is True at a row's tokens."""
    return nn.functional.pad(mask.cumsum(-1) - 1, (0, columns - mask.shape[-1]))


def _in_windows(
    windows: tuple[int | None, ...], bias: Tensor, places: Tensor, now: Tensor, most: int
) -> dict[int | None, Tensor]:
    """Return the mask of each window for a token at position `now`: -inf outside the window.

    `bias` (..., width) is the mask without a window; rows have at most `most` columns.
    """
    return {
        window: bias
        if window is None or most <= window
        else bias.masked_fill(places <= now - window, float("-inf"))
        for window in dict.fromkeys(windows)
    }

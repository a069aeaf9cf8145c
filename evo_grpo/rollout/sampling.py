"""Samples one token per row, with the settings of the row's agent, by keyed draws.

The generator is counter-based (SplitMix64, Steele, Lea and Flood 2014) instead of stateful. The
draw of a row depends only on its key and step, so an agent's samples do not change with the number
of other agents in the batch, nor when rows leave the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evo_grpo.schema.hparams import Hparams

#: Weights of a block; from a vocabulary of at least `_LARGE`, tokens are drawn by blocks.
_BLOCK = 256
_LARGE = 16 * _BLOCK


@dataclass(frozen=True)
class Sampling:
    """The sampling settings of one agent.

    Attributes:
        temperature: Divides the logits, >= 0. At 0, decoding is greedy: after penalty and forbidden
            tokens, the likeliest token is taken, the first of several equal ones.
        top_p: Nucleus mass kept, in (0, 1]; 1 keeps all.
        top_k: Number of likeliest tokens kept; 0 keeps all.
        min_p: Least probability relative to the likeliest token, in [0, 1).
        repetition_penalty: Divides positive and multiplies negative logits of tokens seen in prompt
            and completion (Keskar et al. 2019, arXiv:1909.05858); 1 does nothing.
        max_output_tokens: Longest completion, the end token included, >= 1.
        min_output_tokens: The end token cannot be sampled before this many tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_output_tokens: int = 32
    min_output_tokens: int = 0

    @classmethod
    def of(
        cls, hparams: Hparams, *, max_output_tokens: int, min_output_tokens: int = 0
    ) -> Sampling:
        """Return the settings for sampling in training, from an agent's hyperparameters."""
        return cls(
            temperature=hparams.temperature,
            top_p=hparams.top_p,
            top_k=hparams.top_k,
            min_p=hparams.min_p,
            repetition_penalty=hparams.repetition_penalty,
            max_output_tokens=max_output_tokens,
            min_output_tokens=min_output_tokens,
        )


@dataclass(frozen=True)
class RowSampling:
    """The sampling settings of each row, as tensors; None for a setting that no row uses.

    temperature (1 for greedy rows), top_p, min_p and penalty are (B, 1) fp32, top_k is (B, 1) int64
    (V for rows that keep all). `greedy` (B,) bool is True for greedy rows; `limit` and `minimum`
    (B,) int64 are the maximum and minimum lengths of completions. The other attributes are on the
    host: `draws`, whether a row is not greedy; `least`, the least minimum; `shortest`, a lower
    bound of all limits; and `alike`, whether all rows have the same minimum.
    """

    temperature: Tensor
    greedy: Tensor | None
    top_p: Tensor | None
    top_k: Tensor | None
    min_p: Tensor | None
    penalty: Tensor | None
    limit: Tensor
    minimum: Tensor | None
    draws: bool = True
    least: int = 0
    shortest: int = 0
    alike: bool = False

    @classmethod
    def build(
        cls,
        settings: Sequence[Sampling],
        counts: Sequence[int],
        vocabulary: int,
        device: torch.device,
    ) -> RowSampling:
        """Repeat the settings of each agent for its number of rows, which is in `counts`."""
        repeats = torch.tensor(list(counts))

        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype).repeat_interleave(repeats).to(device)

        def optional(
            values: list[float], off: float, dtype: torch.dtype = torch.float32
        ) -> Tensor | None:
            return None if all(v == off for v in values) else column(values, dtype)[:, None]

        top_k = [s.top_k if 0 < s.top_k < vocabulary else vocabulary for s in settings]
        minimum = [s.min_output_tokens for s in settings]
        greedy = [s.temperature == 0 for s in settings]
        return cls(
            temperature=column([s.temperature or 1.0 for s in settings])[:, None],
            greedy=column(greedy, torch.bool) if any(greedy) else None,
            top_p=optional([s.top_p for s in settings], 1.0),
            top_k=optional([float(k) for k in top_k], float(vocabulary), torch.int64),
            min_p=optional([s.min_p for s in settings], 0.0),
            penalty=optional([s.repetition_penalty for s in settings], 1.0),
            limit=column([s.max_output_tokens for s in settings], torch.int64),
            minimum=column(minimum, torch.int64) if any(minimum) else None,
            draws=not all(greedy),
            least=min(minimum, default=0),
            shortest=min((s.max_output_tokens for s in settings), default=0),
            alike=len(set(minimum)) == 1,
        )

    @property
    def plain(self) -> bool:
        """Whether no row has a filter or a penalty."""
        return all(v is None for v in (self.top_p, self.top_k, self.min_p, self.penalty))

    def select(self, rows: Tensor) -> RowSampling:
        """Return the settings of the rows at positions `rows`."""
        return self._mapped(lambda value: value.index_select(0, rows))

    def part(self, rows: slice) -> RowSampling:
        """Return the settings of consecutive rows, as views."""
        return self._mapped(lambda value: value[rows])

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> RowSampling:
        tensors = {k: v for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **{k: change(v) for k, v in tensors.items()})


def sample_tokens(
    logits: Tensor,
    draws: Tensor,
    rows: RowSampling,
    *,
    seen: Tensor | None = None,
    forbidden: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the cumulative distribution at the row's draw.

    A greedy row takes the token with the greatest logit.

    Args:
        logits: (B, V) fp32; overwritten.
        draws: (B,) float64 in [0, 1).
        rows: Settings per row.
        seen: (B, V) bool, tokens of prompt and completion so far; needed for a repetition penalty.
        forbidden: (B, V) bool, or (1, V) for all rows: tokens that may not be drawn (the end tokens
            before min_output_tokens).

    Returns:
        (B,) int64 tokens, and their (B,) fp32 log-probs in nats under softmax(logits /
        temperature), with temperature 1 for greedy rows. This is the policy that the loss
        differentiates: penalty and filters are left out.
    """
    scaled = logits.div_(rows.temperature)
    logprobs = torch.log_softmax(scaled, dim=-1)
    current = scaled
    if rows.penalty is not None and seen is not None:
        # The penalty acts on the raw logits; dividing by a positive temperature keeps their signs.
        punished = torch.where(scaled > 0, scaled / rows.penalty, scaled * rows.penalty)
        current = torch.where(seen, punished, scaled)
    if forbidden is not None:
        # Mask the logits: beside a forbidden token all other probabilities may round to 0.
        current = current.masked_fill(forbidden, float("-inf"))
    if rows.draws:
        probs = logprobs.exp() if current is scaled else torch.softmax(current, dim=-1)
        tokens = _drawn(_filtered(probs, rows), draws)
        if rows.greedy is not None:
            tokens = torch.where(rows.greedy[:, None], current.argmax(-1, keepdim=True), tokens)
    else:
        # No filter removes the likeliest token.
        tokens = current.argmax(-1, keepdim=True)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def _drawn(probs: Tensor, draws: Tensor) -> Tensor:
    """Return the tokens (B, 1) that draws (B,) select by weights (B, V), which may have any sum."""
    vocabulary = probs.shape[-1]
    if vocabulary < _LARGE:
        return _place(probs, draws.to(probs.dtype))[0]
    # First the block, then the token in it: reading sums of blocks takes a fraction of the time of
    # writing cumulative sums of the whole vocabulary.
    blocks = vocabulary // _BLOCK
    whole = probs[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK)).sum(-1)
    sums = torch.cat([whole, probs[:, blocks * _BLOCK :].sum(-1, keepdim=True)], dim=1)
    block, share = _place(sums, draws.to(probs.dtype))
    columns = block * _BLOCK + torch.arange(_BLOCK, device=probs.device)
    inside = probs.gather(1, columns.clamp(max=vocabulary - 1))
    inside = inside.masked_fill_(columns >= vocabulary, 0.0)
    token = block * _BLOCK + _place(inside, share)[0]
    return token.clamp_(max=vocabulary - 1)


def _place(weights: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices (B, 1) that draws (B,) in [0, 1) select by weights (B, n) of any sum.

    Every index has an interval as long as its weight. Also returns the position (B,), in [0, 1), of
    each draw within the interval of its index.
    """
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # The largest number below 1 in this precision keeps the product below the total, so rounding
    # cannot select a place behind the last one with any mass.
    below_one = 1 - torch.finfo(total.dtype).eps / 2
    target = draws[:, None].clamp(max=below_one).mul(total)
    # A row of NaN, from an agent whose weights overflowed, gives an index past the end, which must
    # not fail the whole population.
    place = torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[-1] - 1)
    weight = weights.gather(1, place)
    within = (target - (cumulative.gather(1, place) - weight)).div_(weight).clamp_(min=0.0)
    return place, within[:, 0]


def _filtered(probs: Tensor, rows: RowSampling) -> Tensor:
    if rows.min_p is not None:
        probs = probs.masked_fill(probs < rows.min_p * probs.amax(dim=-1, keepdim=True), 0.0)
    if rows.top_k is None and rows.top_p is None:
        return probs
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    if rows.top_k is not None:
        position = torch.arange(probs.shape[-1], device=probs.device)
        ordered = ordered.masked_fill(position >= rows.top_k, 0.0)
    if rows.top_p is not None:
        # Keep the tokens up to and including the one with which the mass reaches top_p.
        before = ordered.cumsum(dim=-1) - ordered
        # A top_p of 1 keeps all tokens: rounding must not cut the tail.
        cut = (before >= rows.top_p * ordered.sum(dim=-1, keepdim=True)) & (rows.top_p < 1)
        # Keep the likeliest token even if top_p rounds to 0 in this precision.
        cut[:, 0] = False
        ordered = ordered.masked_fill(cut, 0.0)
    return torch.zeros_like(probs).scatter_(1, order, ordered)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def key_tensor(keys: Sequence[int], device: torch.device) -> Tensor:
    """Return the keys of rows, in [0, 2**63), as a tensor (B,) int64."""
    return torch.tensor(list(keys), dtype=torch.int64, device=device)


def uniform(keys: Tensor, first: int, steps: int) -> Tensor:
    """Return draws (steps, B) float64 in [0, 1) for rows with `keys` (B,).

    Draw i is for the token with index `first` + i of a completion. Draws are multiples of 2**-53;
    each depends only on its row's key and the token's index.
    """
    moves = [_signed((step + 1) * _GAMMA % (1 << 64)) for step in range(first, first + steps)]
    z = keys + torch.tensor(moves, dtype=torch.int64, device=keys.device)[:, None]
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    z = z ^ _shift(z, 31)
    return _shift(z, 11).to(torch.float64) * 2.0**-53


def _shift(value: Tensor, bits: int) -> Tensor:
    """Shift right logically; torch's >> on int64 copies the sign bit."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)

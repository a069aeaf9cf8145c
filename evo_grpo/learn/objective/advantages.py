"""Rewards to group-relative advantages; pure, and free of torch unless given a torch tensor.

A reward of NaN (None in a list) is an abstention: that reward function has no opinion on that row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import numpy as np
import numpy.typing as npt

from evo_grpo.errors import ConfigError
from evo_grpo.learn.objective.reward_arrays import (
    Floats,
    GroupSize,
    RewardList,
    Rewards,
    Sizes,
    Weights,
    combined,
    group_lengths,
    group_sizes,
    reward_weights,
    to_numpy,
)

if TYPE_CHECKING:
    import torch

Scale = Literal["group", "batch", "none"]

ZERO_SPREAD = 1e-8
"""Rewards of one group at most this far apart are equal, whatever their magnitude: they would teach
next to nothing, since their spread is added to an eps of 1e-4."""

ROUNDING_TERMS = 3
"""Terms that a reward is taken to be a sum of, at least: a user may have summed it already."""


@overload
def group_advantages(
    rewards: torch.Tensor,
    group_size: GroupSize,
    *,
    scale: Scale = ...,
    weights: Weights = ...,
    eps: float = ...,
    ddof: int = ...,
) -> torch.Tensor: ...
@overload
def group_advantages(
    rewards: npt.NDArray[Any],
    group_size: GroupSize,
    *,
    scale: Scale = ...,
    weights: Weights = ...,
    eps: float = ...,
    ddof: int = ...,
) -> Floats: ...
@overload
def group_advantages(
    rewards: RewardList,
    group_size: GroupSize,
    *,
    scale: Scale = ...,
    weights: Weights = ...,
    eps: float = ...,
    ddof: int = ...,
) -> list[float]: ...
def group_advantages(
    rewards: Rewards,
    group_size: GroupSize,
    *,
    scale: Scale = "group",
    weights: Weights = None,
    eps: float = 1e-4,
    ddof: int = 1,
) -> object:
    """Turn rewards into advantages relative to their group.

    "group" is DeepSeekMath (arXiv:2402.03300) section 4.1.2, outcome supervision; "none" leaves out
    the division, as Dr. GRPO (arXiv:2503.20783) argues; "batch" divides by the spread of the batch.

    Args:
        rewards: (B,) or, one column per reward function, (B, K); rows of a group are neighbours. A
            list, numpy array or torch tensor (any device; computed on the host). NaN, or None in a
            list, abstains.
        group_size: One size that divides B, or the sizes of all groups in order, which sum to B.
        scale: Divide by the standard deviation of the "group", of the "batch", or "none".
        weights: (K,) weight of each reward function, default 1 for each; only with (B, K) rewards.
        eps: Added to the standard deviation, in units of reward, >= 0.
        ddof: Delta degrees of freedom of the standard deviation, >= 0; 1 is the unbiased variance.

    Returns:
        (B,) advantages, of the type of `rewards`: list of float, numpy array or torch tensor, in
        the float dtype of the rewards (integers become float64 in numpy, the default dtype in
        torch). A row where every function abstains gets 0 and stays out of mean and standard
        deviation. With every scale, the groups that `zero_variance_groups` finds get exactly 0.

    Raises:
        ShapeError: The shapes of rewards, weights and group_size do not fit.
        ConfigError: scale, eps or ddof is out of range.
        RewardError: A reward is infinite or beyond 1e15, alone or by its weight, so that results
            would leave float32; or half precision cannot hold its advantage.
    """
    _check_settings(scale, eps, ddof)
    values, restore = to_numpy(rewards)
    sizes = group_sizes(group_size, len(values))
    coefficients = reward_weights(values, weights)
    totals = combined(values, coefficients)
    return restore(_normalize(totals, sizes, scale, eps, ddof, _Rounding(values, coefficients)))


def zero_variance_groups(
    rewards: Rewards, group_size: GroupSize, *, weights: Weights = None
) -> npt.NDArray[np.bool_]:
    """Find the groups whose rewards are equal but for rounding and which give no gradient.

    Equal means a spread (maximum - minimum) of at most 1e-8 + c e m: e is the machine epsilon of
    the rewards' dtype, m the largest sum over k of |w_k R_k| of a row of the group, and c is 8, or
    2 (K + 1) for more than three reward functions. That bounds the rounding of a sum of K weighted
    rewards.

    Arguments and errors are those of `group_advantages`. Returns (number of groups,) numpy bool,
    also True where at most one row is valid.
    """
    values, _ = to_numpy(rewards)
    sizes = group_sizes(group_size, len(values))
    coefficients = reward_weights(values, weights)
    totals = combined(values, coefficients)
    if not len(totals):
        return np.zeros(0, dtype=np.bool_)
    tolerances = _Rounding(values, coefficients).tolerances()
    return _constant(totals, tolerances, group_lengths(sizes, len(totals)))


def zero_variance_fraction(
    rewards: Rewards, group_size: GroupSize, *, weights: Weights = None
) -> float:
    """Return the fraction of groups, 0 to 1, that `zero_variance_groups` finds; 0 of no groups."""
    dead = zero_variance_groups(rewards, group_size, weights=weights)
    return float(dead.mean()) if dead.size else 0.0


@dataclass(frozen=True)
class _Rounding:
    """The tolerance between the totals of equal rewards; see `zero_variance_groups`.

    Rewards are (B,) without weights, or (B, K) with weights (K,).
    """

    rewards: Floats
    weights: Floats | None

    def tolerances(self, rows: npt.NDArray[np.bool_] | slice = slice(None)) -> Floats:
        """Return the tolerance (B,) of every row, or of some rows; NaN counts as 0."""
        magnitudes = np.abs(np.nan_to_num(self.rewards[rows]))
        if self.weights is not None:
            magnitudes = magnitudes @ np.abs(self.weights)
        return ZERO_SPREAD + self._relative * magnitudes

    def largest(self) -> float:
        """Return an upper bound of the tolerances of finite rewards, in one pass."""
        magnitude = max(float(self.rewards.max()), -float(self.rewards.min()))
        if math.isnan(magnitude):  # some functions abstain
            magnitude = float(np.nanmax(np.abs(self.rewards)))
        factor = 1.0 if self.weights is None else float(np.abs(self.weights).sum())
        return ZERO_SPREAD + self._relative * magnitude * factor

    @property
    def _relative(self) -> float:
        terms = 1 if self.weights is None else len(self.weights)
        return 2 * (max(terms, ROUNDING_TERMS) + 1) * float(np.finfo(self.rewards.dtype).eps)


def _constant(
    totals: Floats, tolerances: Floats, lengths: npt.NDArray[np.intp]
) -> npt.NDArray[np.bool_]:
    """Decide for each group whether its totals are equal but for rounding; NaN abstains."""
    starts = np.cumsum(lengths) - lengths
    abstains = np.isnan(totals)
    highest = np.maximum.reduceat(np.where(abstains, -np.inf, totals), starts)
    lowest = np.minimum.reduceat(np.where(abstains, np.inf, totals), starts)
    # The spread of a group in which all abstain is -inf.
    return highest - lowest <= np.maximum.reduceat(tolerances, starts)


def _normalize(
    values: Floats, sizes: Sizes, scale: Scale, eps: float, ddof: int, rounding: _Rounding
) -> Floats:
    """Centre (B,) rewards on their group and scale them."""
    if not len(values):
        return values.copy()
    group_eps = eps if scale == "group" else None
    deviations = None
    if isinstance(sizes, int):
        deviations = _equal_groups(values, sizes, group_eps, ddof, rounding)
    if deviations is None:  # groups of different sizes, or an abstention
        deviations = _any_groups(values, sizes, group_eps, ddof, rounding)
    if scale == "batch":
        valid = values[~np.isnan(values)]
        spread = float((valid - valid[0]).std(ddof=ddof)) if len(valid) > ddof else 0.0
        deviations *= 1 / (spread + eps) if spread > 0 else 0.0
    return deviations


def _equal_groups(
    values: Floats, size: int, eps: float | None, ddof: int, rounding: _Rounding
) -> Floats | None:
    """Normalize groups of one size in few passes; None when a reward is NaN or infinite."""
    rows = values.reshape(-1, size)
    with np.errstate(invalid="ignore", over="ignore"):
        # Relative to the group's first reward: a group of equal rewards is then exactly zero, which
        # R - mean(R) is not (the mean of three times 0.1 is 0.10000000000000002). einsum, not a
        # product with ones: BLAS would let a group's last bit depend on how many groups there are.
        deviations = rows - rows[:, :1]
        mean = np.einsum("ij->i", deviations)
        if not math.isfinite(np.add.reduce(mean)):
            return None
        mean /= size
        deviations -= mean[:, None]
        squares = np.einsum("ij,ij->i", deviations, deviations)
        # A spread s gives squares between s^2 / 2 and size s^2 / 4, which decides almost always.
        constant = squares <= ZERO_SPREAD**2 / 2
        unsure = squares <= size * rounding.largest() ** 2
        unsure ^= constant
        if unsure.any():
            tolerances = rounding.tolerances(np.repeat(unsure, size))
            lengths = np.full(int(unsure.sum()), size, dtype=np.intp)
            constant[unsure] = _constant(rows[unsure].reshape(-1), tolerances, lengths)
        if constant.any():
            deviations[constant] = 0
        if eps is not None:
            deviations *= _inverse_spread(squares, max(size - ddof, 0), eps)[:, None]
    return deviations.reshape(-1)


def _any_groups(
    values: Floats, sizes: Sizes, eps: float | None, ddof: int, rounding: _Rounding
) -> Floats:
    """Normalize groups of any sizes, with abstentions, by segmented reductions."""
    lengths = group_lengths(sizes, len(values))
    starts = np.cumsum(lengths) - lengths
    valid = ~np.isnan(values)
    counts = np.add.reduceat(valid.astype(values.dtype), starts)
    # Relative to the group's lowest reward, for the reason given in _equal_groups.
    lowest = np.minimum.reduceat(np.where(valid, values, np.inf), starts)
    deviations = np.where(valid, values - np.repeat(lowest, lengths), 0)
    mean = np.add.reduceat(deviations, starts) / np.maximum(counts, 1)
    counted = valid & ~np.repeat(_constant(values, rounding.tolerances(), lengths), lengths)
    deviations = np.where(counted, deviations - np.repeat(mean, lengths), 0)
    if eps is not None:
        squares = np.add.reduceat(deviations * deviations, starts)
        inverse = _inverse_spread(squares, np.maximum(counts - ddof, 0), eps)
        deviations *= np.repeat(inverse, lengths)
    return deviations.astype(values.dtype, copy=False)


def _inverse_spread(squares: Floats, freedom: int | Floats, eps: float) -> Floats:
    """Return 1 / (std + eps) per group; 0 without a spread or with too few rows."""
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = np.sqrt(squares / freedom)
        inverse = 1 / (spread + eps)
    inverse[~((spread > 0) & (spread < np.inf))] = 0
    return inverse


def _check_settings(scale: str, eps: float, ddof: int) -> None:
    if scale not in get_args(Scale):
        choices = ", ".join(get_args(Scale))
        raise ConfigError(f"scale: expected one of {choices}, got {scale!r}; choose one of them")
    if not 0 <= eps < math.inf:
        raise ConfigError(f"eps: expected a finite number >= 0, got {eps!r}; the default is 1e-4")
    if isinstance(ddof, bool) or not isinstance(ddof, int) or ddof < 0:  # pyright: ignore[reportUnnecessaryIsInstance] -- a caller may not check types
        raise ConfigError(f"ddof: expected an int >= 0, got {ddof!r}; 1 is the unbiased variance")

"""Converts rewards to group-relative advantages, by numpy; torch tensors are copied to the host.

A reward of NaN (None in a list) is an abstention: the reward function does not rate that row.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args, overload

import numpy as np
import numpy.typing as npt

from evo_grpo.errors import ConfigError, RewardError, ShapeError
from evo_grpo.schema.validation import LARGEST_REWARD as LARGEST

if TYPE_CHECKING:
    import torch

RewardList: TypeAlias = Sequence[float | None] | Sequence[Sequence[float | None]]
Rewards: TypeAlias = "RewardList | npt.NDArray[Any] | torch.Tensor"
Weights: TypeAlias = "Sequence[float] | npt.NDArray[Any] | torch.Tensor | None"
GroupSize: TypeAlias = "int | Sequence[int] | npt.NDArray[np.integer[Any]]"
Floats: TypeAlias = "npt.NDArray[np.floating[Any]]"
Sizes: TypeAlias = "int | npt.NDArray[np.intp]"
"""One size for all groups, or one size per group."""
Scale = Literal["group", "batch", "none"]

ZERO_SPREAD = 1e-8
"""Rewards of one group at most this far apart count as equal, whatever their magnitude: they would
teach next to nothing, because an eps of 1e-4 is added to their spread."""

ROUNDING_TERMS = 3
"""A reward counts as a sum of at least this many terms: its function may have added some."""


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
    """Convert rewards to advantages relative to their group.

    "group" is DeepSeekMath (arXiv:2402.03300) section 4.1.2, outcome supervision; "none" leaves out
    the division, as Dr. GRPO (arXiv:2503.20783) argues; "batch" divides by the spread of the batch.

    Args:
        rewards: (B,) or, one column per reward function, (B, K); rows of a group are neighbours. A
            list, numpy array or torch tensor (any device; computed on the host). NaN, or None in a
            list, abstains.
        group_size: One size that divides B, or the sizes of all groups in order, which sum to B.
        scale: Divide by the standard deviation of the "group" or of the "batch"; "none" divides by
            nothing.
        weights: (K,) weight of each reward function, default 1 for each; only with (B, K) rewards.
        eps: Added to the standard deviation, in units of reward, >= 0.
        ddof: Delta degrees of freedom of the standard deviation, >= 0; 1 is the unbiased variance.

    Returns:
        (B,) advantages, of the type of `rewards`: list of float, numpy array or torch tensor, in
        the float dtype of the rewards (integers become float64 in numpy, the default dtype in
        torch). A row where every function abstains gets 0 and does not enter mean and standard
        deviation. With every scale, the groups that `zero_variance_groups` finds get exactly 0.

    Raises:
        ShapeError: The shapes of rewards, weights and group_size do not match.
        ConfigError: scale, eps or ddof is out of range.
        RewardError: A reward, or the sum of a row's weighted magnitudes, is infinite or beyond
            1e15, or the half precision of the rewards cannot hold an advantage.
    """
    _check_settings(scale, eps, ddof)
    values, restore = to_numpy(rewards)
    sizes = group_sizes(group_size, len(values))
    coefficients = reward_weights(values, weights)
    totals = combined(values, coefficients)
    tolerances = _tolerances(values, coefficients)
    return restore(_normalize(totals, sizes, scale, eps, ddof, tolerances))


def zero_variance_groups(
    rewards: Rewards, group_size: GroupSize, *, weights: Weights = None
) -> npt.NDArray[np.bool_]:
    """Find the groups whose rewards are equal up to rounding, so that they give no gradient.

    Rewards are equal if maximum - minimum is at most 1e-8 + c e m, which bounds the rounding of a
    sum of K weighted rewards. Here e is the machine epsilon of the rewards' dtype, m is the largest
    sum over k of |w_k R_k| of a row of the group, and c is 8, or 2 (K + 1) for more than three
    reward functions.

    Arguments and errors are those of `group_advantages`. Returns (number of groups,) numpy bool,
    also True for a group in which at most one row has a reward.
    """
    values, _ = to_numpy(rewards)
    sizes = group_sizes(group_size, len(values))
    coefficients = reward_weights(values, weights)
    totals = combined(values, coefficients)
    if not len(totals):
        return np.zeros(0, dtype=np.bool_)
    tolerances = _tolerances(values, coefficients)
    return _constant(totals, tolerances, group_lengths(sizes, len(totals)))


def zero_variance_fraction(
    rewards: Rewards, group_size: GroupSize, *, weights: Weights = None
) -> float:
    """Return the fraction of groups that `zero_variance_groups` finds; 0 if there are none."""
    dead = zero_variance_groups(rewards, group_size, weights=weights)
    return float(dead.mean()) if dead.size else 0.0


def _tolerances(rewards: Floats, weights: Floats | None) -> Floats:
    """Return the rounding tolerance (B,) of weighted sums; see `zero_variance_groups`.

    Rewards are (B,) without weights, or (B, K) with weights (K,); NaN counts as 0.
    """
    magnitudes = np.abs(np.nan_to_num(rewards))
    terms = 1
    if weights is not None:
        magnitudes, terms = magnitudes @ np.abs(weights), len(weights)
    relative = 2 * (max(terms, ROUNDING_TERMS) + 1) * float(np.finfo(rewards.dtype).eps)
    return ZERO_SPREAD + relative * magnitudes


def _constant(
    totals: Floats, tolerances: Floats, lengths: npt.NDArray[np.intp]
) -> npt.NDArray[np.bool_]:
    """Return, for each group, whether its totals are equal up to rounding; NaN is ignored."""
    starts = np.cumsum(lengths) - lengths
    abstains = np.isnan(totals)
    highest = np.maximum.reduceat(np.where(abstains, -np.inf, totals), starts)
    lowest = np.minimum.reduceat(np.where(abstains, np.inf, totals), starts)
    # The spread of a group in which all abstain is -inf.
    return highest - lowest <= np.maximum.reduceat(tolerances, starts)


def _normalize(
    values: Floats, sizes: Sizes, scale: Scale, eps: float, ddof: int, tolerances: Floats
) -> Floats:
    """Subtract the group's mean from rewards `values` (B,), and divide as `scale` says."""
    if not len(values):
        return values.copy()
    group_eps = eps if scale == "group" else None
    deviations = _deviations(values, sizes, group_eps, ddof, tolerances)
    if scale == "batch":
        valid = values[~np.isnan(values)]
        spread = float((valid - valid[0]).std(ddof=ddof)) if len(valid) > ddof else 0.0
        deviations *= 1 / (spread + eps) if spread > 0 else 0.0
    return deviations


def _deviations(
    values: Floats, sizes: Sizes, eps: float | None, ddof: int, tolerances: Floats
) -> Floats:
    """Subtract the group's mean; unless `eps` is None, divide by std + `eps`. NaN becomes 0."""
    lengths = group_lengths(sizes, len(values))
    starts = np.cumsum(lengths) - lengths
    valid = ~np.isnan(values)
    counts = np.add.reduceat(valid.astype(values.dtype), starts)
    # Relative to the group's lowest reward: a group of equal rewards is then exactly zero, which
    # R - mean(R) is not (the mean of three times 0.1 is 0.10000000000000002).
    lowest = np.minimum.reduceat(np.where(valid, values, np.inf), starts)
    deviations = np.where(valid, values - np.repeat(lowest, lengths), 0)
    mean = np.add.reduceat(deviations, starts) / np.maximum(counts, 1)
    counted = valid & ~np.repeat(_constant(values, tolerances, lengths), lengths)
    deviations = np.where(counted, deviations - np.repeat(mean, lengths), 0)
    if eps is not None:
        squares = np.add.reduceat(deviations * deviations, starts)
        inverse = _inverse_spread(squares, np.maximum(counts - ddof, 0), eps)
        deviations *= np.repeat(inverse, lengths)
    return deviations.astype(values.dtype, copy=False)


def _inverse_spread(squares: Floats, freedom: int | Floats, eps: float) -> Floats:
    """Return 1 / (std + eps) per group; 0 if std = sqrt(squares / freedom) is 0, inf or NaN."""
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = np.sqrt(squares / freedom)
        inverse = 1 / (spread + eps)
    inverse[~((spread > 0) & (spread < np.inf))] = 0
    return inverse


def _check_settings(scale: object, eps: float, ddof: object) -> None:
    scales = get_args(Scale)
    for name, value, good, expected in (
        ("scale", scale, scale in scales, f"one of {', '.join(scales)}"),
        ("eps", eps, 0 <= eps < math.inf, "a finite number >= 0, such as 1e-4"),
        ("ddof", ddof, type(ddof) is int and ddof >= 0, "an int >= 0; 1 is the unbiased variance"),
    ):
        if not good:
            raise ConfigError(f"{name}: expected {expected}, got {value!r}")


def combined(values: Floats, weights: Floats | None) -> Floats:
    """Return the sum (B,) of rewards (B, K) times weights (K,); NaN where all functions abstain.

    Rewards (B,) are returned unchanged. A reward, or a sum of a row's weighted magnitudes, beyond
    `LARGEST` raises RewardError.
    """
    refuse_unusable(values)  # before a weight of 0 turns it into NaN, an abstention
    if weights is None:
        return values
    # Magnitudes, because two rewards that are too large could cancel, also to NaN.
    check_weighted_rewards(np.abs(np.nan_to_num(values)), np.abs(weights))
    total = values @ weights
    if not np.isnan(total).any():
        return total
    abstains = np.isnan(values)
    total = np.where(abstains, 0, values) @ weights
    total[abstains.all(axis=1)] = np.nan
    return total


def group_lengths(sizes: Sizes, rows: int) -> npt.NDArray[np.intp]:
    """Return the size of each group."""
    if isinstance(sizes, int):
        return np.full(rows // sizes, sizes, dtype=np.intp)
    return sizes


def group_sizes(group_size: GroupSize, rows: int) -> Sizes:
    """Check group sizes against `rows`; return one int if all are the same, else an array."""
    if isinstance(group_size, (int, np.integer)) and not isinstance(group_size, bool):
        if group_size >= 1 and rows % group_size == 0:
            return int(group_size)
    else:
        sizes = np.asarray(group_size)
        flat = sizes.ndim == 1 and (sizes.dtype.kind in "iu" or not sizes.size)
        if flat and not sizes.size and not rows:
            return 1
        if flat and sizes.size and int(sizes.min()) >= 1 and int(sizes.sum()) == rows:
            return int(sizes[0]) if (sizes == sizes[0]).all() else sizes.astype(np.intp)
    raise ShapeError(
        f"group_size: expected the completions of a prompt, an int >= 1 that divides the {rows} "
        f"rows of rewards, or one such int per group that sum to them, got {group_size!r:.200}"
    )


def reward_weights(values: Floats, weights: Weights) -> Floats | None:
    """Return the weights (K,) of rewards (B, K), 1 by default; None for rewards (B,)."""
    functions = values.shape[1] if values.ndim == 2 else 0
    if weights is None:
        return np.ones(functions, dtype=values.dtype) if functions else None
    coefficients, _ = to_numpy(weights, "weights")
    fits = functions > 0 and coefficients.shape == (functions,)
    if not fits or not (np.abs(coefficients) <= LARGEST).all():
        raise ShapeError(
            f"weights: expected a number from -{LARGEST:g} to {LARGEST:g} for each column of "
            f"rewards (B, K), and None with rewards (B,), got {coefficients.tolist()!r:.200} with "
            f"rewards of shape {values.shape}"
        )
    return coefficients.astype(values.dtype, copy=False)


def to_numpy(
    values: Rewards | Sequence[float], name: str = "rewards"
) -> tuple[Floats, Callable[[Floats], object]]:
    """Convert `values` to a float array; also return the function that converts a result back."""
    torch = sys.modules.get("torch")  # a tensor exists only where torch is imported
    if torch is not None and isinstance(values, torch.Tensor):
        tensor, restore = _from_torch(cast("torch.Tensor", values))
        return _checked(tensor, name), restore
    if isinstance(values, np.ndarray):
        dtype = values.dtype
        if dtype.kind == "f" and dtype.itemsize in (4, 8):
            return _checked(values, name), lambda result: result
        # Half precision is too coarse for the sums.
        narrow = dtype if dtype.kind == "f" else np.dtype(np.float64)
        return _checked(as_floats(values, name), name), lambda result: _narrowed(result, narrow)
    return _checked(as_floats(values, name), name), lambda result: result.tolist()


def _from_torch(tensor: torch.Tensor) -> tuple[Floats, Callable[[Floats], object]]:
    import torch  # lists and arrays need none of it

    dtype = tensor.dtype if tensor.is_floating_point() else torch.get_default_dtype()
    # numpy has no bfloat16, and half precision is too coarse for the sums.
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    host = tensor.detach().to(device="cpu", dtype=wide).numpy()

    def restore(result: Floats) -> object:
        if dtype.itemsize < 4:
            _refuse_wider(result, torch.finfo(dtype).max, dtype)
        return torch.from_numpy(result).to(device=tensor.device, dtype=dtype)

    return host, restore


def _narrowed(result: Floats, dtype: np.dtype[Any]) -> Floats:
    _refuse_wider(result, float(np.finfo(dtype).max), dtype)
    return result.astype(dtype)


def _refuse_wider(result: Floats, most: float, dtype: object) -> None:
    """Raise RewardError if advantages exceed the range of the rewards' dtype."""
    largest = float(np.abs(result).max(initial=0.0))
    if largest > most:
        raise RewardError(
            f"rewards: expected advantages of at most {most:g}, which {dtype} holds, got "
            f"{largest:g}; give the rewards in float32"
        )


def as_floats(values: object, name: str) -> npt.NDArray[np.float64]:
    """Convert lists, an array or a tensor of numbers to a float64 array; None becomes NaN."""
    tolist = getattr(values, "tolist", None)  # of a tensor, also on a device or in half precision
    try:
        return np.asarray(tolist() if callable(tolist) else values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ShapeError(
            f"{name}: expected numbers, or None to abstain, in rows of equal length, got "
            f"{values!r:.200}; give one list per row with one entry per reward function"
        ) from error


def _checked(values: Floats, name: str) -> Floats:
    if values.ndim not in (1, 2) or (values.ndim == 2 and values.shape[1] == 0):
        raise ShapeError(
            f"{name}: expected shape (B,) or (B, K), got {values.shape}; give one reward per "
            "completion, or one column per reward function"
        )
    return values


def refuse_unusable(values: Floats) -> None:
    """Raise RewardError for the first reward that is infinite or beyond `LARGEST`."""
    if not values.size:
        return
    # fmax and fmin pass NaN over, and need no array beside the rewards.
    highest, lowest = np.fmax.reduce(values, axis=None), np.fmin.reduce(values, axis=None)
    if highest > LARGEST or lowest < -LARGEST:
        index = tuple(int(i) for i in np.argwhere(np.abs(values) > LARGEST)[0])
        got = float(values[index])
        bounds = f" from -{LARGEST:g} to {LARGEST:g}" if math.isfinite(got) else ""
        raise RewardError(
            f"rewards[{', '.join(map(str, index))}]: expected a finite number{bounds}, or NaN to "
            f"abstain, got {got!r}; clip the reward function or let it return None"
        )


def check_weighted_rewards(magnitudes: Floats, weights: Floats) -> None:
    """Raise RewardError for the first row whose weighted sum of magnitudes exceeds `LARGEST`."""
    heavy = magnitudes @ weights > LARGEST
    if heavy.any():
        row = int(heavy.argmax())
        terms = magnitudes[row] * weights
        worst = int(terms.argmax())
        raise RewardError(
            f"rewards[{row}]: expected weighted rewards of at most {LARGEST:g} in sum, got "
            f"{float(terms.sum()):g}, most of it from reward function {worst} of weight "
            f"{float(weights[worst]):g}; lower the weights"
        )

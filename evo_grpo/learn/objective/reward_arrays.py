"""Input of `group_advantages`, checked and turned into numpy arrays; torch only for a tensor."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from evo_grpo.errors import RewardError, ShapeError
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


def combined(values: Floats, weights: Floats | None) -> Floats:
    """Sum the weighted reward functions of (B, K) rewards; NaN where all of them abstain.

    A reward, weighted or not, that is infinite or beyond `LARGEST` raises RewardError.
    """
    refuse_unusable(values)  # before a weight of 0 turns it into NaN, an abstention
    if weights is None:
        return values
    # Magnitudes, because two rewards that are too large could cancel, also to NaN.
    refuse_heavy(np.abs(np.nan_to_num(values)), np.abs(weights))
    total = values @ weights
    if not np.isnan(total).any():
        return total
    abstains = np.isnan(values)
    total = np.where(abstains, 0, values) @ weights
    total[abstains.all(axis=1)] = np.nan
    return total


def group_lengths(sizes: Sizes, rows: int) -> npt.NDArray[np.intp]:
    """Return one size per group."""
    if isinstance(sizes, int):
        return np.full(rows // sizes, sizes, dtype=np.intp)
    return sizes


def group_sizes(group_size: GroupSize, rows: int) -> Sizes:
    """Return one int if all groups have the same size, else the array of sizes."""
    if isinstance(group_size, (int, np.integer)) and not isinstance(group_size, bool):
        size = int(group_size)
        if size < 1:
            raise ShapeError(
                f"group_size: expected at least 1, got {size}; give the number of completions per "
                "prompt"
            )
        if rows % size:
            raise ShapeError(
                f"rewards: expected a multiple of group_size = {size} rows, got {rows}; give the "
                "sizes of all groups as group_size if they differ"
            )
        return size
    given = np.asarray(group_size)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ShapeError(
            f"group_size: expected an int or a flat sequence of ints, got {group_size!r}; one int "
            "per group"
        )
    if given.size and int(given.min()) < 1:
        raise ShapeError(
            f"group_size: expected sizes of at least 1, got {int(given.min())} at position "
            f"{int(given.argmin())}; leave empty groups out"
        )
    if int(given.sum()) != rows:
        raise ShapeError(
            f"group_size: expected sizes that sum to the {rows} rows of rewards, got a sum of "
            f"{int(given.sum())}; give one size per group, in the order of the rows"
        )
    if given.size and (given == given[0]).all():
        return int(given[0])
    return given.astype(np.intp) if given.size else 1


def reward_weights(values: Floats, weights: Weights) -> Floats | None:
    """Return the (K,) weights of (B, K) rewards, or None where there are no columns to weigh."""
    if values.ndim == 1:
        if weights is not None:
            raise ShapeError(
                f"weights: expected None with rewards of shape (B,) = {values.shape}, got "
                f"{weights!r}; give rewards of shape (B, K), one column per reward function"
            )
        return None
    functions = values.shape[1]
    if weights is None:
        return np.ones(functions, dtype=values.dtype)
    coefficients, _ = to_numpy(weights, "weights")
    if coefficients.shape != (functions,) or not (np.abs(coefficients) <= LARGEST).all():
        raise ShapeError(
            f"weights: expected finite numbers of shape (K,) = ({functions},), got "
            f"{coefficients.tolist()!r} of shape {coefficients.shape}; give one weight per reward "
            f"function, from -{LARGEST:g} to {LARGEST:g}"
        )
    return coefficients.astype(values.dtype, copy=False)


def to_numpy(
    values: Rewards | Sequence[float], name: str = "rewards"
) -> tuple[Floats, Callable[[Floats], object]]:
    """Return a float array, and the function that turns a result into the type of the input."""
    torch = sys.modules.get("torch")  # a tensor exists only where torch is imported
    if torch is not None and isinstance(values, torch.Tensor):
        tensor, restore = _from_torch(cast("torch.Tensor", values))
        return _checked(tensor, name), restore
    if isinstance(values, np.ndarray):
        dtype = values.dtype
        if dtype.kind == "f" and dtype.itemsize in (4, 8):
            return _checked(values, name), lambda result: result
        # Half precision is too coarse for the sums.
        kept = dtype if dtype.kind == "f" else np.dtype(np.float64)
        return _checked(as_floats(values, name), name), lambda result: _narrowed(result, kept)
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
    """Refuse advantages that the dtype of the rewards cannot hold."""
    largest = float(np.abs(result).max(initial=0.0))
    if largest > most:
        raise RewardError(
            f"rewards: expected advantages of at most {most:g}, which {dtype} holds, got "
            f"{largest:g}; give the rewards in float32"
        )


def as_floats(values: object, name: str) -> npt.NDArray[np.float64]:
    """Return numbers in lists, an array or a tensor as float64; None becomes NaN."""
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
    """Refuse rewards that are infinite or beyond `LARGEST`, naming the first; NaN abstains."""
    if not values.size:
        return
    # fmax and fmin pass NaN over, and need no array beside the rewards.
    highest, lowest = np.fmax.reduce(values, axis=None), np.fmin.reduce(values, axis=None)
    if highest > LARGEST or lowest < -LARGEST:
        where = tuple(int(i) for i in np.argwhere(np.abs(values) > LARGEST)[0])
        got = float(values[where])
        bounds = f" from -{LARGEST:g} to {LARGEST:g}" if math.isfinite(got) else ""
        raise RewardError(
            f"rewards[{', '.join(map(str, where))}]: expected a finite number{bounds}, or NaN to "
            f"abstain, got {got!r}; clip the reward function or let it return None"
        )


def refuse_heavy(magnitudes: Floats, weights: Floats) -> None:
    """Raise at the first row whose magnitudes (B, K) times weights (K,) exceed `LARGEST`."""
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

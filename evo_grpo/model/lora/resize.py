"""Changes of the rank, alpha and layers of a trained adapter that keep what it has learned.

An adapter adds s B A to a layer, where s is lora_alpha / r, or lora_alpha / sqrt(r) with rslora.

- A rank that grows appends zero columns to B and initial rows to A. The function stays, and the new
  columns of B have a gradient.
- A rank that shrinks takes the truncated singular value decomposition of B A, the nearest product
  of that rank (Eckart and Young 1936). Its singular values are divided evenly: B = U sqrt(S) and
  A = sqrt(S) V^T.
- A layer that is added begins with B = 0 and an initial A, so the function stays. One that is left
  out is lost.
- B is multiplied by s_old / s_new, so a change of alpha, or of the scale with the rank, changes no
  output.

Where B is zero in all layers, nothing has been learned yet: the adapter becomes a new one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from torch import Tensor

from evo_grpo.model.lora.configs import differences
from evo_grpo.model.lora.from_peft import trainable
from evo_grpo.model.lora.slots import AdapterSlots

_NEGLIGIBLE = 1e-7
"""Singular values below this part of the largest are rounding errors of float32."""


@dataclass(frozen=True)
class Resized:
    """The result of a change of rank, alpha or layers.

    Attributes:
        error: Relative error of what was cut, in the Frobenius norm over all layers; None if the
            function stayed.
        factors: Factor on each tensor that is the old one, by PEFT's file keys; it may have grown.
    """

    error: float | None
    factors: Mapping[str, float]


def with_rank(
    config: LoraConfig, run: LoraConfig, r: int | None, alpha: float | None
) -> LoraConfig:
    """Return a configuration with another rank and alpha; None keeps the rank.

    Args:
        config: The configuration.
        run: The configuration of the run. Without `alpha`, the alpha follows from it: in proportion
            to the rank, so that the scale alpha / r is the same for all ranks. With rslora it is
            that of the run, so that the scale is alpha / sqrt(r).
        r: The rank.
        alpha: The alpha.
    """
    made = copy.deepcopy(config)
    made.r = made.r if r is None else r
    if alpha is None:
        alpha = run.lora_alpha if run.use_rslora else run.lora_alpha * made.r / run.r
    made.lora_alpha = int(alpha) if float(alpha).is_integer() else alpha  # pyright: ignore[reportAttributeAccessIssue] -- PEFT types it as int and takes floats
    return made


def resize_slot(slots: AdapterSlots, name: str, config: LoraConfig) -> Resized | None:
    """Give a slot another rank, alpha or other layers; it then has new parameters.

    Returns:
        What became of its tensors; None if nothing changed.
    """
    if not differences(config, slots.lora_config(name)):
        return None
    before, old = slots.state(name), layer_scales(slots, name)
    slots.rebuild(name, trainable(config))
    fresh, new = slots.state(name), layer_scales(slots, name)
    if not any(bool(value.count_nonzero()) for key, value in before.items() if ".lora_B." in key):
        return Resized(None, {})
    state: dict[str, Tensor] = {}
    factors: dict[str, float] = {}
    lost, total, is_cut = 0.0, 0.0, False
    for first, second in layer_keys(before):
        if first not in fresh:
            energy = _energy(before[first], before[second]) * old[layer_of(first)] ** 2
            total, lost, is_cut = total + energy, lost + energy, True
    for first, second in layer_keys(fresh):
        if first not in before:
            state[first], state[second] = fresh[first], torch.zeros_like(fresh[second])
            continue
        a, b, wide = before[first], before[second], fresh[first]
        layer = layer_of(first)
        factor = old[layer] / new[layer]
        factor = 1.0 if math.isclose(factor, 1.0, rel_tol=1e-12) else factor
        if len(a) > len(wide):
            a, b, values = cut(a, b, wide)
            energies = values.square() * old[layer] ** 2
            total += float(energies.sum())
            lost += float(energies[len(wide) :].sum())
            is_cut = True
        else:
            total += _energy(a, b) * old[layer] ** 2
            a, b = grown(a, b, wide)
            factors |= {first: 1.0, second: factor}
        state[first], state[second] = a, b * factor
    slots.put(name, state, Path(name))
    error = math.sqrt(lost / total) if total else 0.0
    return Resized(error if is_cut else None, factors)


def grown(a: Tensor, b: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
    """Return A with further rows of `fresh`, and B with as many columns of zeros.

    Args:
        a: A (R, in).
        b: B (out, R).
        fresh: An initial A (R', in), R' >= R.
    """
    missing = len(fresh) - len(a)
    if not missing:
        return a, b
    return torch.cat([a, fresh[len(a) :]]), torch.nn.functional.pad(b, (0, missing))


def cut(a: Tensor, b: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the nearest product of a smaller rank, and the singular values of B A, sorted.

    A rank beyond that of the product gets an initial row of A and a zero column of B: both zero
    would never learn.

    Args:
        a: A (R, in).
        b: B (out, R).
        fresh: An initial A (R', in), R' <= R, in the dtype of the result.
    """
    # The R singular values of the product are those of a small matrix (R, R).
    left, upper = torch.linalg.qr(b.double())
    right, lower = torch.linalg.qr(a.double().T)
    product = upper @ lower.T
    if not product.isfinite().all():  # an agent that has failed
        broken = torch.full_like(fresh, math.nan)
        return broken, b.new_full((len(b), len(fresh)), math.nan), product.new_full((1,), math.nan)
    u, values, vh = torch.linalg.svd(product)
    values = values.clamp(min=0.0)
    rank = int((values[: len(fresh)] > _NEGLIGIBLE * values[0]).sum())
    root = values[:rank].sqrt()
    new_a, new_b = fresh.clone(), b.new_zeros(len(b), len(fresh))
    new_a[:rank] = (root[:, None] * (vh[:rank] @ right.T)).to(fresh.dtype)
    new_b[:, :rank] = ((left @ u[:, :rank]) * root).to(b.dtype)
    return new_a, new_b, values


def layer_keys(state: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Return the keys of A and B of each layer, by PEFT's file keys."""
    return [(key, key.replace(".lora_A.", ".lora_B.")) for key in state if ".lora_A." in key]


def layer_of(key: str) -> str:
    """Return the name in `AdapterSlots.layers` of the layer of an A."""
    return key.split(".lora_A.")[0]


def layer_scales(slots: AdapterSlots, name: str) -> dict[str, float]:
    """Return the scale s of each layer that a slot adapts, by the layer's name."""
    layers = slots.layers.items()
    return {key: float(layer.scaling[name]) for key, layer in layers if name in layer.scaling}


def _energy(a: Tensor, b: Tensor) -> float:
    """Return the squared Frobenius norm of B A."""
    a, b = a.double(), b.double()
    return float(((b.T @ b) * (a @ a.T)).sum())

"""Changes rank, alpha and layers of adapters, keeping their outputs; averages adapters.

An adapter adds s B A to a layer, where s is lora_alpha / r, or lora_alpha / sqrt(r) with rslora.

- A rank that grows appends zero columns to B and initial rows to A. The function stays, and the new
  columns of B have a gradient.
- A rank that shrinks takes the truncated singular value decomposition of B A, the nearest product
  of that rank (Eckart and Young 1936). Its singular values are divided evenly: B = U sqrt(S) and
  A = sqrt(S) V^T.
- A layer that is added begins with B = 0 and an initial A, so the function stays. The matrices of a
  layer that is left out are lost.
- B is multiplied by s_old / s_new, so a change of alpha, or of the scale with the rank, changes no
  output.

Where B is zero in all layers, nothing has been learned yet: the adapter becomes a new one.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from peft import LoraConfig
from torch import Tensor

from evo_grpo.model.lora.configs import differences, layer_of, with_targets
from evo_grpo.model.lora.load import copy_slot, fit_slot, trainable
from evo_grpo.model.lora.slots import AdapterSlots

_NEGLIGIBLE = 1e-7
"""Singular values below this part of the largest are rounding errors of float32."""


@dataclass(frozen=True)
class Resized:
    """The result of a change of rank, alpha or layers.

    Attributes:
        error: Relative error of the cut, in the Frobenius norm over all layers; None without a cut.
        factors: Factor applied to each kept or grown tensor, by PEFT's file keys.
    """

    error: float | None
    factors: Mapping[str, float]


def with_rank(
    config: LoraConfig, run: LoraConfig, r: int | None, alpha: float | None
) -> LoraConfig:
    """Return a configuration with rank `r` and `alpha`; `r` None keeps the rank.

    With `alpha` None, alpha is that of the run's configuration `run`, times the ratio of the ranks,
    so that the scale alpha / r is the same for all ranks. With rslora it is the alpha of the run.
    """
    changed = copy.deepcopy(config)
    changed.r = changed.r if r is None else r
    if alpha is None:
        alpha = run.lora_alpha if run.use_rslora else run.lora_alpha * changed.r / run.r
    changed.lora_alpha = int(alpha) if float(alpha).is_integer() else alpha  # pyright: ignore[reportAttributeAccessIssue] -- PEFT types it as int and takes floats
    return changed


def resize_slot(slots: AdapterSlots, name: str, config: LoraConfig) -> Resized | None:
    """Change the rank, alpha or layers of a slot, with new parameters; None if nothing changed."""
    if not differences(config, slots.lora_config(name)):
        return None
    old_state, old_scales = slots.state(name), layer_scales(slots, name)
    slots.rebuild(name, trainable(config))
    initial, new_scales = slots.state(name), layer_scales(slots, name)
    if not any(bool(v.count_nonzero()) for k, v in old_state.items() if ".lora_B." in k):
        return Resized(None, {})
    state: dict[str, Tensor] = {}
    factors: dict[str, float] = {}
    total = lost = 0.0  # squared norms of the products s B A
    is_cut = False
    for key_a, key_b in layer_keys(old_state):
        if key_a not in initial:
            energy = _energy(old_state[key_a], old_state[key_b]) * old_scales[layer_of(key_a)] ** 2
            total, lost, is_cut = total + energy, lost + energy, True
    for key_a, key_b in layer_keys(initial):
        if key_a not in old_state:
            state[key_a], state[key_b] = initial[key_a], torch.zeros_like(initial[key_b])
            continue
        a, b, initial_a = old_state[key_a], old_state[key_b], initial[key_a]
        layer = layer_of(key_a)
        factor = old_scales[layer] / new_scales[layer]
        factor = 1.0 if math.isclose(factor, 1.0, rel_tol=1e-12) else factor
        if len(a) > len(initial_a):
            a, b, values = cut(a, b, initial_a)
            energies = values.square() * old_scales[layer] ** 2
            total += float(energies.sum())
            lost += float(energies[len(initial_a) :].sum())
            is_cut = True
        else:
            total += _energy(a, b) * old_scales[layer] ** 2
            a, b = grown(a, b, initial_a)
            factors |= {key_a: 1.0, key_b: factor}
        state[key_a], state[key_b] = a, b * factor
    slots.put(name, state)
    error = math.sqrt(lost / total) if total else 0.0
    return Resized(error if is_cut else None, factors)


def grown(a: Tensor, b: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
    """Append rows of `fresh` to A (R, in), and as many zero columns to B (out, R); return both.

    `fresh` (R', in) is an initial A with R' >= R.
    """
    missing = len(fresh) - len(a)
    if not missing:
        return a, b
    return torch.cat([a, fresh[len(a) :]]), torch.nn.functional.pad(b, (0, missing))


def cut(a: Tensor, b: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return A and B of a smaller rank, nearest to B A, and the sorted singular values of B A.

    A is (R, in), B (out, R), and `fresh` an initial A (R', in), R' <= R, in the dtype of the
    result. If R' exceeds the rank of B A, the remaining rows of A are those of `fresh`, and the
    remaining columns of B are zero: if both were zero, neither would have a gradient.
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
    """Return the pair of PEFT's file keys of A and B for each layer."""
    return [(key, key.replace(".lora_A.", ".lora_B.")) for key in state if ".lora_A." in key]


def layer_scales(slots: AdapterSlots, name: str) -> dict[str, float]:
    """Return the scale s of each layer that a slot adapts, by the layer's name."""
    layers = slots.layers.items()
    return {key: float(layer.scaling[name]) for key, layer in layers if name in layer.scaling}


def _energy(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float(((b.T @ b) * (a @ a.T)).sum())


def mix_slots(slots: AdapterSlots, sources: Sequence[str], target: str) -> None:
    """Overwrite a slot with the mean A and the mean B of other slots, whose shapes are equal.

    For related agents, this is close to the mean of the products B A, with the same rank.
    """
    copy_slot(slots, sources[0], target)
    states = [slots.state(name) for name in sources]
    mean = {key: torch.stack([s[key] for s in states]).mean(dim=0) for key in states[0]}
    slots.put(target, mean)


def mix_products(slots: AdapterSlots, sources: Sequence[str], target: str) -> None:
    """Write the mean of the products s B A of two or more slots to another slot.

    The mean of A and of B (`mix_slots`) depends on how the products are factored. The target gets
    the configuration of the source with the largest rank, and the modules of all sources. The mean,
    whose rank is the sum of their ranks, is cut to the largest rank. The product of a source is
    zero in modules that it does not adapt. The decompositions run on the CPU in float64.
    """
    widest = max(sources, key=lambda name: slots.lora_config(name).r)
    states = [slots.state(name) for name in sources]
    scales = [layer_scales(slots, name) for name in sources]
    modules = set().union(*map(slots.modules, sources))
    if modules == slots.modules(widest):
        copy_slot(slots, widest, target)
    else:
        fit_slot(slots, target, with_targets(slots.lora_config(widest), modules))
    initial, target_scales = slots.state(target), layer_scales(slots, target)
    mean: dict[str, Tensor] = {}
    for key_a, key_b in layer_keys(initial):
        layer, initial_a, zero_b = layer_of(key_a), initial[key_a], torch.zeros_like(initial[key_b])
        downs = [state.get(key_a, initial_a) for state in states]
        ups = [
            state.get(key_b, zero_b) * (source_scales.get(layer, 1.0) / len(sources))
            for state, source_scales in zip(states, scales, strict=True)
        ]
        a, b, _ = cut(torch.cat(downs), torch.cat(ups, dim=1), initial_a)
        a, b = _balance(a, b, initial_a)
        mean[key_a], mean[key_b] = a, (b / target_scales[layer]).to(initial[key_b].dtype)
    slots.put(target, mean)


def _balance(a: Tensor, b: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Scale A to about the size of `like`, and B by the inverse, so that B A is unchanged.

    The size of A determines how fast AdamW changes B A. The factor is a power of two.
    """
    size, target_size = float(a.norm()), float(like.norm())
    if not (size > 0 and target_size > 0 and math.isfinite(size / target_size)):
        return a, b
    factor = 2.0 ** round(math.log2(target_size / size))
    return a * factor, b / factor

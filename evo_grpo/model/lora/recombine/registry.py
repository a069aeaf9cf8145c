"""The operators that `evolve.recombine` can name. A new one is a module here and a line below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evo_grpo.model.lora.recombine.average import average
from evo_grpo.model.lora.recombine.layer_wise import layer_wise
from evo_grpo.model.lora.recombine.svd_subspace import svd_subspace

if TYPE_CHECKING:
    from evo_grpo.model.lora.recombine.protocol import Operator

OPERATORS: dict[str, Operator] = {
    "average": average,
    "svd_subspace": svd_subspace,
    "layer_wise": layer_wise,
}
"""The operators on two parents, by name."""

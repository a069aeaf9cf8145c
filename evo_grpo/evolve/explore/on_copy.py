"""Explorations without draws: one lowers the lr of copies, the other one changes nothing."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from typing import TYPE_CHECKING, ClassVar, Literal, final

from evo_grpo.evolve.explore.step import lower_lr
from evo_grpo.evolve.protocols import Candidate
from evo_grpo.schema.group import Group, setting
from evo_grpo.schema.hparams import Hparams

if TYPE_CHECKING:
    import numpy as np

    from evo_grpo.schema.search_space import HyperparameterConfig


@final
class LowerLROnCopy(Group):
    """A copy trains with its parent's lr times `factor`; survivors keep all their values.

    Early winners often have learning rates that are too high to train with for long, so copies
    should lower them. The lr stays inside its range; if lr has no range, it can fall to 1e-30.
    """

    copies_only: ClassVar[bool] = True
    kind: Literal["on_copy"] = setting(
        "on_copy", "A copy lowers the lr; survivors keep their values."
    )
    factor: float = setting(0.5, "Factor on the lr of a copy.", gt=0, lt=1)

    def explore(
        self, candidate: Candidate, hp_config: "HyperparameterConfig", rng: "np.random.Generator"
    ) -> Hparams:
        """Lower the lr of a copy; nothing is drawn."""
        del rng
        if not candidate.copied:
            return candidate.hparams
        return lower_lr(candidate.hparams, self.factor, hp_config)


@final
class NoExploration(Group):
    """Changes no hyperparameters."""

    kind: Literal["none"] = setting("none", "Nothing changes.")

    def explore(
        self, candidate: Candidate, hp_config: "HyperparameterConfig", rng: "np.random.Generator"
    ) -> Hparams:
        """Return the candidate's hyperparameters unchanged; nothing is drawn."""
        del hp_config, rng
        return candidate.hparams

"""No exploration: agents keep their hyperparameters, and copies take those of their parent."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from typing import TYPE_CHECKING, Literal, final

from evo_grpo.evolve.protocols import Candidate, Changes
from evo_grpo.schema.group import Group, setting
from evo_grpo.schema.hparams import Hparams

if TYPE_CHECKING:
    import numpy as np

    from evo_grpo.schema.search_space import HyperparameterConfig


@final
class NoExploration(Group):
    """Changes no hyperparameters."""

    kind: Literal["none"] = setting("none", "Nothing changes.")

    def explore(
        self, candidate: Candidate, hp_config: "HyperparameterConfig", rng: "np.random.Generator"
    ) -> tuple[Hparams, Changes]:
        """Return the candidate's own hyperparameters; nothing is drawn."""
        del hp_config, rng
        return candidate.hparams, {}

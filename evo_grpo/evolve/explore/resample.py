"""Resampling, which draws some hyperparameters of a copy again and moves the others."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from typing import TYPE_CHECKING, ClassVar, Literal, final

from evo_grpo.evolve.explore.step import in_order, put, step
from evo_grpo.evolve.protocols import Candidate
from evo_grpo.evolve.ranges import draw_value, parts
from evo_grpo.schema.group import Group, setting
from evo_grpo.schema.hparams import Hparams

if TYPE_CHECKING:
    import numpy as np

    from evo_grpo.schema.search_space import HyperparameterConfig


@final
class Resample(Group):
    """Draws each hyperparameter of a copy again with `probability`, else moves it by a factor.

    This is the exploration of population-based training (Jaderberg et al. 2017, arXiv:1711.09846).
    Draws are log-uniform over the whole range, or uniform if its minimum is 0. The factors are the
    `shrink_factor` and `grow_factor` of the range, by default 0.8 and 1.2. With `choices`, a draw
    takes any choice; a move takes the next higher or lower number, and leaves names as they are.
    Survivors keep their values.
    """

    copies_only: ClassVar[bool] = True
    kind: Literal["resample"] = setting(
        "resample", "A copy draws or moves each of its hyperparameters."
    )
    probability: float = setting(
        0.25, "Probability that a value is drawn anew instead of moved by a factor.", ge=0, le=1
    )

    def explore(
        self, candidate: Candidate, hp_config: "HyperparameterConfig", rng: "np.random.Generator"
    ) -> Hparams:
        """Draw or move each hyperparameter of a copy; nothing is drawn for survivors.

        If a drawn end of a clip pair would give low >= high, the end moves by a factor instead.
        """
        hparams = candidate.hparams
        if not candidate.copied:
            return hparams
        for name, parameter in parts(hparams, hp_config.parameters):
            anew = rng.random() < self.probability
            value = draw_value(name, parameter, rng) if anew else None
            if value is not None and in_order(hparams, name, value):
                hparams = put(hparams, {name: value}, {name: parameter})
            elif not isinstance(hparams.get(name), str):
                hparams = step(hparams, name, parameter, rng.random())
        return hparams

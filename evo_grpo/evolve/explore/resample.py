"""Resampling: a copy draws some of its hyperparameters again and moves the others."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from typing import TYPE_CHECKING, ClassVar, Literal, cast, final

from evo_grpo.evolve.explore.protocol import Candidate, Changes
from evo_grpo.evolve.explore.step import parts, put, step
from evo_grpo.evolve.start import draw_value
from evo_grpo.schema.group import Group, setting
from evo_grpo.schema.hparams import CLIP_ENDS, Hparams, Value

if TYPE_CHECKING:
    import numpy as np

    from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter


@final
class Resample(Group):
    """A copy draws each hyperparameter anew with `probability`, else moves it by a factor.

    This is the exploration of population-based training (Jaderberg et al. 2017, arXiv:1711.09846).
    Draws are log-uniform over the whole range, or uniform if its minimum is 0. The factors are
    those of the range, by default 0.8 and 1.2. Of `choices`, a value is drawn anew, or a number
    moves to the next one and a name stays. Survivors keep their values.
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
    ) -> tuple[Hparams, Changes]:
        """Draw or move each hyperparameter of a copy; see `Explorer`.

        Nothing is drawn for survivors. If a drawn end of a clip pair would give low >= high, the
        end moves by a factor instead.
        """
        hparams = candidate.hparams
        changes: Changes = {}
        if not candidate.copied:
            return hparams, changes
        for name, parameter in parts(hparams, hp_config):
            anew = rng.random() < self.probability
            value = _draw(hparams, name, parameter, rng) if anew else None
            if value is None and isinstance(hparams.get(name), str | bool):
                continue
            if value is None:
                hparams, change = step(hparams, name, parameter, rng.random())
            else:
                hparams, change = put(hparams, name, parameter, value)
            changes |= change
        return hparams, changes


def _draw(
    hparams: Hparams, name: str, parameter: "RLParameter", rng: "np.random.Generator"
) -> Value | None:
    """Draw a value; None for an end of a clip pair that would give low >= high."""
    drawn = draw_value(name, parameter, rng)
    if name not in CLIP_ENDS:
        return drawn
    (low, high), end = hparams.clip_bounds, cast("float", drawn)
    in_order = end < high if name == "clip_low" else low < end
    return end if in_order else None

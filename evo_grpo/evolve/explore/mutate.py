"""Mutation: at most one hyperparameter moves by a factor."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from typing import TYPE_CHECKING, Literal, Self, final

from pydantic import model_validator

from evo_grpo.evolve.clip_ends import end_of_distance
from evo_grpo.evolve.explore.protocol import Candidate, Changes
from evo_grpo.evolve.explore.step import step
from evo_grpo.schema.group import Group, setting
from evo_grpo.schema.hparams import CLIP_ENDS, Hparams
from evo_grpo.schema.problems import Problem, Problems

if TYPE_CHECKING:
    import numpy as np

    from evo_grpo.schema.search_space import HyperparameterConfig


@final
class Mutations(Group):
    """Moves one hyperparameter of an agent, or none. Only the ratio of the two weights matters."""

    kind: Literal["mutate"] = setting("mutate", "One hyperparameter of an agent moves, or none.")
    no_mutation: float = setting(0.2, "Weight of leaving an agent as it is.", ge=0)
    rl_hp: float = setting(0.8, "Weight of moving one of its hyperparameters.", ge=0)
    mutate_elite: bool = setting(False, "The best agent may mutate too.")
    copies_only: bool = setting(False, "Only copies mutate; survivors keep their values.")

    @model_validator(mode="after")
    def _some_weight(self) -> Self:
        if self.no_mutation + self.rl_hp == 0:
            text = "expected no_mutation or rl_hp above 0, got 0 for both; no_mutation: 1 alone "
            raise Problems(Problem((), text + "switches mutation off"))
        return self

    def explore(
        self, candidate: Candidate, hp_config: "HyperparameterConfig", rng: "np.random.Generator"
    ) -> tuple[Hparams, Changes]:
        """Move one hyperparameter with probability rl_hp / (no_mutation + rl_hp); see `Explorer`.

        Nothing is drawn for the elite unless `mutate_elite` is set, nor for survivors if
        `copies_only` is set. A pair-valued clip_coef moves at one end, by its distance from 1. The
        range of clip_coef is that of the distance; the ranges of clip_low and clip_high are those
        of the ratio bounds. A batch_size of None (all rows) counts as the maximum of its range.
        """
        hparams, names = candidate.hparams, hp_config.names()
        if not names or (candidate.elite and not self.mutate_elite):
            return hparams, {}
        if self.copies_only and not candidate.copied:
            return hparams, {}
        if rng.random() * (self.no_mutation + self.rl_hp) >= self.rl_hp:
            return hparams, {}
        name = names[int(rng.integers(len(names)))]
        parameter = hp_config[name]
        if name == "clip_coef" and isinstance(hparams.clip_coef, tuple):
            name = CLIP_ENDS[int(rng.integers(2))]
            parameter = end_of_distance(name, parameter)
        return step(hparams, name, parameter, rng.random())

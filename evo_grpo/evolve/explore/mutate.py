"""Mutation: at most one hyperparameter moves by a factor."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from typing import TYPE_CHECKING, Literal, Self, final

from pydantic import model_validator

from evo_grpo.evolve.distance import end_of_distance
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
    rl_hp: float = setting(0.8, "Weight of moving one of its hyperparameters in a range.", ge=0)
    choice: float = setting(
        0.2, "Weight of taking another one of the `choices` of a hyperparameter.", ge=0
    )
    mutate_elite: bool = setting(False, "The best agent may mutate too.")
    copies_only: bool = setting(False, "Only copies mutate; survivors keep their values.")

    @model_validator(mode="after")
    def _some_weight(self) -> Self:
        # The default of `choice` is no weight that anybody gave: most searches have no choices.
        choice = self.choice if "choice" in self.model_fields_set else 0
        if self.no_mutation + self.rl_hp + choice == 0:
            text = "expected no_mutation or rl_hp above 0, got 0 for both; no_mutation: 1 with "
            raise Problems(Problem((), text + "rl_hp: 0 and choice: 0 switches mutation off"))
        return self

    def explore(
        self, candidate: Candidate, hp_config: "HyperparameterConfig", rng: "np.random.Generator"
    ) -> tuple[Hparams, Changes]:
        """Move one hyperparameter with the probability that the weights give; see `Explorer`.

        `rl_hp` counts where a hyperparameter has a range, `choice` where one has choices.
        Nothing is drawn for the elite unless `mutate_elite` is set, nor for survivors if
        `copies_only` is set. A pair-valued clip_coef moves at one end, by its distance from 1. The
        range of clip_coef is that of the distance; the ranges of clip_low and clip_high are those
        of the ratio bounds. A batch_size of None (all rows) counts as the maximum of its range.
        """
        hparams = candidate.hparams
        if not hp_config or (candidate.elite and not self.mutate_elite):
            return hparams, {}
        if self.copies_only and not candidate.copied:
            return hparams, {}
        ranges = [name for name in hp_config.names() if hp_config[name].choices is None]
        chosen = [name for name in hp_config.names() if hp_config[name].choices is not None]
        rl_hp, choice = bool(ranges) * self.rl_hp, bool(chosen) * self.choice
        drawn = rng.random() * (self.no_mutation + rl_hp + choice)
        if drawn >= rl_hp + choice:
            return hparams, {}
        names = ranges if drawn < rl_hp else chosen
        name = names[int(rng.integers(len(names)))]
        parameter = hp_config[name]
        if name == "clip_coef" and isinstance(hparams.clip_coef, tuple):
            name = CLIP_ENDS[int(rng.integers(2))]
            parameter = end_of_distance(name, parameter)
        return step(hparams, name, parameter, rng.random())

"""Mutation: one hyperparameter of an agent moves, or none."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from typing import TYPE_CHECKING, Literal, Self, final

from pydantic import model_validator

from evo_grpo.evolve.explore.step import between, in_order, put, step
from evo_grpo.evolve.protocols import Candidate
from evo_grpo.evolve.ranges import end_of_distance, parts, placed
from evo_grpo.schema.group import Group, setting
from evo_grpo.schema.hparams import CLIP_ENDS, Hparams
from evo_grpo.schema.problems import Problems

if TYPE_CHECKING:
    import numpy as np

    from evo_grpo.schema.search_space import HyperparameterConfig


@final
class Mutations(Group):
    """Moves one hyperparameter of an agent, or none: the three weights give the probabilities."""

    kind: Literal["mutate"] = setting("mutate", "One hyperparameter of an agent moves, or none.")
    no_mutation: float = setting(0.0, "Weight of leaving an agent as it is.", ge=0)
    rl_hp: float = setting(1.0, "Weight of moving one of its hyperparameters in a range.", ge=0)
    choice: float = setting(
        0.2, "Weight of taking another one of the `choices` of a hyperparameter.", ge=0
    )
    step: Literal["between", "factors"] = setting(
        "between",
        "How far a value in a range moves. `between`: to a value between those that agents have "
        "tried below and above it, so that steps are wide at first and become narrow; only agents "
        "mutate that would train with the values of another one: copies, and agents that began "
        "alike. `factors`: by `shrink_factor` or `grow_factor` of its range.",
    )
    mutate_elite: bool = setting(False, "The best agent may mutate too, with `factors`.")
    copies_only: bool = setting(
        False, "Only copies mutate, with `factors`; survivors keep their values."
    )

    @model_validator(mode="after")
    def _some_weight(self) -> Self:
        # Ignore the default of `choice`: most searches have no choices.
        choice = self.choice if "choice" in self.model_fields_set else 0
        if self.no_mutation + self.rl_hp + choice == 0:
            text = "expected no_mutation or rl_hp above 0, got 0 for both; no_mutation: 1 with "
            raise Problems.one(text + "rl_hp: 0 and choice: 0 switches mutation off")
        return self

    def explore(
        self, candidate: Candidate, hp_config: "HyperparameterConfig", rng: "np.random.Generator"
    ) -> Hparams:
        """Move one hyperparameter, or none, with the probabilities that the weights give.

        The weight `rl_hp` counts only if a hyperparameter has a range, and `choice` only if one has
        choices. If clip_coef is a pair, one of its ends moves, by its distance from 1. A batch_size
        of None (all rows) counts as the maximum of its range. With `step: between`, all
        hyperparameters move if all agents have had equal values so far.
        """
        hparams = candidate.hparams
        if not hp_config or not self._may_mutate(candidate):
            return hparams
        with_range = [name for name in hp_config.names() if hp_config[name].choices is None]
        with_choices = [name for name in hp_config.names() if hp_config[name].choices is not None]
        rl_hp, choice = bool(with_range) * self.rl_hp, bool(with_choices) * self.choice
        draw = rng.random() * (self.no_mutation + rl_hp + choice)
        if self.step == "between" and not any(t.hparams != hparams for t in candidate.trials):
            return self._move_all(candidate, hp_config)
        if draw >= rl_hp + choice:
            return hparams
        names = with_range if draw < rl_hp else with_choices
        name = names[int(rng.integers(len(names)))]
        parameter = hp_config[name]
        share = candidate.shares[hp_config.names().index(name)] if candidate.shares else None
        if name == "clip_coef" and isinstance(hparams.clip_coef, tuple):
            name = CLIP_ENDS[int(rng.integers(2))]
            parameter = end_of_distance(name, parameter)
        if self.step == "factors" or share is None or parameter.choices is not None:
            return step(hparams, name, parameter, rng.random())
        tried = [trial.hparams for trial in candidate.trials]
        value = between(hparams, name, parameter, tried, share)
        if not in_order(hparams, name, value):
            return step(hparams, name, parameter, rng.random())
        return put(hparams, {name: value}, {name: parameter})

    def _may_mutate(self, candidate: Candidate) -> bool:
        if self.step == "between":
            return candidate.twin
        if candidate.elite and not self.mutate_elite:
            return False
        return candidate.copied or not self.copies_only

    def _move_all(self, candidate: Candidate, hp_config: "HyperparameterConfig") -> Hparams:
        """Set each hyperparameter by `candidate.shares`, if `rl_hp` or `choice` allows it."""
        hparams = candidate.hparams
        for (name, parameter), share in zip(
            parts(hparams, hp_config.parameters), candidate.shares, strict=False
        ):
            if parameter.choices is not None:
                choices = parameter.choices
                value = choices[min(len(choices) - 1, int(share * len(choices)))]
            else:
                value = placed(name, parameter, share)
            weight = self.rl_hp if parameter.choices is None else self.choice
            if weight > 0 and in_order(hparams, name, value):
                hparams = put(hparams, {name: value}, {name: parameter})
        return hparams

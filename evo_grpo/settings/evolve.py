"""The group `evolve`: who survives, what mutates, and how fitness is measured."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from typing import Literal, Self

from pydantic import Field, model_validator

from evo_grpo.schema.hparams import MUTABLE, HyperparameterConfig, RLParameter
from evo_grpo.settings.group import Group, Problem, Problems, nearest


class SelectionConfig(Group):
    """Who survives a round."""

    kind: Literal["tournament", "none"] = Field(
        default="tournament",
        description="`tournament`: each place goes to the best of `size` drawn agents. "
        "`none`: everyone stays.",
    )
    size: int = Field(
        default=2, ge=1, description="Agents in one tournament: more means more pressure."
    )
    elitism: bool = Field(default=True, description="The best agent keeps its place.")


class MutationConfig(Group):
    """How agents change after selection. Only the ratio of the two weights counts."""

    no_mutation: float = Field(
        default=0.2, ge=0, description="Weight of leaving an agent as it is."
    )
    rl_hp: float = Field(
        default=0.8, ge=0, description="Weight of moving one of its hyperparameters."
    )
    mutate_elite: bool = Field(default=False, description="The best agent may mutate too.")

    @model_validator(mode="after")
    def _some_weight(self) -> Self:
        if self.no_mutation + self.rl_hp == 0:
            text = "expected no_mutation or rl_hp above 0, got 0 for both; no_mutation: 1 alone "
            raise Problems(Problem((), text + "switches mutation off"))
        return self


class HyperparameterRange(Group):
    """Range and step of one hyperparameter that may mutate."""

    min: float = Field(ge=0, description="Least value.")
    max: float = Field(ge=0, description="Greatest value.")
    shrink_factor: float = Field(
        default=0.8, gt=0, lt=1, description="What a mutation downwards multiplies by."
    )
    grow_factor: float = Field(
        default=1.2, gt=1, description="What a mutation upwards multiplies by."
    )

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.min > self.max:
            text = f"expected min <= max, got min {self.min:g} > max {self.max:g}; swap the two"
            raise Problems(Problem((), text))
        return self


class FitnessConfig(Group):
    """How agents are judged: the same prompts, seeds and temperature for all of them."""

    prompts: int = Field(default=64, ge=1, description="Validation prompts after each round.")
    samples: int = Field(default=1, ge=1, description="Completions per validation prompt.")
    temperature: float = Field(
        default=1.0,
        gt=0,
        description="Sampling temperature of every evaluation, whatever an agent trains with.",
    )
    window: int = Field(
        default=1,
        ge=1,
        description="Selection looks at the mean of a member's last so many evaluations.",
    )
    test_prompts: int = Field(
        default=256,
        ge=1,
        description="Test prompts on which base and best agent are compared at the end.",
    )
    test_samples: int = Field(default=4, ge=1, description="Completions per test prompt.")


class EvolveConfig(Group):
    """What happens between two rounds."""

    selection: SelectionConfig = Field(
        default=SelectionConfig(), description="Who survives a round."
    )
    mutation: MutationConfig = Field(default=MutationConfig(), description="How agents change.")
    hyperparameters: dict[str, HyperparameterRange] = Field(
        default_factory=dict[str, HyperparameterRange],
        description=f"What may mutate: a name, then its range. Names: {', '.join(MUTABLE)}. The "
        "two bounds of a clip range are clip_low and clip_high; clip_coef is their distance to 1.",
    )
    fitness: FitnessConfig = Field(default=FitnessConfig(), description="How agents are judged.")
    inherit_optimizer: bool = Field(
        default=True,
        description="A copy takes over the optimizer state of its parent; else it begins afresh.",
    )

    @model_validator(mode="before")
    @classmethod
    def _nothing_mutates(cls, data: object) -> object:
        # All ranges commented out leave an empty key in YAML, which is no mistake.
        if isinstance(data, dict) and "hyperparameters" in data and data["hyperparameters"] is None:
            return {**data, "hyperparameters": {}}
        return data

    @model_validator(mode="after")
    def _can_mutate(self) -> Self:
        ranges = self.hyperparameters
        found = [
            Problem(("hyperparameters", name), text)
            for name, given in ranges.items()
            if (text := _wrong_name(name) or _no_integers(name, given))
        ]
        if "clip_coef" in ranges and ("clip_low" in ranges or "clip_high" in ranges):
            text = "expected clip_coef alone, or clip_low and clip_high, got both; remove one"
            found.append(Problem(("hyperparameters", "clip_coef"), text))
        if found:
            raise Problems(*found)
        return self

    def hp_config(self) -> HyperparameterConfig:
        """Return what may mutate, as the evolution sees it."""
        return HyperparameterConfig(
            **{
                name: RLParameter(
                    min=given.min,
                    max=given.max,
                    dtype=MUTABLE[name],
                    shrink_factor=given.shrink_factor,
                    grow_factor=given.grow_factor,
                )
                for name, given in self.hyperparameters.items()
            }
        )


def _wrong_name(name: str) -> str:
    if name in MUTABLE:
        return ""
    near = nearest(name, MUTABLE)
    hint = f" Did you mean {near!r}?" if near else ""
    return f"nothing of that name can mutate.{hint} Expected one of: {', '.join(MUTABLE)}"


def _no_integers(name: str, given: HyperparameterRange) -> str:
    if MUTABLE[name] is not int or (given.min.is_integer() and given.max.is_integer()):
        return ""
    return f"expected whole numbers for min and max, got {given.min:g} and {given.max:g}"

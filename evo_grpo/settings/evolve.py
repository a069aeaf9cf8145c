"""The group `evolve`: who survives, what changes, and how fitness is measured."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, model_validator

from evo_grpo.schema.group import Group, setting
from evo_grpo.schema.hparams import MUTABLE, Hparams
from evo_grpo.schema.problems import Problem, Problems
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter, default_ranges


def _typed_ranges(value: object) -> object:
    """Accept a HyperparameterConfig, or a mapping of names to ranges; None and `{}` stay."""
    if isinstance(value, Mapping):
        value = HyperparameterConfig(**cast("Mapping[str, Any]", value))
    return dict(value.parameters) if isinstance(value, HyperparameterConfig) else value


Ranges = Annotated[dict[str, RLParameter] | None, BeforeValidator(_typed_ranges)]


class SelectionConfig(Group):
    """Who survives a round."""

    kind: Literal["tournament", "none"] = setting(
        "tournament",
        "`tournament`: each place goes to the best of `size` drawn agents. `none`: everyone stays.",
    )
    size: int = setting(2, "Agents in one tournament: more means more pressure.", ge=1)
    elitism: bool = setting(True, "The best agent keeps its place.")


class ExplorationConfig(Group):
    """How agents change after selection. Only the ratio of the two weights counts."""

    no_mutation: float = setting(0.2, "Weight of leaving an agent as it is.", ge=0)
    rl_hp: float = setting(0.8, "Weight of moving one of its hyperparameters.", ge=0)
    mutate_elite: bool = setting(False, "The best agent may mutate too.")

    @model_validator(mode="after")
    def _some_weight(self) -> Self:
        if self.no_mutation + self.rl_hp == 0:
            text = "expected no_mutation or rl_hp above 0, got 0 for both; no_mutation: 1 alone "
            raise Problems(Problem((), text + "switches mutation off"))
        return self


class FitnessConfig(Group):
    """How agents are judged: the same prompts, seeds and temperature for all of them."""

    prompts: int = setting(64, "Validation prompts after each round.", ge=1)
    samples: int = setting(1, "Completions per validation prompt.", ge=1)
    temperature: float = setting(
        1.0, "Sampling temperature of every evaluation, whatever an agent trains with.", gt=0
    )
    window: int = setting(
        1, "Selection looks at the mean of a member's last so many evaluations.", ge=1
    )
    test_prompts: int = setting(
        256, "Test prompts on which base and best agent are compared at the end.", ge=1
    )
    test_samples: int = setting(4, "Completions per test prompt.", ge=1)


class EvolveConfig(Group):
    """What happens between two rounds."""

    selection: SelectionConfig = setting(SelectionConfig(), "Who survives a round.")
    exploration: ExplorationConfig = setting(
        ExplorationConfig(), "How agents change after selection."
    )
    hyperparameters: Ranges = setting(
        None,
        f"What may mutate: a name, then its range. Names: {', '.join(MUTABLE)}. The two bounds of "
        "a clip range are clip_low and clip_high; clip_coef is their distance to 1. null lets lr "
        "move within a factor of ten either way; `{}` means that nothing moves.",
    )
    fitness: FitnessConfig = setting(FitnessConfig(), "How agents are judged.")
    inherit_optimizer: bool = setting(
        True, "A copy takes over the optimizer state of its parent; else it begins afresh."
    )


def search_space(ranges: Mapping[str, RLParameter] | None, first: Hparams) -> HyperparameterConfig:
    """Return what may mutate, as evolution sees it.

    Args:
        ranges: As given; None lets lr move within a factor of ten either way.
        first: What the first agent begins with.
    """
    return HyperparameterConfig(**(default_ranges(first.lr) if ranges is None else ranges))

"""The group `evolve`: who survives, what changes, and how fitness is measured."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import BeforeValidator

from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.explore.registry import Exploration
from evo_grpo.evolve.select.registry import Selection
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.schema.group import Group, setting
from evo_grpo.schema.hparams import MUTABLE, Factor, Hparams
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter, default_ranges
from evo_grpo.types import KEPT_SCORES


def _typed_ranges(value: object) -> object:
    """Accept a HyperparameterConfig, or a mapping of names to ranges; None and `{}` stay."""
    if isinstance(value, Mapping):
        value = HyperparameterConfig(**cast("Mapping[str, Any]", value))
    return dict(value.parameters) if isinstance(value, HyperparameterConfig) else value


Ranges = Annotated[dict[str, RLParameter] | None, BeforeValidator(_typed_ranges)]


class FitnessConfig(Group):
    """How agents are judged: the same prompts, seeds and temperature for all of them."""

    prompts: int = setting(64, "Validation prompts after each round.", ge=1)
    samples: int = setting(1, "Completions per validation prompt.", ge=1)
    temperature: Factor = setting(
        1.0, "Sampling temperature of every evaluation, whatever an agent trains with.", gt=0
    )
    racing: float = setting(
        0.0,
        "Completions for a second look at those agents that the first one cannot separate, as a "
        "share of what the first look takes; 0 looks once.",
        ge=0,
        le=100,
    )
    window: int = setting(
        1,
        "Selection looks at the mean of a member's last so many evaluations.",
        ge=1,
        le=KEPT_SCORES,
    )
    test_prompts: int = setting(
        256, "Test prompts on which base and best agent are compared at the end.", ge=1
    )
    test_samples: int = setting(4, "Completions per test prompt.", ge=1)
    final_samples: int = setting(
        2,
        "Completions per validation prompt by which the best agent of the last round, the best "
        "ever and the mean of related survivors are compared at the end; 0 takes the first of "
        "them.",
        ge=0,
    )


class EvolveConfig(Group):
    """What happens between two rounds."""

    selection: Selection = setting(
        TournamentSelection(),
        "Who survives a round: a kind, a mapping of its kind and settings, or a class of your own "
        "as `module:Class`.",
    )
    exploration: Exploration = setting(
        Mutations(), "How agents change after selection: likewise a kind, a mapping, or a class."
    )
    hyperparameters: Ranges = setting(
        None,
        f"What may mutate: a name, then its range. Names: {', '.join(MUTABLE)}. The two bounds of "
        "a clip range are clip_low and clip_high; clip_coef is their distance to 1. null lets lr "
        "move within a factor of ten either way; `{}` means that nothing moves.",
    )
    significance: float | None = setting(
        0.1,
        "p-value of a paired test up to which a difference in fitness counts: an agent that is not "
        "significantly behind keeps its weights, and nobody leaves who is significantly ahead. "
        "null takes every difference for real.",
        gt=0,
        le=0.5,
    )
    archive: bool = setting(
        True,
        "Keep the best agent ever in checkpoints/best; a population that falls significantly "
        "behind it goes on from it, at a half and a quarter of its lr.",
    )
    dead_steps: int | None = setting(
        8,
        "An agent leaves when all groups of so many steps in a row had equal rewards and it is "
        "behind the best, or when its KL divergence explodes. null never looks.",
        ge=1,
    )
    fitness: FitnessConfig = setting(FitnessConfig(), "How agents are judged.")
    inherit_optimizer: bool = setting(
        True, "A copy takes over the optimizer state of its parent; else it begins afresh."
    )


def search_space(ranges: Mapping[str, RLParameter] | None, first: Hparams) -> HyperparameterConfig:
    """Return what may mutate; no ranges let lr move within a factor of ten either way."""
    return HyperparameterConfig(**(default_ranges(first.lr) if ranges is None else ranges))

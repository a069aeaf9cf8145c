"""Warnings about settings and mutations without an effect in a call of `train`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.explore.protocol import Explorer
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.schema.search_space import warn_if_nothing_mutates
from evo_grpo.settings import EvolveConfig, PopulationConfig
from evo_grpo.settings.run import without_effect_of_agents
from evo_grpo.settings.without_effect import Seen, WithoutEffect, without_effect


def warn_of_inert_mutations(
    cohort: Cohort,
    slots: Sequence[int],
    explorer: Explorer | None,
    prompts: int,
    population: PopulationConfig | None = None,
    evolve: EvolveConfig | None = None,
) -> None:
    """Warn about settings without an effect in a call of `train`, if the constructor has not.

    `explorer` is None if the caller gave none; `prompts` is P, the prompts of a GRPO step.
    """
    settings, hp_config = cohort.settings, cohort.hp_config
    seen = Seen(
        settings.algorithm,
        hp_config,
        settings.engine,
        [cohort.agents[slot].hparams for slot in slots],
        prompts=prompts,
        population=population,
        evolve=evolve,
        own_exploration=explorer is not None and not hasattr(explorer, "kind"),
    )
    for finding in without_effect(seen):
        if finding not in without_effect_of_agents(settings):
            warnings.warn(str(finding), WithoutEffect, stacklevel=3)
    if isinstance(explorer, Mutations):
        warn_if_nothing_mutates(explorer.rl_hp, hp_config.mutating())

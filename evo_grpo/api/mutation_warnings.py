"""Warnings about ranges and mutations that cannot have an effect."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from evo_grpo.cohort.cohort import Cohort
from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.explore.protocol import Explorer
from evo_grpo.schema.search_space import dead_clip, warn_if_nothing_mutates


def warn_of_inert_mutations(
    cohort: Cohort, slots: Sequence[int], explorer: Explorer | None, prompts: int
) -> None:
    """Warn, as a configuration does, of ranges and mutations that cannot have an effect.

    Args:
        cohort: The agents.
        slots: Those that train.
        explorer: Given by the caller, None where there was none.
        prompts: P, prompts of a GRPO step.
    """
    hp_config = cohort.hp_config
    clips = {dead_clip(cohort.agents[slot].hparams, hp_config, prompts) for slot in slots}
    if None not in clips and clips:
        warnings.warn(
            f"hyperparameters: {clips.pop()} cannot act: with update_epochs=1 and all rows of a "
            "step in one batch the probability ratio is exactly 1; set update_epochs=2, or a "
            "batch_size below the rows of a step",
            UserWarning,
            stacklevel=3,
        )
    if isinstance(explorer, Mutations):
        warn_if_nothing_mutates(explorer.rl_hp, hp_config)

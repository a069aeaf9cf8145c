"""The adapters with which the agents of a run begin."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.model.lora.configs import MERGE
from evo_grpo.model.lora.files import AdapterCopy
from evo_grpo.model.lora.load import fit_slot, plan_copy
from evo_grpo.population.cohort.adapters import narrowest
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.settings.adapters import above_width, pattern_problems, searched, too_wide
from evo_grpo.types import Slot


def check_adapters(cohort: Cohort) -> None:
    """Check that the adapters of a cohort may have every rank, alpha and set that is searched.

    Raises:
        ConfigError: Some layers have a rank or alpha of their own, initial values need even ranks,
            or a set of layers is not declared, is that of another one, or does not fit the base.
        ModelError: A layer does not get the rows of a batch in a known order.
    """
    space, lora = cohort.hp_config, cohort.slots.config
    if not searched(space):
        return
    for name, text in pattern_problems(space, lora, ("hyperparameters",)):
        raise ConfigError(f"lora.{name}: {text}")
    cohort.slots.target_sets.check()
    for name in cohort.settings.lora.searched_sets(space):
        cohort.slots.target_sets.modules(name)
    if "lora.r" in space.names() and lora.init_lora_weights == "orthogonal":
        raise ConfigError(
            "lora.init_lora_weights: expected another than 'orthogonal' where lora.r is searched, "
            "since PEFT draws it for even ranks only; leave it out, or do not search lora.r"
        )


def check_widths(cohort: Cohort, *, given: bool) -> None:
    """Check that no rank is above the width of a layer; called with agents.

    Args:
        cohort: The agents.
        given: Whether they start from an adapter, which brings its own rank.

    Raises:
        ConfigError: A rank that is searched is, or that of the settings; the error names the layer.
    """
    found = narrowest(cohort.slots)
    if found is None:
        return
    if text := too_wide(cohort.hp_config, *found):
        raise ConfigError(f"hyperparameters.lora.r: {text}")
    own = not given and "lora" not in cohort.objects  # PEFT's object may have any rank of PEFT's
    if own and (text := above_width(cohort.slots.config.r, *found)):
        raise ConfigError(f"lora.r: {text}; lower it")


def start_with(cohort: Cohort, slots: Sequence[Slot], start: AdapterCopy) -> None:
    """Copy an adapter into actors and references; the KL term then refers to this adapter."""
    states = [cohort.agents[slot] for slot in slots if cohort.is_local(slot)]
    names = [s.adapter for s in states] + [s.reference for s in states if s.has_reference]
    for name in names:
        fit_slot(cohort.slots, name, cohort.slots.config)
    if not cohort.settings.algorithm.separate_reference:
        names.append(cohort.references.add_start())  # all agents share this reference
    model = cohort.settings.model
    folder = None if model is None else model.adapter
    try:
        plans = [plan_copy(cohort.slots, n, start, Path(folder or "of the model")) for n in names]
    except CheckpointError as error:
        why = str(error).removeprefix("checkpoint ")
        named, remedy = "model.adapter", f"give an adapter of this base, or {MERGE}"
        if folder is None:
            named, remedy = "the adapter", "or leave lora out to take the adapter's own"
        raise ConfigError(f"{named} {why}; {remedy}") from error
    for note in plans[0].notes:
        warnings.warn(note, UserWarning, stacklevel=4)
    for plan in plans:
        plan.apply()
    for state in states:
        state.optimizer = cohort.fresh_optimizer(state.slot, state.hparams)
        cohort.set_hparams(state.slot, state.hparams)  # its own rank, to which the adapter is cut

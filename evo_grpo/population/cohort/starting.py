"""The adapters with which the agents of a run begin."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.model.lora.configs import module_of, width_of
from evo_grpo.model.lora.files import AdapterCopy
from evo_grpo.model.lora.load import fit_slot, plan_copy
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.settings.adapters import pattern_problems, searched, too_wide
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


def check_widths(cohort: Cohort) -> None:
    """Check that no rank that is searched is above the width of a layer; called with agents.

    Raises:
        ConfigError: One is; the error names the layer.
    """
    widths: dict[str, int] = {}
    for name in cohort.settings.lora.searched_sets(cohort.hp_config):
        for module in cohort.slots.target_sets.modules(name):
            widths[module] = width_of(cohort.base.model.get_submodule(module))
    for slot in cohort.slots.names[:1]:  # a rank without agents has none
        for key, shape in cohort.slots.shapes(slot).items():
            own = shape[1] if ".lora_A." in key else shape[0]
            widths[module_of(key)] = min(own, widths.get(module_of(key), own))
    layer = min(widths, key=lambda name: widths[name], default=None)
    if layer is None:
        return
    if text := too_wide(cohort.hp_config, layer, widths[layer]):
        raise ConfigError(f"hyperparameters.lora.r: {text}")


def start_with(cohort: Cohort, slots: Sequence[Slot], start: AdapterCopy) -> None:
    """Copy an adapter into actors and references; the KL term then refers to this adapter."""
    states = [cohort.agents[slot] for slot in slots if cohort.is_local(slot)]
    names = [s.adapter for s in states] + [s.reference for s in states if s.has_reference]
    for name in names:
        fit_slot(cohort.slots, name, cohort.slots.config)
    if not cohort.settings.algorithm.separate_reference:
        names.append(cohort.references.add_start())  # all agents share this reference
    try:
        plans = [plan_copy(cohort.slots, n, start, Path("adapter")) for n in names]
    except CheckpointError as error:
        raise ConfigError(
            f"adapter: the adapter to start from does not fit lora: {error}. Leave lora out to "
            "take the adapter's own; for another one build the agent without it and call "
            "agent.load_checkpoint(folder, merge_lora_configs=True)"
        ) from error
    for note in plans[0].notes:
        warnings.warn(note, UserWarning, stacklevel=4)
    for plan in plans:
        plan.apply()
    for state in states:
        state.optimizer = cohort.fresh_optimizer(state.slot, state.hparams)
        cohort.set_hparams(state.slot, state.hparams)  # its own rank, to which the adapter is cut

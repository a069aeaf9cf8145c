"""A PeftModel as the start of agents: its base becomes theirs, its adapter their actor."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict

from evo_grpo.cohort.build import build_cohort
from evo_grpo.cohort.cohort import Cohort
from evo_grpo.cohort.settings import AgentSettings
from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.model.lora.files import AdapterCopy
from evo_grpo.model.lora.reconcile import plan_copy
from evo_grpo.model.lora.supported import check_settings

_SLOT = re.compile(r"(actor|reference)_\d+")
_SHARE = (
    "make several agents over one model with GRPO.population(size=...) or agent.clone(); for "
    "weights of one's own, save the adapter with save_pretrained(folder), give a model without "
    "adapters, and call agent.load_checkpoint(folder)"
)


def take_over(network: Any) -> tuple[Any, AdapterCopy | None]:  # noqa: ANN401 -- of any transformers architecture
    """Separate a model from its adapter; a PeftModel is unloaded in place.

    In place because a copy would hold the base a second time. The caller's PeftModel, which wraps
    the same base, computes with the agents' adapters from then on.

    Args:
        network: A transformers model, or a PeftModel around one.

    Returns:
        The model without adapters, and the PeftModel's active adapter, copied; None for a plain
        model.

    Raises:
        ConfigError: The adapters are an agent's, merged, not plain LoRA, or not in a PeftModel; the
            network is as it was.
    """
    layers = [m for m in network.modules() if isinstance(m, BaseTunerLayer)]
    if not layers:
        return network, None
    if not isinstance(network, PeftModel):
        raise ConfigError(
            f"actor_network: this {type(network).__name__} already carries adapters, of an agent "
            f"or of a PeftModel around it; give that PeftModel; {_SHARE}"
        )
    names, active = list(network.peft_config), network.active_adapters
    if any(_SLOT.fullmatch(name) for name in names):
        raise ConfigError(
            f"actor_network: this PeftModel already carries adapters of an agent ({names[0]!r}); "
            f"{_SHARE}"
        )
    if len(active) != 1:
        raise ConfigError(
            f"actor_network: expected a PeftModel with one active adapter, got {active}; choose it "
            "with set_adapter(name)"
        )
    config: Any = network.peft_config[active[0]]
    check_settings(config)
    if any(layer.merged for layer in layers if isinstance(layer, LoraLayer)):
        raise ConfigError(
            "actor_network: its adapter is merged into the base, which would act twice; call "
            "unmerge_adapter() first"
        )
    tensors: dict[str, Any] = get_peft_model_state_dict(
        network, adapter_name=active[0], save_embedding_layers=False
    )
    state = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in tensors.items()}
    adapter = AdapterCopy(state, copy.deepcopy(config))
    unload: Any = network.unload
    return unload(), adapter


def build_agents(settings: AgentSettings, size: int = 1) -> tuple[AgentSettings, Cohort, list[int]]:
    """Build a cohort with agents that are alike.

    Over a PeftModel they begin with its active adapter, and so do their references: after
    supervised fine-tuning the KL term holds them to what was learned there.

    Args:
        settings: The constructor's arguments.
        size: How many agents.

    Returns:
        The settings in force, the cohort, and the agents' slots.

    Raises:
        ConfigError: As `take_over` and `build_cohort`; or lora_config is not the PeftModel's.
    """
    adapter = None
    if settings.model.actor_network is not None:
        network, adapter = take_over(settings.model.actor_network)
        lora = settings.adapters.lora_config or (adapter and _trainable(adapter.config))
        settings = replace(
            settings,
            model=replace(settings.model, actor_network=network),
            adapters=replace(settings.adapters, lora_config=lora),
        )
    cohort = build_cohort(settings)
    slots = [cohort.add(settings.hparams).slot for _ in range(size)]
    if adapter is not None:
        _begin_with(cohort, slots, adapter)
    return settings, cohort, slots


def _begin_with(cohort: Cohort, slots: Sequence[int], adapter: AdapterCopy) -> None:
    states = [cohort.agents[slot] for slot in slots]
    names = [s.adapter for s in states] + [s.reference for s in states if s.has_reference]
    try:
        plans = [plan_copy(cohort.slots, n, adapter, Path("actor_network")) for n in names]
    except CheckpointError as error:
        raise ConfigError(
            f"actor_network: its active adapter does not fit lora_config: {error}. Leave "
            "lora_config out to take the adapter's own; for another one save the adapter with "
            "save_pretrained(folder), give a model without adapters, and call "
            "agent.load_checkpoint(folder, merge_lora_configs=True)"
        ) from error
    for note in plans[0].notes:
        warnings.warn(note, UserWarning, stacklevel=4)
    for plan in plans:
        plan.apply()


def _trainable(config: LoraConfig) -> LoraConfig:
    own = copy.deepcopy(config)
    own.inference_mode = False
    return own

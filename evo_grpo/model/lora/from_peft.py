"""Building agents from a PeftModel: its base becomes their base, its adapter the first policy."""

from __future__ import annotations

import copy
import re
from typing import Any

from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict

from evo_grpo.errors import ConfigError
from evo_grpo.model.lora.configs import check_lora_config
from evo_grpo.model.lora.files import AdapterCopy

_SLOT = re.compile(r"(actor|reference)_\d+")
_SHARE = (
    "make several agents over one model with GRPO.population(size=...) or agent.clone(); for "
    "weights of one's own, save the adapter with save_pretrained(folder), give a model without "
    "adapters, and call agent.load_checkpoint(folder)"
)


def take_over(network: Any) -> tuple[Any, AdapterCopy | None]:  # noqa: ANN401 -- of any transformers architecture
    """Separate a model from its adapter; a PeftModel is unloaded in place.

    It is unloaded in place, since a copy would need the memory of a second base. The caller's
    PeftModel, which wraps the same base, computes with the agents' adapters afterwards.

    Returns the model without adapters, and a copy of the PeftModel's active adapter, None for a
    plain model. Adapters of an agent, merged adapters, and other kinds than plain LoRA raise
    ConfigError, and leave the model unchanged.
    """
    layers = [m for m in network.modules() if isinstance(m, BaseTunerLayer)]
    if not layers:
        return network, None
    if not isinstance(network, PeftModel):
        raise ConfigError(
            f"model: this {type(network).__name__} already carries adapters, of an agent "
            f"or of a PeftModel around it; give that PeftModel; {_SHARE}"
        )
    names, active = list(network.peft_config), network.active_adapters
    if any(_SLOT.fullmatch(name) for name in names):
        raise ConfigError(
            f"model: this PeftModel already carries adapters of an agent ({names[0]!r}); {_SHARE}"
        )
    if len(active) != 1:
        raise ConfigError(
            f"model: expected a PeftModel with one active adapter, got {active}; choose it "
            "with set_adapter(name)"
        )
    config: Any = network.peft_config[active[0]]
    check_lora_config(config)
    if any(layer.merged for layer in layers if isinstance(layer, LoraLayer)):
        raise ConfigError(
            "model: its adapter is merged into the base, which would act twice; call "
            "unmerge_adapter() first"
        )
    tensors: dict[str, Any] = get_peft_model_state_dict(
        network, adapter_name=active[0], save_embedding_layers=False
    )
    state = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in tensors.items()}
    adapter = AdapterCopy(state, copy.deepcopy(config))
    unload: Any = network.unload
    return unload(), adapter


def trainable(config: LoraConfig) -> LoraConfig:
    """Return a copy of a configuration with `inference_mode` off."""
    own = copy.deepcopy(config)
    own.inference_mode = False
    return own

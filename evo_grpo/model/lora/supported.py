"""Which LoRA settings the population forward serves; all others are refused, and leave no trace.

PEFT accepts them all and its own forward honours them, so a setting that is passed over in silence
would train something else than what is saved.
"""

from __future__ import annotations

import json
import warnings
from typing import Any, cast

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer

from evo_grpo.errors import ConfigError, ModelError
from evo_grpo.model.forward.fused import lora_layers

#: Settings beyond the two plain matrices of a linear layer, and starts that rewrite the base.
_LEFT_OUT = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "monteclora_config",
    "velora_config",
    "kasa_config",
)
_STARTS = (True, False, "gaussian", "orthogonal")


def check_settings(config: LoraConfig) -> None:
    """Refuse what the population forward would not compute.

    Raises:
        ConfigError: Naming the setting.
    """
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise ConfigError(f"lora: expected a plain LoraConfig, got peft_type {kind}")
    for field in _LEFT_OUT:
        # Older and newer releases of PEFT lack some of the fields.
        value = getattr(config, field, None)
        if value:
            raise ConfigError(
                f"lora.{field}={value!r}: agents share one forward, which serves plain LoRA on "
                f"linear layers (no variants such as DoRA); leave {field} out"
            )
    if config.bias != "none":
        raise ConfigError(
            f"lora.bias={config.bias!r}: the base and its biases belong to every agent and stay "
            'frozen; expected "none"'
        )
    if config.init_lora_weights not in _STARTS:
        raise ConfigError(
            f"lora.init_lora_weights={config.init_lora_weights!r} rewrites the base, which every "
            f"agent shares; expected one of {list(_STARTS)}"
        )
    for field, value in config.to_dict().items():
        try:
            json.dumps(list(value) if isinstance(value, set) else value)
        except (TypeError, ValueError):
            # Found by the first checkpoint otherwise, with the training behind it lost.
            raise ConfigError(
                f"lora.{field}={value!r}: expected what JSON can hold, since checkpoints write it "
                f"to adapter_config.json, got {type(value).__name__}; give plain Python numbers "
                "and texts"
            ) from None


def add_adapter(model: Any, config: LoraConfig, name: str) -> PeftModel:  # noqa: ANN401 -- of any architecture
    """Add an adapter to a model, or leave the model as it was.

    Args:
        model: A transformers model, which is wrapped in place, or the PeftModel around one.
        config: Checked by `check_settings`.
        name: Name of the new adapter.

    Raises:
        ConfigError: When target_modules match nothing, or the output head.
        ModelError: When they match a layer that is not linear.
    """
    wrapped = isinstance(model, PeftModel)
    try:
        with warnings.catch_warnings():
            # PEFT 0.21 asks transformers 5 by the old name; nothing a user can change.
            warnings.filterwarnings(
                "ignore",
                message="`is_gradient_checkpointing` is deprecated",
                category=FutureWarning,
            )
            # GPT-2's Conv1D layers: PEFT corrects the setting itself.
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to", category=UserWarning)
            # fp32 adapters over any base: PEFT casts bf16/fp16 ones up, the forward casts down.
            if wrapped:
                model.add_adapter(name, config)
            else:
                model = get_peft_model(model, config, adapter_name=name)
    except ValueError as error:
        raise ConfigError(
            f"lora.target_modules={config.target_modules!r} does not fit the model: {error}"
        ) from error
    try:
        base: Any = model.get_base_model()
        head = base.get_output_embeddings()
        if isinstance(head, LoraLayer) and name in head.lora_A:
            raise ConfigError(
                "lora.target_modules: the output head is among them, but log-probs are computed "
                "from the frozen head; leave lm_head out"
            )
        lora_layers(model)
    except (ConfigError, ModelError):
        if wrapped:
            model.delete_adapter(name)
        else:
            cast("Any", model).unload()
        raise
    return model

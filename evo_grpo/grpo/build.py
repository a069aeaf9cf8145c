"""From a constructor's arguments to a cohort without agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peft import LoraConfig

from evo_grpo.errors import ConfigError
from evo_grpo.grpo.advantages import ADV_NORM_TO_SCALE
from evo_grpo.grpo.cohort import DEFAULT_OUTPUT_TOKENS, Cohort, CohortOptions
from evo_grpo.grpo.learn_options import LearnOptions
from evo_grpo.grpo.loss import LossConfig
from evo_grpo.grpo.settings import AgentSettings
from evo_grpo.model.base import SharedBase, pick_device

#: Padded tokens per micro-batch when no row count is asked for.
TOKEN_BUDGET = 8192


def read_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], *, default_loss: str
) -> AgentSettings:
    """Sort a constructor's arguments into their groups; see `AgentSettings.from_arguments`."""
    arguments = dict(kwargs)
    # The older signature begins with two gym spaces, the newer one with the padding token: told by
    # type.
    if args and not isinstance(args[0], int):
        args = args[2:]
    for name, value in zip(("pad_token_id", "pad_token"), args, strict=False):
        arguments.setdefault(name, value)
    arguments.pop("observation_space", None)
    arguments.pop("action_space", None)
    arguments.setdefault("loss_type", default_loss)
    return AgentSettings.from_arguments(arguments)


def build_cohort(settings: AgentSettings) -> Cohort:
    """Build the base and the parts that agents share; no agent yet.

    Raises:
        ConfigError: When the model is named twice or not at all.
    """
    model, memory, output = settings.model, settings.memory, settings.output
    if (model.actor_network is None) == (model.model_name is None):
        raise ConfigError(
            "model: expected exactly one of model_name= and actor_network=, got "
            f"model_name={model.model_name!r} and actor_network={type(model.actor_network).__name__}"
        )
    if model.actor_network is not None:
        base = SharedBase(model.actor_network.to(pick_device(model.device)), model.tokenizer)
    else:
        base = SharedBase.load(
            str(model.model_name), device=model.device, tokenizer=model.tokenizer
        )
    loss_type: Any = settings.loss.loss_type
    options = CohortOptions(
        learn=LearnOptions(
            loss=LossConfig(
                loss_type=loss_type,
                max_completion_length=output.max_output_tokens or DEFAULT_OUTPUT_TOKENS,
            ),
            token_budget=TOKEN_BUDGET,
            max_rows=memory.micro_batch_size_per_gpu,
            gradient_checkpointing=memory.gradient_checkpointing,
        ),
        adv_scale=ADV_NORM_TO_SCALE[settings.loss.adv_norm],
        max_output_tokens=output.max_output_tokens,
        min_output_tokens=output.min_output_tokens or 0,
        max_model_len=output.max_model_len,
        separate_reference=settings.adapters.use_separate_reference_adapter,
        max_decode_prompts=output.hf_generate_chunk_size,
    )
    lora = settings.adapters.lora_config or LoraConfig(
        r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return Cohort(base, lora, options, hp_config=settings.evolution.hp_config, seed=model.seed)

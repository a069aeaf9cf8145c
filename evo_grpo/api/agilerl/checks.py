"""Checks of AgileRL's arguments that are no settings of `evo_grpo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peft import LoraConfig

from evo_grpo.api.agilerl.configs import CosineLRScheduleConfig, VLLMConfig
from evo_grpo.errors import ConfigError
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.schema.validation import Rule, flag, is_number, shown, text, whole


def is_keywords(value: object) -> bool:
    """Return whether a value is a mapping with strings as keys."""
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)  # pyright: ignore[reportUnknownVariableType] -- callers are untyped


def is_space(value: object) -> bool:
    """Return whether a first argument is a space: not None, a number, a string or callable."""
    return not (
        value is None
        or isinstance(value, bool | str | bytes)
        or is_number(value)
        or callable(value)
    )


def refuse_extra(method: str, args: Sequence[object], keywords: Mapping[str, object]) -> None:
    """Refuse further arguments, which AgileRL's signature accepts and ignores.

    Raises:
        ConfigError: There is one.
    """
    extra = [*map(shown, args), *(f"{name}={shown(value)}" for name, value in keywords.items())]
    if extra:
        raise ConfigError(
            f"{method}: expected no further arguments, got {', '.join(extra)}, which would have no "
            "effect; leave them out"
        )


def check_critic(name: str) -> None:
    """Refuse an argument of a critic.

    Raises:
        ConfigError: It is one.
    """
    if "critic" in name:
        raise ConfigError(
            f"{name}: GRPO has no critic, advantages come from the group; leave it out"
        )


def check_accelerator(accelerator: object) -> int | None:
    """Return the ZeRO stage of an accelerator, None for none and for one without DeepSpeed.

    Raises:
        ConfigError: It is no accelerator, or its settings cannot act here.
    """
    if accelerator is None:
        return None
    # Imported here because few scripts use an accelerator.
    from evo_grpo.population.zero.setup import stage_of

    return stage_of(accelerator)


CONFIGS: dict[str, type] = {
    "lora_config": LoraConfig,
    "cosine_lr_schedule_config": CosineLRScheduleConfig,
    "vllm_config": VLLMConfig,
}
"""Arguments that may be a mapping of keywords -> the class that the mapping builds."""


def from_mapping(name: str, settings: Mapping[str, Any]) -> object:
    """Build the object of an argument in `CONFIGS` from its keywords.

    Raises:
        ConfigError: One is unknown, or out of range.
    """
    kind = CONFIGS[name]
    given = {"task_type": "CAUSAL_LM", **settings} if kind is LoraConfig else settings
    try:
        return kind(**given)
    except TypeError as error:
        raise ConfigError(
            f"{name}: expected keywords of {kind.__name__}, got {settings!r}: {error}"
        ) from None


def _is_model(value: object) -> bool:
    return callable(value) and hasattr(value, "config") and hasattr(value, "get_output_embeddings")


def _is_tokenizer(value: object) -> bool:
    return callable(value) and hasattr(value, "decode")


def _instance(kind: type, example: str) -> Rule:
    return Rule(
        lambda v: v is None or isinstance(v, kind), f"a {kind.__name__}, or None", f"give {example}"
    )


RULES: dict[str, Rule] = {
    "actor_network": Rule(
        _is_model,
        "a transformers causal language model",
        "load one with AutoModelForCausalLM.from_pretrained, or give model_name=",
    ).or_none(),
    "model_config": Rule(is_keywords, "a mapping of keywords for from_pretrained").or_none(),
    "tokenizer": Rule(
        _is_tokenizer,
        "a transformers tokenizer",
        "load one with AutoTokenizer.from_pretrained, or leave it out: model_name= brings its own",
    ).or_none(),
    "pad_token_id": whole(0, "any id of the vocabulary does").or_none(),
    "pad_token": text().or_none(),
    "index": whole(0),
    "lora_config": _instance(LoraConfig, "peft.LoraConfig(r=8), or a mapping of its keywords"),
    "hp_config": _instance(
        HyperparameterConfig, "HyperparameterConfig(lr=RLParameter(min=1e-5, max=1e-3))"
    ),
    "cosine_lr_schedule_config": _instance(
        CosineLRScheduleConfig, "CosineLRScheduleConfig(num_epochs=100), or a mapping"
    ),
    "vllm_config": _instance(VLLMConfig, "VLLMConfig(max_num_seqs=256), or a mapping"),
    **dict.fromkeys(
        (
            *("reduce_memory_peak", "use_fused_linear_logprobs", "use_memory_efficient_params"),
            *("cast_logprobs_to_fp32", "calc_position_embeddings", "use_liger_loss"),
            *("use_vllm", "wrap", "clone"),
        ),
        flag(),
    ),
}

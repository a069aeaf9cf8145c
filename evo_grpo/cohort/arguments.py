"""A constructor's arguments one by one: their documented positions, and what each may be."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig

from evo_grpo.errors import ConfigError
from evo_grpo.objective.lr_schedule import CosineLRScheduleConfig
from evo_grpo.schema.hparams import HyperparameterConfig
from evo_grpo.validation import (
    Rule,
    above_zero,
    check_all,
    flag,
    is_number,
    is_whole,
    not_negative,
    plain_number,
    shown,
    text,
    whole,
)

#: What precedes everything else in the older signature.
SPACES = ("observation_space", "action_space")

#: The order of the newer signature.
POSITIONS = (
    *("pad_token_id", "pad_token", "model_name", "actor_network", "model_config", "hp_config"),
    *("index", "batch_size", "beta", "lr", "clip_coef", "max_grad_norm", "update_epochs"),
    *("group_size", "temperature", "repetition_penalty", "top_p", "top_k", "min_p"),
    *("use_memory_efficient_params", "calc_position_embeddings", "micro_batch_size_per_gpu"),
    *("max_output_tokens", "min_output_tokens", "max_model_len", "hf_generate_chunk_size"),
    *("lora_config", "cosine_lr_schedule_config", "accelerator", "device", "wrap", "clone"),
    *("use_vllm", "vllm_config", "seed", "gradient_checkpointing", "torch_compiler"),
    *("use_liger_loss", "use_kl_advantage_shaping", "adv_norm"),
    *("use_separate_reference_adapter", "whiten_advantages", "adv_clip_range"),
    *("filter_zero_adv", "adv_filter_eps", "reduce_memory_peak", "use_fused_linear_logprobs"),
    "cast_logprobs_to_fp32",
)

_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")


def by_name(
    args: Sequence[Any], keywords: Mapping[str, Any], after_spaces: Sequence[str] = ()
) -> dict[str, Any]:
    """Give positional arguments their names.

    Args:
        args: In the order of `POSITIONS`, or two gym spaces and what may follow them.
        keywords: The arguments that came by name.
        after_spaces: What may follow the spaces.

    Returns:
        All arguments but the spaces, which a language model does not need.

    Raises:
        ConfigError: One is given twice, there are too many, or the first is neither a padding id
            nor a space.
    """
    names: Sequence[str] = POSITIONS
    if args and _is_space(args[0]):
        names = (*SPACES, *after_spaces)
        if len(args) == 1 and "action_space" not in keywords:
            raise ConfigError(
                "action_space: expected it beside observation_space, got one positional argument; "
                "give both spaces, or neither: they are not needed"
            )
    elif args and not (is_whole(args[0]) or args[0] is None):
        raise ConfigError(
            f"positional arguments: expected pad_token_id (a whole number) or observation_space "
            f"first, got {shown(args[0])}; give arguments by name"
        )
    if len(args) > len(names):
        raise ConfigError(
            f"positional arguments: expected at most {len(names)} ({', '.join(names)}), got "
            f"{len(args)}; give the others by name"
        )
    given = dict(zip(names, args, strict=False))
    if twice := sorted(set(given) & set(keywords)):
        raise ConfigError(
            f"{twice[0]}: expected it once, got {shown(given[twice[0]])} by position and "
            f"{shown(keywords[twice[0]])} by name; remove one"
        )
    return {name: v for name, v in {**keywords, **given}.items() if name not in SPACES}


@dataclass(frozen=True)
class PopulationArguments:
    """What `population` takes beside the arguments of one agent.

    Attributes:
        size: N.
        arguments: Those of one agent, by name.
        wrapper_cls: Called with each agent, None to leave them as they are.
        wrapper_kwargs: Keywords for it.
    """

    size: int
    arguments: Mapping[str, Any]
    wrapper_cls: Callable[..., Any] | None
    wrapper_kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, size: int, args: Sequence[Any], keywords: Mapping[str, Any]) -> PopulationArguments:
        """Sort the arguments of a call.

        Raises:
            ConfigError: One has a wrong type, cannot act, or is given twice.
        """
        whole(1, "it counts agents").check("population: size", size)
        given = by_name(args, keywords, after_spaces=("wrapper_cls", "wrapper_kwargs"))
        wrapper, wrapping = given.pop("wrapper_cls", None), given.pop("wrapper_kwargs", None)
        if wrapper is not None and not callable(wrapper):
            raise ConfigError(f"wrapper_cls: expected a class, or None, got {wrapper!r}")
        if wrapping is not None and wrapper is None:
            raise ConfigError(
                f"wrapper_kwargs: has no effect without wrapper_cls, got {wrapping!r}; give it too"
            )
        if wrapping is not None and not _is_keywords(wrapping):
            raise ConfigError(f"wrapper_kwargs: expected a mapping of keywords, got {wrapping!r}")
        if "index" in given:
            raise ConfigError(
                f"index: expected none for a population, whose agents are numbered from 0, got "
                f"{given['index']!r}; leave it out, or assign agent.index afterwards"
            )
        return cls(int(size), given, wrapper, wrapping or {})

    def wrapped(self, agent: object) -> Any:  # noqa: ANN401 -- whatever the wrapper returns
        """Return what stands in the population for an agent."""
        if self.wrapper_cls is None:
            return agent
        return self.wrapper_cls(agent, **self.wrapper_kwargs)


def refuse_extra(method: str, args: Sequence[object], keywords: Mapping[str, object]) -> None:
    """Refuse arguments that the reference API's signature lets pass without a meaning.

    Raises:
        ConfigError: There is one.
    """
    extra = [*map(shown, args), *(f"{name}={shown(value)}" for name, value in keywords.items())]
    if extra:
        raise ConfigError(
            f"{method}: expected no further arguments, got {', '.join(extra)}, which would have no "
            "effect; leave them out"
        )


def check_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Check arguments one by one; those of `Hparams` check themselves.

    Returns:
        The same ones; a mapping in place of a configuration has become that configuration.

    Raises:
        ConfigError: One has a wrong type or is out of range.
    """
    checked = dict(arguments)
    for name, make in _BUILT.items():
        if isinstance(checked.get(name), Mapping):
            checked[name] = _built(name, make, checked[name])
    check_all(RULES, checked)
    if checked.get("device") is not None:
        checked["device"] = str(checked["device"])  # a torch.device is as good as its name
    # numpy's numbers are no JSON, so a checkpoint would not hold them.
    return {name: plain_number(value) for name, value in checked.items()}


def _lora(**settings: Any) -> LoraConfig:
    settings.setdefault("task_type", "CAUSAL_LM")
    return LoraConfig(**settings)


_BUILT: dict[str, Callable[..., Any]] = {
    "lora_config": _lora,
    "cosine_lr_schedule_config": CosineLRScheduleConfig,
}


def _built(name: str, make: Callable[..., Any], settings: Mapping[str, Any]) -> object:
    try:
        return make(**settings)
    except TypeError as error:
        wanted = "LoraConfig" if name == "lora_config" else "CosineLRScheduleConfig"
        raise ConfigError(
            f"{name}: expected keywords of {wanted}, got {settings!r}: {error}"
        ) from None


def _is_space(value: object) -> bool:
    """Whether a first argument is a space: no number or text, and nothing that is called."""
    return not (
        value is None
        or isinstance(value, bool | str | bytes)
        or is_number(value)
        or callable(value)
    )


def _is_model(value: object) -> bool:
    return callable(value) and hasattr(value, "config") and hasattr(value, "get_output_embeddings")


def _is_tokenizer(value: object) -> bool:
    return callable(value) and hasattr(value, "decode")


def _is_device(value: object) -> bool:
    return isinstance(value, str | torch.device) and bool(_DEVICE.fullmatch(str(value)))


def _is_keywords(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _of(kind: type, example: str) -> Rule:
    return Rule(
        lambda v: v is None or isinstance(v, kind), f"a {kind.__name__}, or None", f"give {example}"
    )


_FLAGS = (
    "use_kl_advantage_shaping",
    "whiten_advantages",
    "filter_zero_adv",
    "gradient_checkpointing",
    "reduce_memory_peak",
    "use_fused_linear_logprobs",
    "use_memory_efficient_params",
    "cast_logprobs_to_fp32",
    "calc_position_embeddings",
    "use_liger_loss",
    "use_separate_reference_adapter",
    "use_vllm",
    "wrap",
    "clone",
)

RULES: dict[str, Rule] = {
    "model_name": text("give the name or the folder of a model").or_none(),
    "actor_network": Rule(
        _is_model,
        "a transformers causal language model",
        "load one with AutoModelForCausalLM.from_pretrained, or give model_name=",
    ).or_none(),
    "model_config": Rule(_is_keywords, "a mapping of keywords for from_pretrained").or_none(),
    "tokenizer": Rule(
        _is_tokenizer,
        "a transformers tokenizer",
        "load one with AutoTokenizer.from_pretrained, or leave it out: model_name= brings its own",
    ).or_none(),
    "pad_token_id": whole(0, "any id of the vocabulary does").or_none(),
    "pad_token": text().or_none(),
    "device": Rule(_is_device, "auto, cpu, mps, cuda or cuda:N"),
    "seed": whole(),
    "index": whole(0),
    "max_output_tokens": whole(1, "None takes the environment's hint").or_none(),
    "min_output_tokens": whole(0).or_none(),
    "max_model_len": whole(2, "None takes the model's own context").or_none(),
    "hf_generate_chunk_size": whole(1, "None decodes all prompts at once").or_none(),
    "adv_clip_range": above_zero("None leaves advantages unclipped").or_none(),
    "adv_filter_eps": not_negative("0.0 drops only zeros"),
    "micro_batch_size_per_gpu": whole(1, "None packs rows by tokens").or_none(),
    "torch_compiler": text('"default" is one').or_none(),
    "lora_config": _of(LoraConfig, "peft.LoraConfig(r=8), or a mapping of its keywords"),
    "hp_config": _of(
        HyperparameterConfig, "HyperparameterConfig(lr=RLParameter(min=1e-5, max=1e-3))"
    ),
    "cosine_lr_schedule_config": _of(
        CosineLRScheduleConfig, "CosineLRScheduleConfig(num_epochs=100), or a mapping"
    ),
    **dict.fromkeys(_FLAGS, flag()),
}

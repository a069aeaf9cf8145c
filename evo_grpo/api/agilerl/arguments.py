"""The arguments of AgileRL's constructors, each declared once, in its documented position.

`Arguments` checks them and translates them to settings of this package. An argument without effect
warns, or is refused if ignoring it would mislead.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from peft import LoraConfig, PeftModel

from evo_grpo.api.agilerl.checks import (
    CONFIGS,
    RULES,
    check_accelerator,
    check_critic,
    from_mapping,
    is_space,
)
from evo_grpo.api.agilerl.configs import VLLM_NAMES, CosineLRScheduleConfig, VLLMConfig
from evo_grpo.errors import ConfigError
from evo_grpo.model.loading import merge_dtype_keywords
from evo_grpo.schema.problems import Path, Problem, Problems
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.schema.validation import check_all, is_whole, plain_number, shown
from evo_grpo.settings import AgentSettings, LoraSettings
from evo_grpo.settings.keywords import agent_settings, unknown_keyword
from evo_grpo.settings.run import without_effect_of_agents
from evo_grpo.settings.without_effect import WithoutEffect
from evo_grpo.training.assemble import Objects
from evo_grpo.training.start_adapter import lora_config

SPACES = ("observation_space", "action_space")
"""The first two arguments in AgileRL's examples; a language model needs neither."""

KEYWORD_ONLY = ("loss_type", "tokenizer")
"""Arguments without a documented position."""

DEFAULT_LORA = LoraSettings(r=16, alpha=32)

KEYWORDS: dict[str, str] = {
    **{
        name: name
        for name in (
            *("device", "seed", "batch_size", "beta", "lr", "clip_coef", "max_grad_norm"),
            *("update_epochs", "group_size", "temperature", "repetition_penalty", "top_p"),
            *("top_k", "min_p", "max_output_tokens", "min_output_tokens", "max_model_len"),
            *("gradient_checkpointing", "adv_norm", "whiten_advantages", "adv_clip_range"),
            *("filter_zero_adv", "adv_filter_eps", "loss_type"),
        )
    },
    "model_name": "model",
    "model_config": "config",
    "hp_config": "hyperparameters",
    "micro_batch_size_per_gpu": "max_rows_per_microbatch",
    "hf_generate_chunk_size": "max_decode_prompts",
    "cosine_lr_schedule_config": "lr_schedule",
    "torch_compiler": "compile",
    "use_kl_advantage_shaping": "kl_shaping",
    "use_separate_reference_adapter": "separate_reference",
}
"""AgileRL's name of a setting -> its name in `evo_grpo.GRPO`."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of AgileRL's constructors, in the order of its documented signature.

    Attributes:
        pad_token_id: Token id for padding, which may be the end token: masks come from lengths.
        pad_token: The padding token as a string; set on a tokenizer without one.
        model_name: Embedded name, `smollm2`, folder, .gguf file or hub id.
        actor_network: A transformers model that is adapted in place, instead of a name; or a
            PeftModel, which is dismantled (pass a copy.deepcopy to keep it).
        model_config: Keywords for `from_pretrained`; only with `model_name`.
        hp_config: Ranges of the hyperparameters that mutate; None switches mutation off.
        index: Number of the agent in its population.
        batch_size: Completions per optimizer step; None takes all.
        beta: Weight of the KL divergence from the reference.
        lr: Learning rate of AdamW.
        clip_coef: Clip range of the probability ratio: c for [1 - c, 1 + c], or the bounds
            themselves.
        max_grad_norm: Gradient norm above which a step is scaled down; None never scales.
        update_epochs: Passes over the rows of a step.
        group_size: Completions per prompt.
        temperature: Sampling temperature in training.
        repetition_penalty: Divides the logits of tokens seen before.
        top_p: Nucleus mass kept when sampling.
        top_k: Likeliest tokens kept when sampling; 0 keeps all.
        min_p: Least probability kept, relative to the likeliest token.
        use_memory_efficient_params: Always in force here: the base exists once, frozen; False
            warns.
        calc_position_embeddings: Always in force: positions come from lengths; False warns.
        micro_batch_size_per_gpu: Rows per forward and backward pass; None packs rows by tokens.
        max_output_tokens: Longest completion; None takes the environment's hint, else 32.
        min_output_tokens: The end token cannot come before this many tokens.
        max_model_len: Longest prompt plus completion, capped by the model's own context.
        hf_generate_chunk_size: Prompts decoded at once, to bound the cache's memory.
        lora_config: peft.LoraConfig, or its keywords; None: r=16, alpha=32, all linear layers.
        cosine_lr_schedule_config: Warm-up and cosine over GRPO steps; None keeps lr.
        accelerator: An accelerate.Accelerator with DeepSpeed at ZeRO stage 2 or 3, whose processes
            train each agent together. Another one has no effect in one process and is refused in
            several.
        device: cpu, cuda, cuda:N, mps or auto.
        wrap: Nothing is wrapped without an accelerator; False warns.
        clone: No effect in the constructor, True warns; use agent.clone().
        use_vllm: Generate with vLLM, one engine for all agents; see docs/engines.md.
        vllm_config: Settings of vLLM; an error without `use_vllm`.
        seed: Root of every random stream; any integer of up to 20 digits.
        gradient_checkpointing: Recompute activations in the backward pass.
        torch_compiler: torch.compile mode for the base's layers that carry no adapter.
        use_liger_loss: Warns and falls back to the chunked log-probs built in.
        use_kl_advantage_shaping: KL per token moves the advantages, instead of a penalty.
        adv_norm: `mean_std` divides by the group's std, `mean_only` only centres.
        use_separate_reference_adapter: Use a frozen adapter for the KL term; False uses the adapter
            that agents start from, or the base.
        whiten_advantages: Whiten advantages over the agent's valid tokens.
        adv_clip_range: Clamp advantages to [-x, x], after everything else.
        filter_zero_adv: Drop completions with |advantage| <= adv_filter_eps.
        adv_filter_eps: Threshold of `filter_zero_adv`, which it needs.
        reduce_memory_peak: One row per forward and backward pass.
        use_fused_linear_logprobs: Always in force here, in both directions: no (B, T, V) tensor.
        cast_logprobs_to_fp32: Always in force here; False warns.
        loss_type: grpo, gspo, cispo, bnpo, dr_grpo, dapo, luspo, sapo or vespo; None is the loss of
            the class.
        tokenizer: The tokenizer; None loads that of `model_name`, or uses the environment's.

    Raises:
        ConfigError: A value has a wrong type; `translated` checks settings that act.
    """

    pad_token_id: int | None = None
    pad_token: str | None = None
    model_name: str | None = None
    actor_network: Any = None
    model_config: Mapping[str, Any] | None = None
    hp_config: HyperparameterConfig | None = None
    index: int = 0
    batch_size: int | None = 16
    beta: float = 0.001
    lr: float = 5e-7
    clip_coef: float | tuple[float, float] = 0.2
    max_grad_norm: float | None = 0.1
    update_epochs: int = 1
    group_size: int = 8
    temperature: float = 0.9
    repetition_penalty: float = 1.0
    top_p: float = 0.95
    top_k: int = 50
    min_p: float = 0.0
    use_memory_efficient_params: bool = True
    calc_position_embeddings: bool = True
    micro_batch_size_per_gpu: int | None = None
    max_output_tokens: int | None = None
    min_output_tokens: int | None = 0
    max_model_len: int | None = 1024
    hf_generate_chunk_size: int | None = None
    lora_config: LoraConfig | None = None
    cosine_lr_schedule_config: CosineLRScheduleConfig | None = None
    accelerator: Any = None
    device: str = "cpu"
    wrap: bool = True
    clone: bool = False
    use_vllm: bool = False
    vllm_config: VLLMConfig | None = None
    seed: int = 42
    gradient_checkpointing: bool = True
    torch_compiler: str | None = None
    use_liger_loss: bool = False
    use_kl_advantage_shaping: bool = False
    adv_norm: str = "mean_std"
    use_separate_reference_adapter: bool = True
    whiten_advantages: bool = False
    adv_clip_range: float | None = None
    filter_zero_adv: bool = False
    adv_filter_eps: float = 0.0
    reduce_memory_peak: bool = False
    use_fused_linear_logprobs: bool = False
    cast_logprobs_to_fp32: bool = True
    loss_type: str | None = None
    tokenizer: Any = None

    @classmethod
    def of(cls, args: Sequence[Any], keywords: Mapping[str, Any]) -> Self:
        """Name, check and complete the arguments of a call; see `by_name` for `args`.

        Raises:
            ConfigError: An argument is unknown, given twice or of a wrong type.
        """
        given = by_name(args, keywords)
        for name in given:
            check_critic(name)
            if name not in ARGUMENTS:
                raise unknown_keyword("the constructor", name, dict.fromkeys(ARGUMENTS))
        given = {name: plain_number(value) for name, value in given.items()}
        for name in CONFIGS:
            if isinstance(given.get(name), Mapping):
                given[name] = from_mapping(name, given[name])
        check_all(RULES, given)
        if isinstance(given.get("device"), torch.device):
            given["device"] = str(given["device"])
        arguments = cls(**given)
        arguments._refuse_unavailable()
        return arguments._fitting(given)

    def translated(self, kind: str) -> tuple[AgentSettings, Objects]:
        """Return the settings of `evo_grpo`; warns about arguments without effect.

        Args:
            kind: The algorithm: grpo, gspo or cispo.

        Raises:
            ConfigError: A value is out of range, or values contradict each other.
        """
        keywords: dict[str, Any] = {ours: getattr(self, name) for name, ours in KEYWORDS.items()}
        keywords.update(
            config=None if self.model_config is None else dict(self.model_config),
            hyperparameters=self.hp_config if self.hp_config is not None else {},
            min_output_tokens=self.min_output_tokens or 0,
        )
        stage = check_accelerator(self.accelerator)
        if stage is not None:
            keywords.update(zero=stage, device=self.accelerator.device.type)
        if self.reduce_memory_peak:
            keywords["max_rows_per_microbatch"] = 1
        if self.cosine_lr_schedule_config is not None:
            keywords["lr_schedule"] = self.cosine_lr_schedule_config.schedule()
        if self.lora_config is None:
            keywords["lora"] = DEFAULT_LORA
        if self.use_vllm:
            keywords.update(rollout="vllm", max_decode_prompts=None)
            keywords.update((self.vllm_config or VLLMConfig()).keywords())
        keywords = _with_model_keywords(keywords)
        try:
            settings = agent_settings(keywords, kind=kind)
        except Problems as problems:
            raise Problems(*map(_renamed, problems.found)) from None
        self._warn_of_no_effect(settings)
        padding = None if self.pad_token_id is None else (self.pad_token_id, self.pad_token)
        accelerator = None if stage is None else self.accelerator
        return settings, Objects(
            self.actor_network, self.tokenizer, self._lora(), padding, accelerator
        )

    def _lora(self) -> LoraConfig | None:
        """Return PEFT's LoraConfig; None for a PeftModel, whose adapter has one."""
        if self.lora_config is not None:
            return self.lora_config
        plain = self.actor_network is not None and not isinstance(self.actor_network, PeftModel)
        return lora_config(DEFAULT_LORA) if plain else None

    def _fitting(self, given: Mapping[str, Any]) -> Self:
        """Return the arguments with `max_output_tokens` below the default `max_model_len`.

        Scripts for AgileRL leave its default of 1024 in place, which cuts longer completions.
        """
        longest, context = self.max_output_tokens, self.max_model_len
        # Other types are refused with the other settings.
        if not isinstance(longest, int) or not isinstance(context, int):
            return self
        if "max_model_len" in given or longest < context:
            return self
        warnings.warn(
            f"max_output_tokens: expected less than max_model_len ({context}), so that a prompt "
            f"fits too, got {longest}; completions are cut there, raise max_model_len",
            UserWarning,
            stacklevel=4,
        )
        return replace(self, max_output_tokens=context - 1)

    def _refuse_unavailable(self) -> None:
        if self.vllm_config is not None and not self.use_vllm:
            raise ConfigError("vllm_config: has no effect without use_vllm=True; leave it out")
        if (self.actor_network is None) == (self.model_name is None):
            raise ConfigError(
                "model: expected exactly one of model_name= and actor_network=, got "
                f"model_name={self.model_name!r} and "
                f"actor_network={type(self.actor_network).__name__}"
            )
        if self.model_config is not None and self.model_name is None:
            raise ConfigError(
                "model_config: expected it with model_name=, which it configures, got it with "
                "actor_network=; configure that network itself"
            )

    def _warn_of_no_effect(self, settings: AgentSettings) -> None:
        told = {name: why for name, (silent, why) in self._silent().items() if silent}
        for name, why in {**told, **dict(self._found_in_table(settings))}.items():
            warnings.warn(f"{name}: {why}", WithoutEffect, stacklevel=4)

    def _silent(self) -> dict[str, tuple[bool, str]]:
        """Return for each argument of AgileRL alone whether it has no effect, and the reason."""
        rows, vllm = self.micro_batch_size_per_gpu, self.vllm_config or VLLMConfig()
        return {
            "pad_token": (
                self.pad_token is not None and self.pad_token_id is None,
                "has no effect without pad_token_id; give the id of that token too",
            ),
            "micro_batch_size_per_gpu": (
                self.reduce_memory_peak and rows not in (None, 1),
                "has no effect with reduce_memory_peak=True, which takes one row at a time; leave "
                "one of them out",
            ),
            "use_memory_efficient_params": (
                not self.use_memory_efficient_params,
                "False has no effect: the base exists once and stays in place",
            ),
            "cast_logprobs_to_fp32": (
                not self.cast_logprobs_to_fp32,
                "False has no effect: log-probs are always computed in float32",
            ),
            "calc_position_embeddings": (
                not self.calc_position_embeddings,
                "False has no effect: positions always come from real lengths",
            ),
            "use_liger_loss": (
                self.use_liger_loss,
                "falls back to the chunked log-probs built in, which hold no (B, T, V) tensor "
                "either; Liger's kernels serve one adapter at a time",
            ),
            "wrap": (
                not self.wrap,
                "False has no effect: nothing is wrapped without an accelerator",
            ),
            "clone": (self.clone, "has no effect in the constructor; use agent.clone()"),
            "hf_generate_chunk_size": (
                self.use_vllm and self.hf_generate_chunk_size is not None,
                "has no effect with use_vllm=True, which makes its own batches",
            ),
            "vllm_config.sleep_mode_level": (
                vllm.sleep_mode_level != 1 and not vllm.sleep_mode,
                "has no effect without sleep_mode=True",
            ),
        }

    def _found_in_table(self, settings: AgentSettings) -> Iterator[tuple[str, str]]:
        """Yield the settings without effect beside the others, by AgileRL's names, with reasons."""
        for path, why in without_effect_of_agents(settings):
            ours, _, rest = path.partition(".")
            name = _NAMES.get(ours, ours)
            # A default of AgileRL that differs from ours was not given by the caller.
            if getattr(self, name, None) != getattr(type(self), name, None):
                yield (f"{name}.{rest}" if rest else name), why


ARGUMENTS: tuple[str, ...] = tuple(entry.name for entry in fields(Arguments))
"""All names, in order."""

POSITIONS: tuple[str, ...] = tuple(name for name in ARGUMENTS if name not in KEYWORD_ONLY)
"""The order of AgileRL's documented signature."""


def by_name(
    args: Sequence[Any], keywords: Mapping[str, Any], after_spaces: Sequence[str] = ()
) -> dict[str, Any]:
    """Return positional and keyword arguments by name.

    Args:
        args: Arguments in the order of `POSITIONS`, or two gymnasium spaces and `after_spaces`.
        keywords: The arguments given by name.
        after_spaces: Names of the positions after the spaces.

    Returns:
        All arguments except the spaces, which a language model does not need.

    Raises:
        ConfigError: One is given twice, there are too many, or the first is neither a padding id
            nor a space.
    """
    names: Sequence[str] = POSITIONS
    if args and is_space(args[0]):
        names = (*SPACES, *after_spaces)
        if len(args) == 1 and "action_space" not in keywords:
            raise ConfigError(
                "action_space: expected it beside observation_space, got one positional argument; "
                "give both spaces, or neither: they are not needed"
            )
    elif args and not (is_whole(args[0]) or args[0] is None):
        raise ConfigError(
            f"positional arguments: expected pad_token_id (an integer) or observation_space "
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


def _with_model_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Move dtype and trust_remote_code from `model_config` to the settings of the same names."""
    own = dict(keywords)
    extra = own.pop("config") or {}
    if own["model"] is None:
        return {name: value for name, value in own.items() if name not in ("model", "lora")}
    dtype, extra = merge_dtype_keywords(extra.pop("dtype", "auto"), extra)
    own["dtype"] = str(dtype).removeprefix("torch.")
    if "trust_remote_code" in extra:
        own["trust_remote_code"] = extra.pop("trust_remote_code")
    return {**own, "config": extra}


def _renamed(problem: Problem) -> Problem:
    """Return a problem under AgileRL's names."""
    name, *rest = problem.path or ("",)
    if name == "vllm" and rest:
        rest[0] = _NAMES_OF_VLLM.get(str(rest[0]), str(rest[0]))
    path: Path = (_NAMES.get(str(name), str(name)), *rest)
    return Problem(path, problem.text.replace("hyperparameters.", "hp_config."))


_NAMES = {ours: name for name, ours in KEYWORDS.items()}
_NAMES.update(
    dtype="model_config",
    trust_remote_code="model_config",
    vllm="vllm_config",
    max_decode_rows="vllm_config.max_num_seqs",
)
_NAMES_OF_VLLM = {ours: name for name, ours in VLLM_NAMES.items()} | {"sleep_level": "sleep_mode"}

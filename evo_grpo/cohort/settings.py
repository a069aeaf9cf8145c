"""The constructor's arguments as small typed groups, common ones first.

The class takes them by the reference API's names. Each field carries its meaning; the table in
docs/reference.md is generated from here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from evo_grpo.cohort.arguments import check_arguments
from evo_grpo.errors import ConfigError
from evo_grpo.objective.lr_schedule import CosineLRScheduleConfig
from evo_grpo.schema.hparams import Hparams, HyperparameterConfig


def _means(meaning: str) -> dict[str, str]:
    return {"meaning": meaning}


@dataclass(frozen=True)
class VLLMConfig:
    """Settings of generation with vLLM, for `use_vllm=True`.

    Attributes:
        tensor_parallel_size: Devices one engine is spread over.
        gpu_memory_utilization: Share of the device's memory the engine may take.
        max_num_seqs: Sequences decoded at once.
        sleep_mode: Free the engine's memory while the agents learn.
    """

    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.3
    max_num_seqs: int = 8
    sleep_mode: bool = False


@dataclass(frozen=True)
class ModelSettings:
    """Which base model the agent adapts."""

    model_name: str | None = field(
        default=None,
        metadata=_means("embedded name, `smollm2`, folder, .gguf file or hub id"),
    )
    actor_network: Any = field(
        default=None,
        metadata=_means(
            "a transformers model to adapt, in place, instead of a name; or a PeftModel, which is "
            "taken apart: copy.deepcopy keeps one"
        ),
    )
    model_config: Mapping[str, Any] | None = field(
        default=None,
        metadata=_means("keywords for `from_pretrained`; only with `model_name`"),
    )
    tokenizer: Any = field(
        default=None,
        metadata=_means("loaded by name when there is one, else the environment's is used"),
    )
    pad_token_id: int | None = field(
        default=None,
        metadata=_means("written into padding; masks come from lengths, so eos is fine"),
    )
    pad_token: str | None = field(
        default=None, metadata=_means("the padding token's text; set on a tokenizer without one")
    )
    device: str = field(default="cpu", metadata=_means("cpu, cuda, cuda:N or auto"))
    seed: int = field(default=42, metadata=_means("root of every random stream; any whole number"))
    index: int = field(default=0, metadata=_means("number of the agent in its population"))


@dataclass(frozen=True)
class OutputSettings:
    """How long prompts and completions may be."""

    max_output_tokens: int | None = field(
        default=None,
        metadata=_means("longest completion; None takes the environment's hint, else 32"),
    )
    min_output_tokens: int | None = field(
        default=0, metadata=_means("the end token cannot come before this many tokens")
    )
    max_model_len: int | None = field(
        default=1024,
        metadata=_means("longest prompt plus completion, capped by the model's own context"),
    )
    hf_generate_chunk_size: int | None = field(
        default=None, metadata=_means("prompts decoded at once, to bound the cache's memory")
    )


@dataclass(frozen=True)
class LossSettings:
    """What is optimized."""

    loss_type: str = field(
        default="grpo",
        metadata=_means("grpo, gspo, cispo; also bnpo, dr_grpo, dapo, luspo, sapo, vespo"),
    )
    adv_norm: str = field(
        default="mean_std",
        metadata=_means("`mean_std` divides by the group's std, `mean_only` only centres"),
    )
    use_kl_advantage_shaping: bool = field(
        default=False, metadata=_means("KL per token moves the advantages, instead of a penalty")
    )
    whiten_advantages: bool = field(
        default=False, metadata=_means("whiten advantages over the agent's valid tokens")
    )
    adv_clip_range: float | None = field(
        default=None, metadata=_means("clamp advantages to [-x, x], after everything else")
    )
    filter_zero_adv: bool = field(
        default=False, metadata=_means("drop completions with |advantage| <= adv_filter_eps")
    )
    adv_filter_eps: float = field(
        default=0.0, metadata=_means("threshold of `filter_zero_adv`, which it needs")
    )


@dataclass(frozen=True)
class MemorySettings:
    """What trades time for memory."""

    gradient_checkpointing: bool = field(
        default=True, metadata=_means("recompute activations in the backward pass")
    )
    micro_batch_size_per_gpu: int | None = field(
        default=None, metadata=_means("rows per forward and backward; None packs by tokens")
    )
    reduce_memory_peak: bool = field(
        default=False, metadata=_means("one row per forward and backward (older spelling)")
    )
    use_fused_linear_logprobs: bool = field(
        default=False,
        metadata=_means("always in force here, in both directions: no (B, T, V) tensor"),
    )
    use_memory_efficient_params: bool = field(
        default=True, metadata=_means("always in force here: the base exists once, frozen")
    )
    cast_logprobs_to_fp32: bool = field(
        default=True, metadata=_means("always in force here; False warns")
    )
    calc_position_embeddings: bool = field(
        default=True, metadata=_means("always in force: positions come from lengths; False warns")
    )
    use_liger_loss: bool = field(
        default=False, metadata=_means("warns and falls back to the chunked log-probs built in")
    )
    torch_compiler: str | None = field(
        default=None,
        metadata=_means("torch.compile mode for the base's layers that carry no adapter"),
    )


@dataclass(frozen=True)
class AdapterSettings:
    """The LoRA slots."""

    lora_config: Any = field(
        default=None,
        metadata=_means("peft.LoraConfig, or its keywords; None: r=16, alpha=32, all linear"),
    )
    use_separate_reference_adapter: bool = field(
        default=True,
        metadata=_means("a frozen adapter for the KL term; False is the base, adapters off"),
    )


@dataclass(frozen=True)
class EvolutionSettings:
    """What may mutate, and how lr goes over time."""

    hp_config: HyperparameterConfig | None = field(
        default=None, metadata=_means("what may mutate; None switches mutation off")
    )
    cosine_lr_schedule_config: CosineLRScheduleConfig | None = field(
        default=None, metadata=_means("warm-up and cosine over GRPO steps; None keeps lr")
    )


@dataclass(frozen=True)
class RuntimeSettings:
    """Engines and processes."""

    use_vllm: bool = field(
        default=False, metadata=_means("not available yet: refused with the remedy")
    )
    vllm_config: VLLMConfig | None = field(
        default=None, metadata=_means("settings of vLLM; an error without `use_vllm`")
    )
    accelerator: Any = field(
        default=None, metadata=_means("not available yet: refused with the remedy")
    )
    wrap: bool = field(default=True, metadata=_means("nothing is wrapped without an accelerator"))
    clone: bool = field(default=False, metadata=_means("for `clone()` of the reference API"))


@dataclass(frozen=True)
class AgentSettings:
    """All groups together.

    Attributes:
        model: The base.
        hparams: What may differ between agents.
        output: Lengths.
        loss: Loss and advantages.
        memory: Time for memory.
        adapters: LoRA.
        evolution: Mutation and schedule.
        runtime: Engines and processes.
        given: Names of the arguments that the caller spelled out.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    hparams: Hparams = field(default_factory=Hparams)
    output: OutputSettings = field(default_factory=OutputSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    adapters: AdapterSettings = field(default_factory=AdapterSettings)
    evolution: EvolutionSettings = field(default_factory=EvolutionSettings)
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)
    given: frozenset[str] = frozenset()

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> AgentSettings:
        """Sort keyword arguments into their groups.

        Raises:
            ConfigError: For an unknown name, with the nearest right one, and for a value of a
                wrong type or out of range.
        """
        left = check_arguments(arguments)
        built: dict[str, Any] = {}
        for name, group in GROUPS.items():
            mine = {f.name: left.pop(f.name) for f in fields(group) if f.name in left}
            built[name] = group(**mine)
        if left:
            wrong = min(left)
            if "critic" in wrong:
                raise ConfigError(
                    f"{wrong}: GRPO has no critic, advantages come from the group; leave it out"
                )
            near = difflib.get_close_matches(wrong, argument_names(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigError(
                f"unknown argument {wrong!r}{hint} Expected one of {', '.join(argument_names())}"
            )
        return cls(**built, given=frozenset(arguments))

    def arguments(self) -> dict[str, Any]:
        """Return every argument with its value, by name."""
        return {
            f.name: getattr(getattr(self, name), f.name)
            for name, group in GROUPS.items()
            for f in fields(group)
        }


GROUPS: dict[str, Any] = {
    "model": ModelSettings,
    "hparams": Hparams,
    "output": OutputSettings,
    "loss": LossSettings,
    "memory": MemorySettings,
    "adapters": AdapterSettings,
    "evolution": EvolutionSettings,
    "runtime": RuntimeSettings,
}


def argument_fields() -> Iterator[tuple[str, Field[Any]]]:
    """Yield (group, field) for every argument the constructors take, common groups first."""
    for name, group in GROUPS.items():
        for entry in fields(group):
            yield name, entry


def argument_names() -> list[str]:
    """Return every argument's name."""
    return [entry.name for _, entry in argument_fields()]

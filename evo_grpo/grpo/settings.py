"""The constructor's arguments as small typed groups, common ones first; the class takes them by the reference API's names.

Each field carries its meaning, so that the table in docs/reference.md is generated from here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from evo_grpo.errors import ConfigError
from evo_grpo.hparams import Hparams, HyperparameterConfig


def _setting(default: Any, meaning: str) -> Any:  # noqa: ANN401 -- a dataclass field of any type
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class ModelSettings:
    """Which base model the agent adapts."""

    model_name: str | None = _setting(
        None, "embedded name, `smollm2`, folder, .gguf file or hub id"
    )
    actor_network: Any = _setting(
        None, "a transformers causal language model to adapt instead of a name"
    )
    tokenizer: Any = _setting(
        None, "its tokenizer; by name it is loaded, else the environment's is used"
    )
    pad_token_id: int | None = _setting(
        None, "id written into padding; masks come from lengths, so eos is fine"
    )
    pad_token: str | None = _setting(None, "the padding token's text, kept for information")
    device: str = _setting("cpu", "cpu, cuda, cuda:N or auto")
    seed: int = _setting(42, "root of every random stream")
    index: int = _setting(0, "kept for bookkeeping; a population numbers its agents itself")


@dataclass(frozen=True)
class OutputSettings:
    """How long prompts and completions may be."""

    max_output_tokens: int | None = _setting(
        None, "longest completion; None takes the environment's hint, else 32"
    )
    min_output_tokens: int | None = _setting(0, "the end token cannot come before this many tokens")
    max_model_len: int | None = _setting(
        1024, "longest prompt plus completion, capped by the model's own context"
    )
    hf_generate_chunk_size: int | None = _setting(
        None, "prompts decoded at once, to bound the cache's memory"
    )


@dataclass(frozen=True)
class LossSettings:
    """What is optimized."""

    loss_type: str = _setting(
        "grpo", "grpo, gspo, cispo, or one of bnpo, dr_grpo, dapo, luspo, sapo, vespo"
    )
    adv_norm: str = _setting("mean_std", "mean_std divides by the group's std, mean_only centres")


@dataclass(frozen=True)
class MemorySettings:
    """What trades time for memory."""

    gradient_checkpointing: bool = _setting(True, "recompute activations in the backward pass")
    micro_batch_size_per_gpu: int | None = _setting(
        None, "rows per forward and backward; None packs by tokens"
    )


@dataclass(frozen=True)
class AdapterSettings:
    """The LoRA slots."""

    lora_config: Any = _setting(
        None, "a peft.LoraConfig; None is r=16, alpha=32 on all linear layers"
    )
    use_separate_reference_adapter: bool = _setting(
        True, "a frozen reference adapter for the KL term; False takes the base with adapters off"
    )


@dataclass(frozen=True)
class EvolutionSettings:
    """What may mutate."""

    hp_config: HyperparameterConfig | None = _setting(
        None, "hyperparameters that may mutate; None switches it off"
    )


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
        evolution: Mutation.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    hparams: Hparams = field(default_factory=Hparams)
    output: OutputSettings = field(default_factory=OutputSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    adapters: AdapterSettings = field(default_factory=AdapterSettings)
    evolution: EvolutionSettings = field(default_factory=EvolutionSettings)

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> AgentSettings:
        """Sort keyword arguments into their groups.

        Raises:
            ConfigError: For an unknown name, with the nearest right one.
        """
        left = dict(arguments)
        built: dict[str, Any] = {}
        for name, group in _groups().items():
            built[name] = group(
                **{f.name: left.pop(f.name) for f in fields(group) if f.name in left}
            )
        if left:
            wrong = sorted(left)[0]
            near = difflib.get_close_matches(wrong, argument_names(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"unknown argument {wrong!r}, expected one of {', '.join(argument_names())}{hint}"
            )
        return cls(**built)


def _groups() -> dict[str, Any]:
    return {
        "model": ModelSettings,
        "hparams": Hparams,
        "output": OutputSettings,
        "loss": LossSettings,
        "memory": MemorySettings,
        "adapters": AdapterSettings,
        "evolution": EvolutionSettings,
    }


def argument_names() -> list[str]:
    """Return every argument the constructors take."""
    return [f.name for group in _groups().values() for f in argument_fields(group)]


def argument_fields(group: Any) -> tuple[Field[Any], ...]:  # noqa: ANN401 -- a dataclass type
    """Return a group's fields."""
    return fields(group)

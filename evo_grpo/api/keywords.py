"""The types of all keywords that are settings, for editors and type checkers.

Written by docs/generate from the declarations in evo_grpo/schema, settings and evolve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from peft import LoraConfig

    from evo_grpo.evolve.kinds import Exploration, Selection
    from evo_grpo.evolve.protocols import Explorer, Selector
    from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter
    from evo_grpo.settings import (
        FitnessConfig,
        LoraSettings,
        LRSchedule,
        ModelConfig,
        StopConfig,
        VLLMSettings,
    )
    from evo_grpo.settings.trackers import TrackerConfig


class AgentKeywords(TypedDict, total=False):
    """Keywords of GRPO, GSPO and CISPO."""

    model: str | ModelConfig | Any
    tokenizer: Any
    seed: int
    lora: LoraSettings | LoraConfig | Mapping[str, Any]
    config: Mapping[str, Any]
    trust_remote_code: bool
    adapter: str | None
    lr: float | None
    beta: float
    entropy_coef: float
    clip_coef: float | tuple[float, float]
    group_size: int
    update_epochs: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    max_grad_norm: float | None
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    batch_size: int | None
    importance_sampling_level: Literal["token", "sequence"] | None
    delta: float | None
    kl_bias_correction: bool
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    vespo_positive: tuple[float, float]
    vespo_negative: tuple[float, float]
    sampler_correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ]
    sampler_ratio_cap: float
    off_policy_mask_threshold: float | None
    loss_type: (
        Literal["grpo", "gspo", "cispo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "vespo"] | None
    )
    prompts_per_step: int | None
    max_output_tokens: int | None
    min_output_tokens: int
    stop: list[str | int]
    max_model_len: int | None
    adv_norm: Literal["mean_std", "mean_only", "batch_std"]
    whiten_advantages: bool
    adv_clip_range: float | None
    filter_zero_adv: bool
    adv_filter_eps: float
    mask_truncated_completions: bool
    overlong_buffer: int | None
    overlong_penalty: float
    dynamic_sampling_tokens: int | None
    kl_shaping: bool
    separate_reference: bool
    lr_schedule: LRSchedule | Mapping[str, Any] | None
    hyperparameters: HyperparameterConfig | Mapping[str, RLParameter | Mapping[str, Any]] | None
    device: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    quantization: Literal["int8", "nf4"] | None
    threads: int | None
    shards: int | None
    overlap: bool | Literal["auto"]
    offload_adapters: bool
    base: Literal["replicated", "sharded"]
    zero: Literal[2, 3] | None
    rollout: Literal["native", "vllm"]
    vllm: VLLMSettings | Mapping[str, Any]
    memory: str | None
    max_tokens_per_microbatch: int | None
    max_rows_per_microbatch: int | None
    max_decode_rows: int | None
    max_decode_prompts: int | None
    gradient_checkpointing: bool
    cuda_graphs: bool
    kernels: Literal["auto", "on", "off"]


class PopulationKeywords(AgentKeywords, total=False):
    """Keywords of `population`."""

    size: int
    init: (
        Literal["latin_hypercube", "sample", "same"]
        | Sequence[Mapping[str, Any]]
        | Mapping[str, Any]
    )


class TrainKeywords(TypedDict, total=False):
    """Keywords of `Population.train`."""

    name: str
    rounds: int
    steps_per_round: int
    stop: StopConfig | Mapping[str, Any]
    decisions: list[int] | Literal["every"] | None
    sizes: list[int] | Literal["constant"] | None
    selection: Selection | Selector | Mapping[str, Any] | str
    exploration: Exploration | Explorer | Mapping[str, Any] | str
    significance: float | None
    archive: bool
    dead_steps: int | None
    fitness: FitnessConfig | Mapping[str, Any]
    inherit_optimizer: bool
    completions: int
    columns: list[str]
    metrics: bool
    checkpoints: Literal["all", "last", "best"] | int
    optuna: bool
    storage: str | None
    trackers: Sequence[TrackerConfig | Mapping[str, Any] | str]

"""Defines AgileRL's arguments and configurations.

`Arguments` turns them into keywords of `evo_grpo.GRPO`; an argument without effect gives a warning.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, Self

from peft import LoraConfig, PeftModel

from evo_grpo.api.calls import separated
from evo_grpo.errors import ConfigError
from evo_grpo.learn.updates import lr_factor
from evo_grpo.model.loading import merge_dtype_keywords
from evo_grpo.population.zero.engine import stage_of
from evo_grpo.schema.problems import Path, Problem, Problems
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.schema.validation import flag, is_number, whole
from evo_grpo.settings import AgentSettings, EngineConfig, LoraSettings, LRSchedule, VLLMSettings
from evo_grpo.settings.keywords import AGENT_KEYWORDS, unknown_keyword
from evo_grpo.settings.run import without_effect_of_agents
from evo_grpo.settings.without_effect import WithoutEffect
from evo_grpo.training.assemble import Objects


@dataclass(frozen=True)
class VLLMConfig:
    """The settings of vLLM, for `use_vllm=True`: those of AgileRL, and `python`.

    In AgileRL every agent has an engine; here one engine serves all agents. The defaults of
    `max_num_seqs`, `max_loras` and `max_lora_rank` are AgileRL's and too low for that: they are
    replaced by what the agents need, and any other value is used unchanged. docs/engines.md
    describes the settings; the attributes listed here have other names there.

    Attributes:
        max_num_seqs: Number of sequences decoded at once.
        sleep_mode: Free the engine's memory while the agents learn; also for several agents.
        sleep_mode_level: 1 keeps the base in the memory of the CPU, 2 loads it again.
        vllm_model_name_or_path: The base that vLLM loads; None takes the trainer's base.
        stop_sequences: Strings or token ids that end a completion.
        lora_staging_dir: Folder through which vLLM gets the adapters.
    """

    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.3
    max_num_seqs: int = 8
    max_num_batched_tokens: int | None = None
    enforce_eager: bool | None = None
    sleep_mode: bool = False
    sleep_mode_level: int = 1
    dtype: str | None = None
    quantization: str | None = None
    vllm_model_name_or_path: str | None = None
    kv_cache_dtype: str | None = None
    max_lora_rank: int = 16
    max_loras: int = 1
    _: KW_ONLY
    stop_sequences: list[str | int] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    kv_cache_memory_bytes: int | None = None
    lora_staging_dir: str | None = None
    python: str | None = None

    def keywords(self) -> dict[str, Any]:
        """Return these settings as the keywords `vllm`, `stop` and `max_decode_rows` of GRPO.

        `max_decode_rows` is left out if `max_num_seqs` is AgileRL's default.
        """
        vllm: dict[str, Any] = {
            ours: getattr(self, name)
            for name, ours in VLLM_NAMES.items()
            if getattr(self, name) != _UNSAID.get(name, ...)
        }
        vllm["sleep_level"] = self.sleep_mode_level if self.sleep_mode else 0
        vllm["dtype"] = self.dtype or "auto"
        keywords = {"vllm": vllm, "stop": self.stop_sequences or []}
        if self.max_num_seqs == _UNSAID["max_num_seqs"]:
            return keywords
        return {**keywords, "max_decode_rows": self.max_num_seqs}

    @classmethod
    def of(cls, engine: EngineConfig, stop: Sequence[str | int] = ()) -> Self | None:
        """Return the settings of vLLM under AgileRL's names; None if vLLM is not selected."""
        vllm = engine.rollout_settings
        if not isinstance(vllm, VLLMSettings):
            return None
        values: dict[str, Any] = {n: getattr(vllm, ours) for n, ours in VLLM_NAMES.items()}
        values = {n: _UNSAID.get(n) if v is None else v for n, v in values.items()}
        values.update(
            sleep_mode=vllm.sleep_level > 0,
            sleep_mode_level=vllm.sleep_level or 1,
            dtype=None if vllm.dtype == "auto" else vllm.dtype,
            stop_sequences=list(stop) or None,
            max_num_seqs=engine.max_decode_rows or _UNSAID["max_num_seqs"],
        )
        return cls(**values)


VLLM_NAMES: dict[str, str] = {
    **{name: name for f in fields(VLLMConfig) if (name := f.name) in VLLMSettings.model_fields},
    "vllm_model_name_or_path": "model",
    "lora_staging_dir": "adapter_folder",
}
"""AgileRL's name of a setting -> its name in `engine.vllm`."""

_UNSAID = {"max_num_seqs": 8, "max_loras": 1, "max_lora_rank": 16}
"""AgileRL's defaults, which are too low for one engine that serves all agents."""


@dataclass(frozen=True)
class CosineLRScheduleConfig:
    """A schedule of lr over an agent's GRPO steps: a linear warm-up, then a cosine to zero.

    Attributes:
        num_epochs: Number of GRPO steps until the end of the schedule, >= 1.
        warmup_proportion: Share of these steps in which lr rises, in [0, 1).
    """

    num_epochs: int
    warmup_proportion: float = 0.05

    def __post_init__(self) -> None:
        """Raise Problems if a value is out of range."""
        self.schedule()

    def schedule(self) -> LRSchedule:
        """Return the schedule as the setting `lr_schedule` of `evo_grpo.GRPO`."""
        try:
            return LRSchedule(steps=self.num_epochs, warmup_proportion=self.warmup_proportion)
        except Problems as error:
            names: dict[Path, Path] = {("steps",): ("num_epochs",)}
            renamed = (Problem(names.get(p.path, p.path), p.text) for p in error.problems)
            raise Problems(*renamed) from None

    def factor(self, step: int) -> float:
        """Return the factor that multiplies lr in GRPO step `step`, from 0 on; see `lr_factor`."""
        return lr_factor(self.schedule(), step)


SPACES = ("observation_space", "action_space")
"""The first two arguments in AgileRL's examples; a language model needs neither."""

CONTEXT = 1024
"""AgileRL's default of `max_model_len`."""
DEFAULT_LORA = LoraSettings(r=16, alpha=32)

_NO_EFFECT = {
    "use_memory_efficient_params": "the base exists once and stays in place",
    "cast_logprobs_to_fp32": "log-probs are always computed in float32",
    "calc_position_embeddings": "positions always come from real lengths",
    "use_liger_loss": "the chunked log-probs built in hold no (B, T, V) tensor either; Liger's "
    "kernels serve one adapter at a time",
    "torch_compiler": "nothing is compiled",
    "wrap": "nothing is wrapped",
    "clone": "use agent.clone()",
}
"""Argument without effect -> why; a value other than its default gives a warning."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of AgileRL's constructors, in the order of its documented signature.

    `KEYWORDS` maps most arguments to keywords of `evo_grpo.GRPO`, which docs/configuration.md
    describes. `_NO_EFFECT` has the arguments whose values are ignored.

    Attributes:
        pad_token_id: Token id for padding; may be the end token, because masks come from lengths.
        pad_token: The padding token as a string; set on a tokenizer that has none.
        actor_network: A transformers model that is adapted in place, instead of `model_name`; or a
            PeftModel, whose adapter is removed in place (pass a copy.deepcopy to keep it).
        model_config: Keywords for `from_pretrained`; only with `model_name`.
        hp_config: Ranges of the hyperparameters that mutate; None switches mutation off.
        index: Number of the agent in its population.
        lora_config: peft.LoraConfig; None: r=16, alpha=32, all linear layers.
        accelerator: An accelerate.Accelerator with DeepSpeed at ZeRO stage 2 or 3, whose processes
            train each agent together. Any other accelerator has no effect in one process and is
            refused in several.
        use_vllm: Generate with vLLM, one engine for all agents; see docs/engines.md.
        vllm_config: Settings of vLLM; no effect without `use_vllm`.
        reduce_memory_peak: Compute one row per forward and backward pass.
        use_fused_linear_logprobs: Always on here; neither the forward nor the backward pass builds
            a (B, T, V) tensor.
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
    max_model_len: int | None = CONTEXT
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
    _: KW_ONLY  # without a documented position
    loss_type: str | None = None
    tokenizer: Any = None

    @classmethod
    def of(cls, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Self:
        """Return the arguments of a constructor call, without any leading gymnasium spaces."""
        args, keywords = without_spaces(args, keywords)
        for name in keywords:
            if name not in ARGUMENTS:
                raise unknown_keyword("the constructor", name, dict.fromkeys(ARGUMENTS))
        return cls(*args, **keywords)

    def translated(self, kind: str) -> tuple[AgentSettings, Objects]:
        """Return the settings and objects of an agent; warn about arguments without effect.

        `kind` is the algorithm: grpo, gspo or cispo.
        """
        if (self.actor_network is None) == (self.model_name is None):
            raise ConfigError(
                "model: expected exactly one of model_name= and actor_network=, got "
                f"model_name={self.model_name!r} and "
                f"actor_network={type(self.actor_network).__name__}"
            )
        whole(0, "any id of the vocabulary does").or_none().check("pad_token_id", self.pad_token_id)
        whole(0).check("index", self.index)
        for name in ("use_vllm", "reduce_memory_peak"):
            flag().check(name, getattr(self, name))
        stage = stage_of(self.accelerator)
        try:
            settings, objects = separated(self._keywords(stage), kind)
        except Problems as error:
            raise Problems(*map(self._renamed, error.problems)) from None
        for name, why in self._without_effect(settings).items():
            warnings.warn(f"{name}: {why}", WithoutEffect, stacklevel=3)
        padding = None if self.pad_token_id is None else (int(self.pad_token_id), self.pad_token)
        accelerator = None if stage is None else self.accelerator
        return settings, replace(objects, padding=padding, accelerator=accelerator)

    def _keywords(self, stage: int | None) -> dict[str, Any]:
        """Return the arguments as keywords of `evo_grpo.GRPO`; `stage` is a ZeRO stage or None."""
        keywords: dict[str, Any] = {ours: getattr(self, name) for name, ours in KEYWORDS.items()}
        config: Any = {} if self.model_config is None else self.model_config
        if isinstance(config, Mapping):
            config = dict(config)
            dtype, config = merge_dtype_keywords(config.pop("dtype", "auto"), config)
            trusted = config.pop("trust_remote_code", False)
            keywords.update(dtype=str(dtype).removeprefix("torch."), trust_remote_code=trusted)
        keywords.update(
            model=self.actor_network if self.model_name is None else self.model_name,
            tokenizer=self.tokenizer,
            config=config,
            device=str(self.device),
            hyperparameters=self.hp_config if self.hp_config is not None else {},
            min_output_tokens=self.min_output_tokens or 0,
            lora=self.lora_config,
        )
        if self._is_cut:
            keywords["max_output_tokens"] = CONTEXT - 1
        if self.lora_config is None and not isinstance(self.actor_network, PeftModel):
            keywords["lora"] = DEFAULT_LORA
        if stage is not None:
            keywords.update(zero=stage, device=self.accelerator.device.type)
        if self.reduce_memory_peak:
            keywords["max_rows_per_microbatch"] = 1
        if isinstance(self.cosine_lr_schedule_config, CosineLRScheduleConfig):
            keywords["lr_schedule"] = self.cosine_lr_schedule_config.schedule()
        if self.use_vllm:
            keywords.update(rollout="vllm", max_decode_prompts=None)
            keywords.update((self.vllm_config or VLLMConfig()).keywords())
        return keywords

    @property
    def _is_cut(self) -> bool:
        """Whether `max_model_len` has its default and `max_output_tokens` is at least as great."""
        longest = self.max_output_tokens
        return isinstance(longest, int) and self.max_model_len == CONTEXT <= longest

    def _without_effect(self, settings: AgentSettings) -> dict[str, str]:
        """Return the arguments without effect: AgileRL's name -> the reason."""
        default = type(self)
        inert = {
            name: f"{getattr(self, name)} has no effect: {why}"
            for name, why in _NO_EFFECT.items()
            if getattr(self, name) != getattr(default, name)
        }
        if self._is_cut:
            inert["max_output_tokens"] = f"completions are cut at max_model_len={CONTEXT}, raise it"
        if self.vllm_config is not None and not self.use_vllm:
            inert["vllm_config"] = "has no effect without use_vllm=True; leave it out"
        for path, why in without_effect_of_agents(settings):
            ours, _, subpath = path.partition(".")
            name = _NAMES.get(ours, ours)
            # A default of AgileRL that differs from ours was not given by the caller.
            if getattr(self, name, None) != getattr(default, name, None):
                inert[f"{name}.{subpath}" if subpath else name] = why
        return inert

    def _renamed(self, problem: Problem) -> Problem:
        """Return a problem with AgileRL's names in its path and text."""
        names = _NAMES if self.actor_network is None else {**_NAMES, "model": "actor_network"}
        name, *rest = problem.path or ("",)
        if name == "vllm" and rest:
            rest[0] = _NAMES_OF_VLLM.get(str(rest[0]), str(rest[0]))
        path: Path = (names.get(str(name), str(name)), *rest)
        return Problem(path, problem.text.replace("hyperparameters.", "hp_config."))


ARGUMENTS: tuple[str, ...] = tuple(entry.name for entry in fields(Arguments))
"""Names of all arguments, in the order of AgileRL's signature."""

KEYWORDS: dict[str, str] = {
    **{name: name for name in ARGUMENTS if name in AGENT_KEYWORDS},
    "model_name": "model",
    "model_config": "config",
    "hp_config": "hyperparameters",
    "micro_batch_size_per_gpu": "max_rows_per_microbatch",
    "hf_generate_chunk_size": "max_decode_prompts",
    "cosine_lr_schedule_config": "lr_schedule",
    "use_kl_advantage_shaping": "kl_shaping",
    "use_separate_reference_adapter": "separate_reference",
}
"""AgileRL's name of a setting -> its name in `evo_grpo.GRPO`."""


def without_spaces(
    args: tuple[Any, ...], keywords: Mapping[str, Any], then: Sequence[str] = ()
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments without gymnasium spaces.

    `then` has the names of the positional arguments that follow two spaces; they become keywords.
    """
    other_keywords = {name: value for name, value in keywords.items() if name not in SPACES}
    first = args[0] if args else None
    if first is None or isinstance(first, int | str) or is_number(first) or callable(first):
        return args, other_keywords
    return args[2 + len(then) :], {**dict(zip(then, args[2:], strict=False)), **other_keywords}


_NAMES = {ours: name for name, ours in KEYWORDS.items()}
_NAMES.update(
    lora="lora_config",
    dtype="model_config",
    trust_remote_code="model_config",
    vllm="vllm_config",
    stop="vllm_config.stop_sequences",
    max_decode_rows="vllm_config.max_num_seqs",
)
_NAMES_OF_VLLM = {ours: name for name, ours in VLLM_NAMES.items()} | {"sleep_level": "sleep_mode"}

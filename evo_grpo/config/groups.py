"""The groups of settings but `evolve`: what to train, on what, with which algorithm, on which machine."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from evo_grpo.config.base import Clip, Group, OptionalTexts, PlainMapping, Texts
from evo_grpo.hparams import Hparams

LossType = Literal["grpo", "gspo", "cispo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "vespo"]


class LoraSettings(Group):
    """The adapter that each agent trains."""

    r: int = Field(8, ge=1, description="Rank of the two matrices.")
    alpha: float | None = Field(
        None, gt=0, description="Scale of the update times the rank; null means twice `r`."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the first matrix.")
    target_modules: Texts = Field(
        "all-linear",
        description="Layers that get an adapter: `all-linear`, a list of names such as "
        "`[q_proj, v_proj]`, or a regular expression for whole module names.",
    )


class ModelConfig(Group):
    """The one frozen base model. A plain text is its name: `model: tiny-sums`."""

    shorthand: ClassVar[str | None] = "name"

    name: str = Field(
        min_length=1,
        description="An embedded model (`tiny-sums`, `tiny-foods`), `smollm2` (from the extra of "
        "that name), a model folder, a `.gguf` file, or a hub id such as `Qwen/Qwen2.5-0.5B-Instruct`.",
    )
    lora: LoraSettings = Field(
        default_factory=LoraSettings, description="The adapter that each agent trains."
    )


class Message(Group):
    """One message of a conversation."""

    role: str = Field(min_length=1, description="`system`, `user` or `assistant`.")
    content: str = Field(description="A template; `{column}` takes the value of the row.")


class EnvConfig(Group):
    """The task: prompts and rewards. A plain text is its kind: `env: sums`."""

    shorthand: ClassVar[str | None] = "kind"

    kind: str = Field(
        min_length=1,
        description="`sums`, `foods`, `dataset` (your own rows and reward), or `reasoning_gym:<name>`.",
    )
    args: PlainMapping = Field(
        default_factory=dict[str, Any],
        description="Keyword arguments of the task, for instance `{min_terms: 2, max_terms: 2}`.",
    )
    train: str | None = Field(
        None,
        min_length=1,
        description="Rows to learn from: a CSV, JSON, JSONL or Parquet file. Kind `dataset` needs it.",
    )
    validation: str | None = Field(
        None, min_length=1, description="Rows for selection; null holds out a part of `train`."
    )
    test: str | None = Field(
        None,
        min_length=1,
        description="Rows judged once, at the end; null holds out a part of `train`.",
    )
    prompt: str | None = Field(
        None,
        min_length=1,
        description='A raw template such as `"{question}\\nA:"`; null takes the task\'s own.',
    )
    conversation: list[Message] | None = Field(
        None,
        min_length=1,
        description="Messages `{role, content}` that go through the tokenizer's chat template, "
        "instead of `prompt`.",
    )
    reward: OptionalTexts = Field(
        None, description="Reward function `module:function`, or several. Kind `dataset` needs it."
    )
    reward_weights: list[float] | None = Field(
        None, description="One weight per reward function; null weighs all 1."
    )


class PopulationConfig(Group):
    """How many agents train for how long."""

    size: int = Field(8, ge=1, description="Agents.")
    rounds: int = Field(
        6, ge=1, description="Rounds: training, then evaluation, then selection and mutation."
    )
    steps_per_round: int = Field(4, ge=1, description="GRPO steps of every agent in a round.")
    init: Literal["sample", "same"] = Field(
        "sample",
        description="`sample`: agent 0 begins with the values of `algorithm`, the others with values "
        "drawn from `evolve.hyperparameters`. `same`: all begin with those of `algorithm`.",
    )


class AlgorithmConfig(Group):
    """What an agent begins with. Those named in `evolve.hyperparameters` change on the way."""

    kind: Literal["grpo", "gspo", "cispo"] = Field("grpo", description="The algorithm.")
    lr: float = Field(1e-3, gt=0, description="Learning rate of AdamW.")
    beta: float = Field(
        0.0, ge=0, description="Weight of the KL divergence from the base model; 0 computes none."
    )
    clip_coef: Clip = Field(
        0.2,
        description="Clip range of the ratio: c for [1 - c, 1 + c], or the bounds `[low, high]` themselves.",
    )
    group_size: int = Field(8, ge=2, description="Completions per prompt.")
    update_epochs: int = Field(
        2,
        ge=1,
        description="Passes over the rows of a step; with 1 and no batch_size the clip cannot act.",
    )
    temperature: float = Field(1.0, gt=0, description="Sampling temperature in training.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Nucleus mass kept when sampling; 1 keeps all."
    )
    top_k: int = Field(0, ge=0, description="Likeliest tokens kept when sampling; 0 keeps all.")
    min_p: float = Field(
        0.0, ge=0, lt=1, description="Least probability kept, relative to the likeliest token."
    )
    repetition_penalty: float = Field(
        1.0, gt=0, description="Divides the logits of tokens seen before; 1 does nothing."
    )
    max_grad_norm: float = Field(
        1.0, gt=0, description="Gradient norm above which a step is scaled."
    )
    batch_size: int | None = Field(
        None, ge=1, description="Completions per optimizer step; null takes all of a step at once."
    )
    prompts_per_step: int = Field(4, ge=1, description="Prompts per step, the same for all agents.")
    max_output_tokens: int | None = Field(
        None, ge=1, description="Longest completion; null takes the task's hint."
    )
    min_output_tokens: int = Field(0, ge=0, description="Shortest completion.")
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Longest prompt and completion together; null takes the model's context.",
    )
    loss_type: LossType | None = Field(
        None, description="The loss, where it differs from `kind`; null takes that of `kind`."
    )
    adv_norm: Literal["mean_std", "mean_only"] = Field(
        "mean_std",
        description="Advantages: rewards minus the mean of their group, `mean_std` also divided by its "
        "standard deviation.",
    )

    def hparams(self) -> Hparams:
        """Return what may differ between agents, as the algorithm sees it."""
        return Hparams(
            lr=self.lr,
            beta=self.beta,
            clip_coef=self.clip_coef,
            group_size=self.group_size,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            max_grad_norm=self.max_grad_norm,
            update_epochs=self.update_epochs,
            batch_size=self.batch_size,
        )


class EngineConfig(Group):
    """Where and how it computes; the results do not depend on the sizes here but for rounding."""

    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$",
        description="`auto` takes the first CUDA device where there is one; or `cpu`, `cuda`, `cuda:1`, `mps`.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Weights of the base: `auto` is float32 on the CPU and bfloat16 on CUDA.",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads; null leaves it to torch.")
    max_tokens_per_microbatch: int = Field(
        8192, ge=1, description="Padded tokens in one forward and backward: less needs less memory."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: slower, less memory."
    )


class RecordConfig(Group):
    """What a run keeps."""

    completions: int = Field(
        2, ge=0, description="Sample completions kept for each agent and round."
    )
    checkpoints: Literal["all", "last"] = Field(
        "all", description="`all` keeps every round's checkpoints, `last` those of the last round."
    )
    optuna: bool = Field(True, description="Record one Optuna trial per agent and round.")

"""The groups of settings but `evolve`: base, task, population, algorithm, machine, records."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from typing import Any, ClassVar, Literal

from pydantic import Field

from evo_grpo.schema.hparams import Hparams
from evo_grpo.settings.group import Clip, Group, OptionalTexts, PlainMapping, Texts

LossType = Literal["grpo", "gspo", "cispo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "vespo"]


class LoraSettings(Group):
    """The adapter that each agent trains."""

    r: int = Field(default=8, ge=1, description="Rank of the two matrices.")
    alpha: float | None = Field(
        default=None,
        gt=0,
        description="Scale of the update times the rank; null means twice `r`.",
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout before the first matrix.")
    target_modules: Texts = Field(
        default="all-linear",
        description="Layers that get an adapter: `all-linear`, a list of names such as "
        "`[q_proj, v_proj]`, or a regular expression for whole module names.",
    )


class ModelConfig(Group):
    """The one frozen base model. A plain text is its name: `model: tiny-sums`."""

    shorthand: ClassVar[str | None] = "name"

    name: str = Field(
        min_length=1,
        description="An embedded model (`tiny-sums`, `tiny-foods`), `smollm2` (from the extra of "
        "that name), a model folder, a `.gguf` file, or a hub id such as `owner/name`.",
    )
    lora: LoraSettings = Field(
        default=LoraSettings(), description="The adapter that each agent trains."
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
        description="`sums`, `foods`, `dataset` (your own rows and reward), or "
        "`reasoning_gym:<name>`.",
    )
    args: PlainMapping = Field(
        default_factory=dict[str, Any],
        description="Keyword arguments of the task, for instance `{min_terms: 2, max_terms: 2}`.",
    )
    train: str | None = Field(
        default=None,
        min_length=1,
        description="Rows to learn from: a CSV, JSON, JSONL or Parquet file. Kind `dataset` needs "
        "it, the others bring their own rows.",
    )
    validation: str | None = Field(
        default=None,
        min_length=1,
        description="Rows for selection; null holds out a part of `train`.",
    )
    test: str | None = Field(
        default=None,
        min_length=1,
        description="Rows judged once, at the end; null holds out a part of `train`.",
    )
    prompt: str | None = Field(
        default=None,
        min_length=1,
        description='A raw template such as `"{question}\\nA:"`; null takes the task\'s own.',
    )
    conversation: list[Message] | None = Field(
        default=None,
        min_length=1,
        description="Messages `{role, content}` that go through the tokenizer's chat template, "
        "instead of `prompt`.",
    )
    reward: OptionalTexts = Field(
        default=None,
        description="Reward function `module:function`, or a list of them. Kind `dataset` needs "
        "it; null takes the task's own.",
    )
    reward_weights: list[float] | None = Field(
        default=None, description="One weight per reward function; null weighs all 1."
    )
    max_turns: int = Field(
        default=16,
        ge=1,
        description="Completions after which an episode is over, in environments of several turns; "
        "tasks of one turn refuse any but the default.",
    )


class PopulationConfig(Group):
    """How many agents train for how long."""

    size: int = Field(default=8, ge=1, description="Agents.")
    rounds: int = Field(
        default=6,
        ge=1,
        description="Rounds: training, then evaluation, then selection and mutation.",
    )
    steps_per_round: int = Field(
        default=4, ge=1, description="GRPO steps of every agent in a round."
    )
    init: Literal["sample", "same"] = Field(
        default="sample",
        description="`sample`: agent 0 begins with the values of `algorithm`, the others with "
        "values drawn from `evolve.hyperparameters`. `same`: all begin with those of `algorithm`.",
    )


class AlgorithmConfig(Group):
    """What an agent begins with; what `evolve.hyperparameters` names changes on the way."""

    kind: Literal["grpo", "gspo", "cispo"] = Field(default="grpo", description="The algorithm.")
    lr: float = Field(default=1e-3, gt=0, description="Learning rate of AdamW.")
    beta: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the KL divergence from the base model; 0 computes none.",
    )
    clip_coef: Clip = Field(
        default=0.2,
        description="Clip range of the probability ratio: c for [1 - c, 1 + c], or the bounds "
        "`[low, high]` themselves.",
    )
    group_size: int = Field(default=8, ge=2, description="Completions per prompt.")
    update_epochs: int = Field(
        default=2,
        ge=1,
        description="Passes over the rows of a step. With 1 and no `batch_size` the clip range "
        "cannot act.",
    )
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature in training.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Nucleus mass kept when sampling; 1 keeps all."
    )
    top_k: int = Field(
        default=0, ge=0, description="Likeliest tokens kept when sampling; 0 keeps all."
    )
    min_p: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Least probability kept, relative to the likeliest token.",
    )
    repetition_penalty: float = Field(
        default=1.0,
        gt=0,
        description="Divides the logits of tokens seen before; 1 does nothing.",
    )
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="Gradient norm above which a step is scaled down to it."
    )
    batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Completions per optimizer step; null takes all of a step at once.",
    )
    prompts_per_step: int = Field(
        default=4, ge=1, description="Prompts per step, the same for all agents."
    )
    max_output_tokens: int | None = Field(
        default=None, ge=1, description="Longest completion; null takes the task's hint."
    )
    min_output_tokens: int = Field(default=0, ge=0, description="Shortest completion.")
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="Longest prompt and completion together; null takes the model's context.",
    )
    loss_type: LossType | None = Field(
        default=None,
        description="The loss, where it differs from `kind`; null takes that of `kind`.",
    )
    adv_norm: Literal["mean_std", "mean_only"] = Field(
        default="mean_std",
        description="Advantages: rewards minus the mean of their group; `mean_std` divides by its "
        "standard deviation too.",
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
    """Where and how it computes."""

    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$",
        description="`auto` takes the first CUDA device where there is one; or `cpu`, `cuda`, "
        "`cuda:1`, `mps`.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Weights of the base: `auto` is float32 on the CPU and bfloat16 on CUDA.",
    )
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads; null leaves it to torch."
    )
    max_tokens_per_microbatch: int | None = Field(
        default=None,
        ge=1,
        description="Padded tokens in one forward and backward pass; fewer need less memory. null "
        "goes by the model: 2,048 (large) to 8,192 (small) on a CPU, 4,096 on other devices.",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="Recompute activations in the backward pass: slower, with less memory.",
    )


class RecordConfig(Group):
    """What a run keeps."""

    completions: int = Field(
        default=2, ge=0, description="Sample completions kept for each agent and round."
    )
    checkpoints: Literal["all", "last"] = Field(
        default="all",
        description="`all` keeps every round's checkpoints, `last` those of the last round.",
    )
    optuna: bool = Field(default=True, description="Record one Optuna trial per agent and round.")

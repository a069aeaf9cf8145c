"""The group `algorithm`: what an agent begins with, the loss, advantages and lengths."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from typing import Annotated, Literal

from evo_grpo.schema.group import Group, computable, setting
from evo_grpo.schema.hparams import AgentFields, Hparams
from evo_grpo.schema.validation import LEAST
from evo_grpo.settings.loss import LossConfig, LossFields, LossType

AdvNorm = Literal["mean_std", "mean_only", "batch_std"]
_SCALES: dict[AdvNorm, Literal["group", "batch", "none"]] = {
    "mean_std": "group",
    "batch_std": "batch",
    "mean_only": "none",
}
DEFAULT_PROMPTS = 4
"""Prompts, or episode seeds, of a step in an environment that is given by its name."""
DEFAULT_OUTPUT_TOKENS = 32
"""Longest completion where neither the caller nor an environment says one."""


class LRSchedule(Group):
    """Linear warm-up, then a cosine to zero: a factor on every agent's own lr.

    When lr mutates, the place in the schedule stays.
    """

    steps: int = setting(
        meaning="GRPO steps until the end.", ge=1, remedy="it counts GRPO steps of an agent"
    )
    warmup_proportion: float = setting(0.05, "Share of them that warms up.", ge=0, lt=1)


class AlgorithmConfig(LossFields, AgentFields):
    """What an agent begins with; what `evolve.hyperparameters` names changes on the way."""

    kind: Literal["grpo", "gspo", "cispo"] = setting("grpo", "The algorithm.")
    loss_type: LossType | None = setting(
        None,
        "The loss, where it differs from `kind`; null takes that of `kind`. bnpo and dapo are one: "
        "TRL's bnpo divides by the tokens of a micro-batch, and micro-batches change nothing here.",
    )
    prompts_per_step: int | None = setting(
        None,
        "Prompts, or episode seeds, of a GRPO step, the same for all agents; null takes the "
        "environment's own number, 4 for a task by name.",
        ge=1,
    )
    max_output_tokens: int | None = setting(
        None, "Longest completion; null takes the task's hint, else 32.", ge=1
    )
    min_output_tokens: int = setting(0, "The end token cannot come before this many tokens.", ge=0)
    max_model_len: int | None = setting(
        None, "Longest prompt and completion together; null takes the model's context.", ge=2
    )
    adv_norm: AdvNorm = setting(
        "mean_std",
        "Advantages: rewards minus the mean of their group. `mean_std` divides by the group's "
        "standard deviation too, `batch_std` by that of the agent's whole step, `mean_only` by "
        "nothing.",
    )
    whiten_advantages: bool = setting(
        False, "Whiten the advantages of an agent's step over its valid tokens."
    )
    adv_clip_range: Annotated[float | None, computable(LEAST, 1e30)] = setting(
        None, "Clamp advantages to [-x, x], after everything else; null never clamps.", gt=0
    )
    filter_zero_adv: bool = setting(
        False, "Drop completions with |advantage| <= `adv_filter_eps` before everything else."
    )
    adv_filter_eps: float = setting(
        0.0, "Threshold of `filter_zero_adv`, which it needs.", ge=0, remedy="0.0 drops only zeros"
    )
    kl_shaping: bool = setting(
        False, "The KL per token moves the advantages, instead of being a penalty."
    )
    separate_reference: bool = setting(
        False,
        "Keep a frozen adapter per agent as its reference for the KL term; false takes one "
        "reference for all: `model.adapter`, or the base with adapters off where there is none.",
    )
    lr_schedule: LRSchedule | None = setting(
        None, "Warm-up and cosine over GRPO steps; null keeps lr."
    )

    @property
    def adv_scale(self) -> Literal["group", "batch", "none"]:
        """`adv_norm` in the words of `group_advantages(scale=...)`."""
        return _SCALES[self.adv_norm]

    def hparams(self) -> Hparams:
        """Return what may differ between agents."""
        return Hparams(**{name: getattr(self, name) for name in Hparams.model_fields})

    def loss(self, max_completion_length: int) -> LossConfig:
        """Return the settings of the loss; dr_grpo divides by the longest completion in force."""
        shared = {name: getattr(self, name) for name in LossFields.model_fields}
        return LossConfig(
            **shared,
            loss_type=self.loss_type or self.kind,
            clip_coef=self.clip_coef,
            beta=self.beta,
            max_completion_length=max_completion_length,
        )

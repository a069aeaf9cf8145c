"""The group `algorithm`: initial hyperparameters, the loss, advantages and lengths; no torch."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Iterator
from typing import Annotated, Literal, Self, cast

from pydantic import BeforeValidator, model_validator

from evo_grpo.schema.group import Group, computable, contradictions, pair, same_as, setting
from evo_grpo.schema.hparams import (
    LEAST_LR,
    LOSS_USES,
    MOST_LR,
    AdvNorm,
    AgentFields,
    ClipCoef,
    Factor,
    Hparams,
    LossType,
    RankAlpha,
    RatioLevel,
    Weight,
    clip_bounds,
)
from evo_grpo.schema.problems import Problem, refuse
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.schema.validation import LEAST, MOST

_SCALES: dict[AdvNorm, Literal["group", "batch", "none"]] = {
    "mean_std": "group",
    "batch_std": "batch",
    "mean_only": "none",
}
DEFAULT_PROMPTS = 4
"""Prompts, or episode seeds, of a step in an environment that is named in a configuration."""
DEFAULT_OUTPUT_TOKENS = 32
"""Longest completion in tokens if neither the settings nor the environment give one."""


_LONGEST_STOP = 256


def _stops(value: object) -> object:
    """Accept stop strings and token ids, as a list or a single one, and return a list."""
    items = list(cast("list[object]", value)) if isinstance(value, list | tuple) else [value]
    for item in items:
        usable = 0 < len(item) <= _LONGEST_STOP if isinstance(item, str) else type(item) is int
        if not usable or (isinstance(item, int) and item < 0):
            raise ValueError(
                f"a list of strings of 1 to {_LONGEST_STOP} characters or token ids, such as "
                '["</answer>"]'
            )
    return items


SamplerCorrection = Literal[
    "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]


SEQUENCE_LOSSES = [name for name, use in LOSS_USES.items() if use.level == "sequence"]

Pair = Annotated[
    tuple[float, float],
    pair(
        lambda k, scale: 0 <= k <= MOST and 0 <= scale <= MOST,
        f"two finite numbers from 0 to {MOST:g}, k and lambda",
    ),
]
Cap = Annotated[float, computable(LEAST)]


class LossFields(Group):
    """The settings that `LossConfig` and the YAML group `algorithm` share."""

    importance_sampling_level: RatioLevel | None = setting(
        None,
        "One probability ratio per `token` or per `sequence`; null follows the paper of the loss: "
        f"sequence for {' and '.join(SEQUENCE_LOSSES)}, token for all others.",
    )
    delta: Annotated[float | None, computable(1.0, 1e30)] = setting(
        None,
        "Upper bound of the unclipped ratio, for two-sided clipping (INTELLECT-2, "
        "arXiv:2505.07291); null sets no bound.",
        gt=1,
        remedy="choose one above the upper clip bound, for instance 4.0",
    )
    kl_bias_correction: bool = setting(
        False, "Multiply the KL term by the ratio, so that it is unbiased off-policy."
    )
    sapo_temperature_pos: Factor = setting(
        1.0, "Temperature of sapo for advantages > 0.", gt=0, remedy="the paper has 1.0"
    )
    sapo_temperature_neg: Factor = setting(
        1.05, "Temperature of sapo for other advantages.", gt=0, remedy="the paper has 1.05"
    )
    vespo_positive: Pair = setting((2.0, 3.0), "`[k, lambda]` of vespo for advantages >= 0.")
    vespo_negative: Pair = setting((3.0, 2.0), "`[k, lambda]` of vespo for advantages < 0.")
    sampler_correction: SamplerCorrection = setting(
        "sequence_mask",
        "Correction for an engine whose log-probs differ from the trainer's: weight by the ratio "
        "trainer / sampler per token or per sequence, and cap it at `sampler_ratio_cap` (truncate) "
        "or drop what exceeds the cap (mask). The native engine is exact and needs no correction.",
    )
    sampler_ratio_cap: Cap = setting(
        3.0, "The cap of `sampler_correction`.", gt=0, remedy="3.0 is usual"
    )
    off_policy_mask_threshold: float | None = setting(
        None,
        "Drop rows with a negative advantage whose mean log-ratio old / new exceeds this many nats "
        "per token (DeepSeek-V3.2, arXiv:2512.02556); null keeps all rows.",
    )


OF_AGENTS = ("loss_type", "importance_sampling_level")
"""Settings of the loss that may differ between the agents of a batch."""


class LossConfig(LossFields):
    """Settings of the loss.

    Raises:
        ConfigError: A setting is unknown or out of range.
    """

    loss_type: LossType = setting("grpo", "See the table in `evo_grpo.learn.objective.losses`.")
    clip_coef: ClipCoef = same_as(Hparams, "clip_coef")
    beta: Weight = same_as(Hparams, "beta")
    max_completion_length: int | None = setting(
        None, "Number of tokens by which dr_grpo divides; required for dr_grpo.", ge=1
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        missing = LOSS_USES[self.loss_type].by_longest and self.max_completion_length is None
        expected = f"an integer >= 1 with loss_type={self.loss_type!r}"
        row = ("max_completion_length", missing, expected, "give the most tokens of a completion")
        problems = contradictions(self, row)
        refuse([*level_problems(self.loss_type, self.importance_sampling_level), *problems])
        return self

    def of_agent(self, hparams: Hparams) -> Self:
        """Return a copy with an agent's own loss type, ratio level and longest completion.

        Raises:
            Problems: The agent's loss type and ratio level contradict each other.
        """
        changes = {
            name: value for name in OF_AGENTS if (value := getattr(hparams, name)) is not None
        }
        longest = hparams.max_output_tokens
        # Few losses read it: agents that differ in nothing else have one configuration.
        if longest is not None and LOSS_USES[changes.get("loss_type", self.loss_type)].by_longest:
            changes["max_completion_length"] = longest
        return self.replace(**changes) if changes else self

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """The absolute bounds (low, high) of the ratio."""
        return clip_bounds(self.clip_coef)


def level_problems(loss_type: LossType, level: RatioLevel | None) -> Iterator[Problem]:
    """Yield a problem if the importance sampling level `level` contradicts the loss type."""
    if level == "token" and (other := LOSS_USES[loss_type].at_token):
        text = (
            f"expected 'sequence' with {loss_type=}, got 'token'; {loss_type} with one ratio per "
            f"token is loss_type={other!r}"
        )
        yield Problem(("importance_sampling_level",), text)


class LRSchedule(Group):
    """Linear warm-up, then a cosine to zero, as a factor on the lr of every agent.

    A mutation of lr does not restart the schedule.
    """

    steps: int = setting(
        meaning="GRPO steps until the end.", ge=1, remedy="it counts GRPO steps of an agent"
    )
    warmup_proportion: float = setting(0.05, "Share of the steps that warm up.", ge=0, lt=1)


class AlgorithmConfig(LossFields, AgentFields):
    """The initial settings of every agent; evolution changes those in `evolve.hyperparameters`."""

    kind: Literal["grpo", "gspo", "cispo"] = setting("grpo", "The algorithm.")
    # Hparams has a value that null stands for, so the type is wider here.
    lr: Annotated[float | None, computable(LEAST_LR, MOST_LR)] = setting(  # pyright: ignore[reportIncompatibleVariableOverride] -- see above
        None,
        "Learning rate of AdamW. null depends on the model: 1e-3 for the embedded models, 2e-5 for "
        "all others, or the nearest value in a range of yours under `evolve.hyperparameters.lr`.",
        gt=0,
        mutates=True,
    )
    loss_type: LossType | None = setting(
        None,
        "The loss; null takes that of `kind`. bnpo and dapo are the same loss here: in TRL, bnpo "
        "divides by the tokens of a micro-batch, but micro-batches do not change results here.",
    )
    prompts_per_step: int | None = setting(
        None,
        "Prompts, or episode seeds, of a GRPO step, the same for all agents; null takes the number "
        "of the environment, which is 4 for a named task.",
        ge=1,
    )
    max_output_tokens: int | None = setting(
        None, "Longest completion in tokens; null takes that of the task, or 32.", ge=1
    )
    min_output_tokens: int = setting(
        0,
        "Tokens before which no end token, and no token of `stop`, can be sampled; strings of "
        "`stop` that are complete before do not count.",
        ge=0,
    )
    stop: Annotated[list[str | int], BeforeValidator(_stops)] = setting(
        factory=list[str | int],
        meaning="Strings, or ids of tokens, that end a completion beside the end token, for "
        "instance `</answer>`. The text of the completion ends before the string; the tokens that "
        "spell it are trained.",
    )
    max_model_len: int | None = setting(
        None, "Most tokens of prompt plus completion; null takes the model's context.", ge=2
    )
    adv_norm: AdvNorm = setting(
        "mean_std",
        "Scale of the advantages, which are rewards minus the mean of their group. `mean_std` "
        "divides them by the standard deviation of the group, `batch_std` by that of the agent's "
        "whole step, `mean_only` by nothing.",
    )
    whiten_advantages: bool = setting(
        False, "Whiten the advantages of an agent's step over its valid tokens."
    )
    adv_clip_range: Annotated[float | None, computable(LEAST, 1e30)] = setting(
        None, "Clamp advantages to [-x, x] after all other steps; null does not clamp.", gt=0
    )
    filter_zero_adv: bool = setting(
        False, "First drop the completions with |advantage| <= `adv_filter_eps`."
    )
    adv_filter_eps: float = setting(
        0.0,
        "Threshold of `filter_zero_adv`; has no effect without it.",
        ge=0,
        remedy="0.0 drops only zeros",
    )
    mask_truncated_completions: bool = setting(
        False,
        "Leave completions that `max_output_tokens` or the context cut off out of the loss and of "
        "its means. Their rewards still count in the mean of their group.",
    )
    overlong_buffer: int | None = setting(
        None,
        "Soft overlong penalty (DAPO, arXiv:2503.14476): in training, the last `overlong_buffer` "
        "tokens before `max_output_tokens` lower the reward of a completion linearly, from 0 to "
        "`-overlong_penalty`. Fitness and the metric `reward` do not include it. null: no penalty.",
        ge=1,
        remedy="a quarter of max_output_tokens is usual",
    )
    overlong_penalty: Annotated[float, computable(LEAST, 1e15)] = setting(
        1.0, "Largest penalty of `overlong_buffer`, in units of reward.", gt=0
    )
    dynamic_sampling_tokens: int | None = setting(
        None,
        "Dynamic sampling (DAPO): most further tokens of an agent in a GRPO step, for replacing "
        "groups whose rewards are all equal by groups of the next prompts. A group is sampled if "
        "`group_size` times `max_output_tokens` tokens are left. null replaces none.",
        ge=1,
        remedy="it counts tokens of an agent in a step",
    )
    kl_shaping: bool = setting(
        False, "Subtract the KL per token from the advantages instead of adding a penalty."
    )
    separate_reference: bool = setting(
        False,
        "Keep a frozen adapter per agent as its reference for the KL term. false uses one "
        "reference for all agents: `model.adapter`, or the base without adapters if that is null.",
    )
    lr_schedule: LRSchedule | None = setting(
        None, "Warm-up and cosine decay of lr over GRPO steps; null keeps lr constant."
    )

    def longest_output(self, space: HyperparameterConfig) -> int | None:
        """Return the largest `max_output_tokens` of any agent; None if the task sets the limit."""
        if "max_output_tokens" in space.names():
            return int(space["max_output_tokens"].max)
        return self.max_output_tokens

    def shortest_output(self, space: HyperparameterConfig) -> int | None:
        """Return the smallest `max_output_tokens` of any agent; None if the task sets the limit."""
        if "max_output_tokens" in space.names():
            return int(space["max_output_tokens"].min)
        return self.max_output_tokens

    def adv_scale(self, hparams: Hparams) -> Literal["group", "batch", "none"]:
        """Return the argument `scale` of `group_advantages` for the `adv_norm` of an agent."""
        return _SCALES[hparams.adv_norm or self.adv_norm]

    def hparams(self) -> Hparams:
        """Return the settings of this group that may differ between agents, as hyperparameters."""
        values = {name: getattr(self, name) for name in AgentFields.model_fields}
        if self.lr is None:  # outside of a run, no model is known
            del values["lr"]
        return Hparams(**values)

    def first_hparams(
        self, space: HyperparameterConfig, adapter: RankAlpha | None = None
    ) -> Hparams:
        """Return the hyperparameters that the first agent begins with.

        They include searched settings of the run, such as the loss, with the values of this group.
        A default that is not among the choices is left out; `with_first_choices` fills in that
        setting later. A `max_output_tokens` of null becomes the largest of the range. `adapter` has
        the initial rank and alpha, if these are searched; None if they are not known.
        """
        hparams = self.hparams()
        if adapter is not None:
            hparams = hparams.with_scale(space.names(), adapter)
        run_values = {
            "loss_type": (self.loss_type or self.kind, "grpo"),
            "importance_sampling_level": (self.importance_sampling_level, None),
            "adv_norm": (self.adv_norm, "mean_std"),
            "max_output_tokens": (self.max_output_tokens or self.longest_output(space), None),
        }
        for name, (value, default) in run_values.items():
            if name not in space.names() or value is None:
                continue
            if value != default or space[name].allows(value):
                hparams = hparams.with_value(name, value)
        return hparams

    def loss(self, max_completion_length: int) -> LossConfig:
        """Return the settings of the loss.

        Args:
            max_completion_length: Longest completion in tokens, by which dr_grpo divides.
        """
        shared = {name: getattr(self, name) for name in LossFields.model_fields}
        return LossConfig(
            **shared,
            loss_type=self.loss_type or self.kind,
            clip_coef=self.clip_coef,
            beta=self.beta,
            max_completion_length=max_completion_length,
        )

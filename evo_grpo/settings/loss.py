"""The settings of the loss, without torch, so that configurations are checked quickly."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import model_validator

from evo_grpo.schema.group import Group, computable, contradictions, pair, same_as, setting
from evo_grpo.schema.hparams import (
    LOSS_USES,
    ClipCoef,
    Factor,
    Hparams,
    LossType,
    RatioLevel,
    Weight,
    clip_bounds,
)
from evo_grpo.schema.problems import Problem, refuse
from evo_grpo.schema.validation import LEAST, MOST

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
        """Return the settings with the loss, ratio level and longest completion of an agent.

        Raises:
            Problems: The agent's loss and ratio level contradict each other.
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
    """Yield a contradiction between a loss type and an importance sampling level."""
    if level == "token" and (other := LOSS_USES[loss_type].at_token):
        text = (
            f"expected 'sequence' with {loss_type=}, got 'token'; {loss_type} with one ratio per "
            f"token is loss_type={other!r}"
        )
        yield Problem(("importance_sampling_level",), text)

"""Which GRPO loss, and its settings; torch-free, so that a configuration is checked at once."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Iterator
from typing import Annotated, Literal, Self, cast

from pydantic import BeforeValidator, model_validator

from evo_grpo.schema.group import Group, computable, same_as, setting
from evo_grpo.schema.hparams import ClipCoef, Factor, Hparams, Weight, clip_bounds
from evo_grpo.schema.problems import Problem, Problems
from evo_grpo.schema.validation import LEAST, MOST

LossType = Literal["grpo", "gspo", "cispo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "vespo"]
RatioLevel = Literal["token", "sequence"]
SamplerCorrection = Literal[
    "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]


def _pair(value: object) -> object:
    """Accept two numbers >= 0; YAML and JSON have lists for them."""
    if isinstance(value, list | tuple):
        items = cast("list[object]", list(value))
        numbers = [n for n in items if isinstance(n, int | float) and not isinstance(n, bool)]
        if len(numbers) == len(items) == 2 and all(0 <= n <= MOST for n in numbers):
            return tuple(float(n) for n in numbers)
    raise ValueError(f"two finite numbers from 0 to {MOST:g}, k and lambda")


Pair = Annotated[tuple[float, float], BeforeValidator(_pair)]
Cap = Annotated[float, computable(LEAST)]


class LossFields(Group):
    """The declarations that `LossConfig` and the YAML group `algorithm` have in common."""

    importance_sampling_level: RatioLevel | None = setting(
        None,
        "One probability ratio per `token` or per `sequence`; null takes what the loss's paper "
        "has: sequence for gspo and luspo, token for all others.",
    )
    delta: Annotated[float | None, computable(1.0, 1e30)] = setting(
        None,
        "Upper bound of the unclipped ratio: two-sided clipping (INTELLECT-2, arXiv:2505.07291); "
        "null leaves it out.",
        gt=1,
        remedy="choose one above the upper clip bound, for instance 4.0",
    )
    kl_bias_correction: bool = setting(
        False, "Multiply the KL term by the ratio, which makes it unbiased off-policy."
    )
    sapo_temperature_pos: Factor = setting(
        1.0, "Temperature of sapo where the advantage is > 0.", gt=0, remedy="the paper has 1.0"
    )
    sapo_temperature_neg: Factor = setting(
        1.05, "Temperature of sapo elsewhere.", gt=0, remedy="the paper has 1.05"
    )
    vespo_positive: Pair = setting(
        (2.0, 3.0), "`[k, lambda]` of vespo where the advantage is >= 0."
    )
    vespo_negative: Pair = setting((3.0, 2.0), "`[k, lambda]` of vespo elsewhere.")
    sampler_correction: SamplerCorrection = setting(
        "sequence_mask",
        "What the ratio trainer / sampler does where the engine's log-probs are inexact: per token "
        "or per sequence, held at `sampler_ratio_cap` (truncate) or dropped above it (mask). The "
        "native engine is exact and needs none.",
    )
    sampler_ratio_cap: Cap = setting(
        3.0, "The cap of `sampler_correction`.", gt=0, remedy="3.0 is usual"
    )
    off_policy_mask_threshold: float | None = setting(
        None,
        "Drop rows of negative advantage whose mean log-ratio old / new exceeds this many nats per "
        "token (DeepSeek-V3.2, arXiv:2512.02556); null keeps all.",
    )


class LossConfig(LossFields):
    """Settings of the loss; the meaning of each stands in its declaration.

    Raises:
        ConfigError: A setting is unknown or out of range.
    """

    loss_type: LossType = setting("grpo", "See the table in `evo_grpo.learn.objective.losses`.")
    clip_coef: ClipCoef = same_as(Hparams, "clip_coef")
    beta: Weight = same_as(Hparams, "beta")
    max_completion_length: int | None = setting(
        None, "Tokens that dr_grpo divides by; required for dr_grpo.", ge=1
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        found = list(level_problems(self.loss_type, self.importance_sampling_level))
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            text = (
                "expected an integer >= 1 with loss_type='dr_grpo', got null; give the most tokens "
                "a completion may have, dr_grpo divides by it"
            )
            found.append(Problem(("max_completion_length",), text))
        if found:
            raise Problems(*found)
        return self

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """The absolute bounds (low, high) of the ratio."""
        return clip_bounds(self.clip_coef)


def level_problems(loss_type: LossType, level: RatioLevel | None) -> Iterator[Problem]:
    """Yield what is wrong with a loss type beside an importance sampling level."""
    if loss_type == "gspo" and level == "token":
        text = (
            "expected 'sequence' with loss_type='gspo', got 'token'; gspo with one ratio per token "
            "is loss_type='grpo'"
        )
        yield Problem(("importance_sampling_level",), text)

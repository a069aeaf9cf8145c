"""Which GRPO loss, and its settings; torch-free, so that a configuration is checked at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, cast, get_args

from evo_grpo.errors import ConfigError

LossType = Literal["grpo", "gspo", "cispo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "vespo"]
RatioLevel = Literal["token", "sequence"]
SamplerCorrection = Literal[
    "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]

SEQUENCE_LEVEL_LOSSES = frozenset({"gspo", "luspo"})
"""Losses that their papers define on one ratio per row."""


@dataclass(frozen=True)
class LossConfig:
    """Settings of `policy_loss`.

    Attributes:
        loss_type: See the table in `evo_grpo.objective.surrogates`.
        clip_coef: c in (0, 1] for the ratio bounds [1 - c, 1 + c], or the absolute bounds
            (low, high), 0 <= low < high. cispo reads high as its cap; sapo and vespo do not clip.
        beta: Weight of the KL penalty against the reference, >= 0.
        importance_sampling_level: One ratio per "token" or per "sequence"; None takes what the
            loss type's paper has: sequence for gspo and luspo, token for all others.
        delta: Upper bound of the unclipped ratio, > 1: two-sided clipping of INTELLECT-2
            (arXiv:2505.07291); None leaves it out.
        kl_bias_correction: Multiply the KL term by the ratio, which makes it unbiased off-policy.
        max_completion_length: Tokens that dr_grpo divides by, >= 1; required for dr_grpo.
        sapo_temperature_pos: Temperature of sapo where the advantage is > 0; > 0.
        sapo_temperature_neg: Temperature of sapo elsewhere; > 0.
        vespo_positive: (k, lambda) of vespo where the advantage is >= 0; both >= 0.
        vespo_negative: (k, lambda) of vespo elsewhere; both >= 0.
        sampler_correction: What the ratio trainer / sampler does where `sampler_logprobs` is given:
            per token or per sequence, held at the cap (truncate) or dropped above it (mask).
        sampler_ratio_cap: The cap, > 0.
        off_policy_mask_threshold: Drop rows of negative advantage whose mean log-ratio old / new
            exceeds this many nats (DeepSeek-V3.2, arXiv:2512.02556); None keeps all.

    Raises:
        ConfigError: A setting is unknown or out of range.
    """

    loss_type: LossType = "grpo"
    clip_coef: float | tuple[float, float] = 0.2
    beta: float = 0.0
    importance_sampling_level: RatioLevel | None = None
    delta: float | None = None
    kl_bias_correction: bool = False
    max_completion_length: int | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_positive: tuple[float, float] = (2.0, 3.0)
    vespo_negative: tuple[float, float] = (3.0, 2.0)
    sampler_correction: SamplerCorrection = "sequence_mask"
    sampler_ratio_cap: float = 3.0
    off_policy_mask_threshold: float | None = None

    def __post_init__(self) -> None:
        """Check every setting."""
        for name in ("clip_coef", "vespo_positive", "vespo_negative"):
            if isinstance(getattr(self, name), list):  # YAML and JSON have no tuples
                object.__setattr__(self, name, tuple(getattr(self, name)))
        _one_of("loss_type", self.loss_type, get_args(LossType))
        _one_of("sampler_correction", self.sampler_correction, get_args(SamplerCorrection))
        self._check_level()
        self._check_clip()
        _positive("beta", self.beta, "0.0 turns the penalty off", or_zero=True)
        _positive("sapo_temperature_pos", self.sapo_temperature_pos, "the paper has 1.0")
        _positive("sapo_temperature_neg", self.sapo_temperature_neg, "the paper has 1.05")
        _positive("sampler_ratio_cap", self.sampler_ratio_cap, "3.0 is usual")
        _pair("vespo_positive", self.vespo_positive, "(k, lambda), by default (2.0, 3.0)")
        _pair("vespo_negative", self.vespo_negative, "(k, lambda), by default (3.0, 2.0)")
        self._check_optional()

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """The absolute bounds (low, high) of the ratio."""
        if isinstance(self.clip_coef, tuple):
            return self.clip_coef
        return 1 - self.clip_coef, 1 + self.clip_coef

    @property
    def ratio_level(self) -> RatioLevel:
        """The importance sampling level in force."""
        if self.importance_sampling_level is not None:
            return self.importance_sampling_level
        return "sequence" if self.loss_type in SEQUENCE_LEVEL_LOSSES else "token"

    def _check_level(self) -> None:
        level = self.importance_sampling_level
        if level is None:
            return
        _one_of("importance_sampling_level", level, get_args(RatioLevel))
        if self.loss_type == "gspo" and level == "token":
            raise ConfigError(
                "importance_sampling_level: expected 'sequence' with loss_type='gspo', got "
                "'token'; gspo with one ratio per token is loss_type='grpo'"
            )

    def _check_clip(self) -> None:
        clip = cast("object", self.clip_coef)  # whatever a caller really passed
        good = False
        if isinstance(clip, tuple):
            bounds = cast("tuple[object, ...]", clip)
            if len(bounds) == 2 and _is_number(bounds[0]) and _is_number(bounds[1]):
                low, high = cast("tuple[float, float]", bounds)
                good = 0 <= low < high < math.inf
        elif _is_number(clip):
            good = 0 < cast("float", clip) <= 1
        if not good:
            raise ConfigError(
                "clip_coef: expected a number in (0, 1] or absolute ratio bounds (low, high) with "
                f"0 <= low < high, got {clip!r}; for an epsilon of 0.2 below and 0.28 above give "
                "(0.8, 1.28), for a cispo cap of 5 give (0.0, 5.0)"
            )

    def _check_optional(self) -> None:
        delta, length = self.delta, cast("object", self.max_completion_length)
        if delta is not None and not (_is_number(delta) and 1 < delta < math.inf):
            raise ConfigError(
                f"delta: expected None or a ratio > 1, got {delta!r}; choose one above the upper "
                "clip bound, for instance 4.0"
            )
        if length is not None and not (
            isinstance(length, int) and not isinstance(length, bool) and length >= 1
        ):
            raise ConfigError(
                f"max_completion_length: expected None or an int >= 1, got {length!r}; give the "
                "most tokens a completion may have"
            )
        if self.loss_type == "dr_grpo" and length is None:
            raise ConfigError(
                "max_completion_length: expected an int >= 1 with loss_type='dr_grpo', got None; "
                "give the most tokens a completion may have, dr_grpo divides by it"
            )
        threshold = self.off_policy_mask_threshold
        if threshold is not None and not (_is_number(threshold) and math.isfinite(threshold)):
            raise ConfigError(
                f"off_policy_mask_threshold: expected None or a finite number, got {threshold!r}; "
                "give nats per token"
            )


def _one_of(name: str, got: object, choices: tuple[str, ...]) -> None:
    if got not in choices:
        near = get_close_matches(str(got), choices, n=1, cutoff=0.5)
        remedy = f"; did you mean {near[0]!r}?" if near else "; choose one of them"
        raise ConfigError(f"{name}: expected one of {', '.join(choices)}, got {got!r}{remedy}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _positive(name: str, got: object, remedy: str, *, or_zero: bool = False) -> None:
    if _is_number(got):
        number = cast("float", got)
        if 0 < number < math.inf or (or_zero and number == 0):
            return
    sign = ">=" if or_zero else ">"
    raise ConfigError(f"{name}: expected a finite number {sign} 0, got {got!r}; {remedy}")


def _pair(name: str, got: object, remedy: str) -> None:
    if isinstance(got, tuple):
        values = cast("tuple[object, ...]", got)
        if len(values) == 2 and all(
            _is_number(v) and 0 <= cast("float", v) < math.inf for v in values
        ):
            return
    raise ConfigError(f"{name}: expected two finite numbers >= 0, got {got!r}; give {remedy}")

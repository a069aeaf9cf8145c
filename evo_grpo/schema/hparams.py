"""Hyperparameters: the settings that may differ between the agents of a population."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, cast, get_origin

from pydantic import BeforeValidator

from evo_grpo.schema.group import Group, computable, mutable_fields, setting
from evo_grpo.schema.problems import Problems
from evo_grpo.schema.validation import LEAST, MAX_RANK, MOST

Value = float | str
"""The value of a hyperparameter that may mutate: a number or a name."""

LossType = Literal["grpo", "gspo", "cispo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "vespo"]
RatioLevel = Literal["token", "sequence"]


class LossUse(NamedTuple):
    """How the settings that all losses share act on one loss.

    Attributes:
        bounds: The ends of the clip range that have an effect; with "both", so has `delta`.
        level: The ratio in the paper of the loss: one per "token" or one per "sequence".
        fixed_level: Whether the loss has a ratio that `importance_sampling_level` does not change.
        at_token: The loss that this loss would equal with one ratio per token; the level "token" is
            then refused. Empty if the level "token" is allowed.
        by_longest: Whether the loss divides by `max_completion_length`.
    """

    bounds: Literal["both", "upper", "none"] = "both"
    level: RatioLevel = "token"
    fixed_level: bool = False
    at_token: str = ""
    by_longest: bool = False


LOSS_USES: Mapping[LossType, LossUse] = {
    "grpo": LossUse(),
    "gspo": LossUse(level="sequence", at_token="grpo"),
    "bnpo": LossUse(),
    "dr_grpo": LossUse(by_longest=True),
    "dapo": LossUse(),
    "luspo": LossUse(level="sequence"),
    "cispo": LossUse("upper"),
    "sapo": LossUse("none"),
    "vespo": LossUse("none", fixed_level=True),
}
"""The losses; `evo_grpo.learn.objective.losses` has their functions."""
AdvNorm = Literal["mean_std", "mean_only", "batch_std"]

ClipCoef = float | tuple[float, float]

CLIP_ENDS = ("clip_low", "clip_high")
"""Names of the two ends of the clip range in mutations, records and tables."""

BETAS = ("adam_beta1", "adam_beta2")
"""The two decay rates of AdamW, which are searched by their distance from 1."""

REWARD_WEIGHT = "reward_weights."
"""Prefix of the name of a searched reward weight: `reward_weights.<reward function>`."""

LORA = "lora."
"""Prefix of the names of searched settings of adapters."""

PATHS = {
    "lora_r": f"{LORA}r",
    "lora_alpha": f"{LORA}alpha",
    "lora_target_modules": f"{LORA}target_modules",
}
"""Field of `Hparams` -> its name in a search, if the two differ, such as `lora.r`."""

LARGEST_DECAY = 1 - 1e-6
"""Largest decay rate of AdamW. Nearer to 1, a step divides by the moments of a single gradient."""

LEAST_LR, MOST_LR = 1e-30, 1e6
"""Bounds of lr. Below, float32 rounds every step to 0; above, one step ruins every weight."""

_LARGEST = sys.float_info.max


def clip_coefficient(value: object) -> object:
    """Accept a number c, or ratio bounds [low, high] as a list or a tuple."""
    items = cast("list[object]", list(value)) if isinstance(value, list | tuple) else [value]
    numbers = [n for n in items if isinstance(n, int | float) and not isinstance(n, bool)]
    if len(numbers) == len(items) == 1 and 0 < numbers[0] <= 1 and items[0] is value:
        return value
    if len(numbers) == len(items) == 2 and 0 <= numbers[0] < numbers[1] <= _LARGEST:
        return tuple(cast("list[float]", items))
    raise ValueError(
        "a number in (0, 1], or ratio bounds [low, high] with 0 <= low < high, for instance "
        "[0.8, 1.28]"
    )


def _no_limit(value: object) -> object:
    """Return None in place of infinity, because neither of them clips a gradient."""
    return None if value == math.inf else value


Clip = Annotated[float | tuple[float, float], BeforeValidator(clip_coefficient)]
# Gradients of a smaller norm vanish beside the eps of 1e-8 in the denominator of AdamW.
GradNorm = Annotated[float | None, BeforeValidator(_no_limit), computable(1e-12)]
Rate = Annotated[float, computable(LEAST_LR, MOST_LR)]
Factor = Annotated[float, computable(LEAST, MOST)]
"""A divisor or multiplier, for instance of logits, or the temperature of a loss."""
Weight = Annotated[float, computable(0.0, MOST)]
"""The weight of a term; mutations may bring it arbitrarily close to 0."""
Decay = Annotated[float, computable(0.0, LARGEST_DECAY)]
"""The decay rate of a running mean of gradients."""


class RankAlpha(NamedTuple):
    """LoRA rank and alpha of an adapter."""

    r: int
    alpha: float


class AgentFields(Group):
    """The settings that `Hparams` and the YAML group `algorithm` share."""

    lr: Rate = setting(1e-3, "Learning rate of AdamW.", gt=0, mutates=True)
    beta: Weight = setting(
        0.0,
        "Weight of the KL divergence from the reference; 0 computes none.",
        ge=0,
        mutates=True,
    )
    entropy_coef: Weight = setting(
        0.0,
        "Weight of the entropy bonus: each generated token lowers the loss by `entropy_coef` times "
        "the entropy of the policy there, in nats. 0.001 to 0.01 is usual; 0 computes none.",
        ge=0,
        mutates=True,
    )
    clip_coef: Clip = setting(
        0.2,
        "Clip range of the probability ratio: c in (0, 1] for [1 - c, 1 + c], or the bounds "
        "`[low, high]` themselves. cispo reads high as its cap; losses that do not clip ignore it.",
        mutates=True,
    )
    group_size: int = setting(
        8, "Completions per prompt.", ge=2, mutates=True, remedy="a group of one has no advantage"
    )
    update_epochs: int = setting(
        2,
        "Passes over the rows of a step. With 1 and no `batch_size` the clip range cannot act.",
        ge=1,
        mutates=True,
    )
    temperature: Factor = setting(
        1.0, "Sampling temperature in training; the loss uses it too.", gt=0, mutates=True
    )
    top_p: float = setting(
        1.0,
        "Nucleus mass kept when sampling; 1 keeps all.",
        gt=0,
        le=1,
        mutates=True,
        remedy="1.0 keeps all tokens",
    )
    top_k: int = setting(
        0,
        "Likeliest tokens kept when sampling; 0 keeps all.",
        ge=0,
        mutates=True,
        remedy="0 keeps all tokens",
    )
    min_p: float = setting(
        0.0,
        "Least probability kept when sampling, relative to the likeliest token.",
        ge=0,
        lt=1,
        mutates=True,
        remedy="0.0 keeps all tokens",
    )
    repetition_penalty: Factor = setting(
        1.0,
        "Divides the logits of tokens seen before; 1 does nothing.",
        gt=0,
        mutates=True,
        remedy="1.0 does nothing",
    )
    max_grad_norm: GradNorm = setting(
        1.0,
        "Gradient norm above which a step is scaled down to it; null never scales.",
        gt=0,
        mutates=True,
    )
    weight_decay: Weight = setting(
        0.0, "AdamW's decoupled weight decay, on the adapter's matrices.", ge=0, mutates=True
    )
    adam_beta1: Decay = setting(
        0.9,
        "Decay rate of AdamW's mean of the gradients.",
        ge=0,
        lt=1,
        mutates=True,
        remedy="0.9 is usual",
    )
    adam_beta2: Decay = setting(
        0.999,
        "Decay rate of AdamW's mean of the squared gradients. A smaller one follows gradients "
        "whose size changes.",
        ge=0,
        lt=1,
        mutates=True,
        remedy="0.999 is usual, and 0.95 for large models",
    )
    batch_size: int | None = setting(
        None,
        "Completions per optimizer step. null takes all of a GRPO step at once; when agents have "
        "left and the others take over their completions, it takes them in minibatches: two where "
        "an agent has two to four times its completions, three up to nine times.",
        ge=1,
        mutates=True,
    )

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """The bounds (low, high) of the probability ratio, such as (0.8, 1.2)."""
        return clip_bounds(self.clip_coef)


class Hparams(AgentFields):
    """The hyperparameters of one agent. All may differ between the agents of a batch."""

    reward_weights: dict[str, Weight] = setting(
        meaning="Weight of each reward function that is searched, by its name; all other functions "
        "have the weights of the environment.",
        factory=dict,
    )
    prompt: str | None = setting(
        None,
        "Name of its prompt in `env.prompts`; null is the first one there.",
        min_length=1,
        mutates=True,
    )
    loss_type: LossType | None = setting(
        None, "The loss; null is that of `algorithm.loss_type`.", mutates=True
    )
    importance_sampling_level: RatioLevel | None = setting(
        None,
        "One probability ratio per `token` or per `sequence`; null is that of "
        "`algorithm.importance_sampling_level`.",
        mutates=True,
    )
    adv_norm: AdvNorm | None = setting(
        None, "Scale of the advantages; null is that of `algorithm.adv_norm`.", mutates=True
    )
    max_output_tokens: int | None = setting(
        None,
        "Its longest completion in tokens, in training and in evaluations; null is that of "
        "`algorithm.max_output_tokens`.",
        ge=1,
        mutates=True,
    )
    lora_r: int | None = setting(
        None,
        "Rank of its adapter; null is that of `model.lora.r`.",
        ge=1,
        le=MAX_RANK,
        mutates=True,
    )
    lora_alpha: Annotated[float | None, computable(LEAST, MOST)] = setting(
        None,
        "Alpha of its adapter; null follows the rank: in proportion to it, so that the scale of "
        "`model.lora` stays, or with `use_rslora` that of `model.lora`.",
        gt=0,
        mutates=True,
    )
    lora_target_modules: str | None = setting(
        None,
        "Name of the set of layers that its adapter has, in `model.lora.target_sets`; null is "
        "`model.lora.target_modules`.",
        min_length=1,
        mutates=True,
    )

    @property
    def adam_betas(self) -> tuple[float, float]:
        """The decay rates of AdamW, as torch takes them."""
        return self.adam_beta1, self.adam_beta2

    def __hash__(self) -> int:
        """Return the hash of the values; `reward_weights` enters it as sorted items."""
        weights = tuple(sorted(self.reward_weights.items()))
        return hash((weights, *(value for name, value in self if name != "reward_weights")))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, without unset ones; `Hparams(**values)` is the inverse."""
        values = {name: list(v) if isinstance(v, tuple) else v for name, v in self}
        if not self.reward_weights:
            del values["reward_weights"]
        return {
            name: value
            for name, value in values.items()
            if value is not None or name in AgentFields.model_fields
        }

    def named(self) -> dict[str, Any]:
        """Return the values by the names that `with_value` takes, reward weights one by one."""
        values = {PATHS.get(name, name): value for name, value in self.to_dict().items()}
        weights = values.pop("reward_weights", {})
        return values | {f"{REWARD_WEIGHT}{name}": value for name, value in weights.items()}

    def get(self, name: str) -> Value | None:
        """Return the value of a hyperparameter as a number, or as a name.

        `clip_low` and `clip_high` are the ends of the clip range; a clip_coef that is a pair is
        NaN. `reward_weights.<name>` is the weight of a reward function. The value None means no
        limit for max_grad_norm, all rows for batch_size, and the run's setting for all others.
        """
        if name.startswith(REWARD_WEIGHT):
            return self.reward_weights.get(name.removeprefix(REWARD_WEIGHT))
        if name in CLIP_ENDS:
            return self.clip_bounds[CLIP_ENDS.index(name)]
        value = getattr(self, _field(name))
        return math.nan if isinstance(value, tuple) else value

    def with_weights(self, weights: Mapping[str, float]) -> "Hparams":
        """Return a copy in which `weights` are added for reward functions that have no weight."""
        if weights.keys() <= self.reward_weights.keys():
            return self
        return self.replace(reward_weights=dict(weights) | self.reward_weights)

    def with_value(self, name: str, value: Value) -> "Hparams":
        """Return a copy with one hyperparameter set; `get` describes the names."""
        if name.startswith(REWARD_WEIGHT):
            weight = {name.removeprefix(REWARD_WEIGHT): value}
            return self.replace(reward_weights=self.reward_weights | weight)
        if name in CLIP_ENDS:
            low, high = self.clip_bounds
            return self.replace(clip_coef=(value, high) if name == "clip_low" else (low, value))
        try:
            return self.replace(**{_field(name): value})
        except Problems as error:
            renamed = (p._replace(path=(name, *p.path[1:])) for p in error.problems)
            raise Problems(*renamed) from None

    def with_scale(self, space: Collection[str], adapter: RankAlpha) -> "Hparams":
        """Return a copy with the rank and alpha of `adapter`, each only if `space` has its name."""
        searched = {
            _field(f"{LORA}{name}"): value
            for name, value in adapter._asdict().items()
            if f"{LORA}{name}" in space
        }
        return self.replace(**searched) if searched else self


def of_mean(parents: Sequence[Hparams]) -> Hparams:
    """Return the hyperparameters of the mean of agents; `parents` has the better agent first.

    The values are the better agent's, but rank and alpha are those of the parent with the largest
    rank. If the sets of layers differ, the mean has None, which stands for
    `model.lora.target_modules`.
    """
    widest = max(parents, key=lambda hparams: hparams.lora_r or 0)
    layers = {hparams.lora_target_modules for hparams in parents}
    return parents[0].replace(
        lora_r=widest.lora_r,
        lora_alpha=widest.lora_alpha,
        lora_target_modules=layers.pop() if len(layers) == 1 else None,
    )


_FIELDS = {path: field for field, path in PATHS.items()}


def _field(name: str) -> str:
    return _FIELDS.get(name, name)


def clip_bounds(clip_coef: ClipCoef) -> tuple[float, float]:
    """Return the bounds (low, high) of the probability ratio that a clip_coef stands for."""
    if isinstance(clip_coef, tuple):
        return clip_coef
    return 1 - clip_coef, 1 + clip_coef


def _mutable() -> dict[str, type]:
    types: dict[str, type] = {}
    for field in mutable_fields(Hparams):
        annotation = Hparams.model_fields[field].annotation
        kinds = (annotation, *getattr(annotation, "__args__", ()))
        is_name = any(kind is str or get_origin(kind) is Literal for kind in kinds)
        types[PATHS.get(field, field)] = str if is_name else int if int in kinds else float
        if field == "clip_coef":
            types.update(dict.fromkeys(CLIP_ENDS, float))
    return types


MUTABLE: dict[str, type] = _mutable()
"""Hyperparameters that evolution may change, with their type: float, int or str."""


def is_mutable(name: str) -> bool:
    """Return whether evolution may change a hyperparameter of this name."""
    return name in MUTABLE or (name.startswith(REWARD_WEIGHT) and name != REWARD_WEIGHT)


def is_of_every_agent(name: str) -> bool:
    """Return whether all agents have this mutable hyperparameter, even if it is not searched."""
    return name in AgentFields.model_fields or name in CLIP_ENDS


def type_of(name: str) -> type:
    """Return the type of a mutable hyperparameter: float, int or str."""
    return MUTABLE.get(name, float)


def has_no_order(name: str) -> bool:
    """Return whether the values of a mutable hyperparameter are names."""
    return type_of(name) is str


def in_order(names: Iterable[str]) -> list[str]:
    """Return mutable hyperparameters in the order of the schema, then reward weights by name."""
    unordered = set(names)
    return [*(name for name in MUTABLE if name in unordered), *sorted(unordered - MUTABLE.keys())]

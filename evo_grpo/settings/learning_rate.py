"""Finds the default lr and its range for a model, and warns of an lr that is far from usual.

The embedded models are small and need a high lr. A model of usual size needs an lr that is about a
hundred times lower.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.problems import shown_value
from evo_grpo.schema.search_space import DECADE, HyperparameterConfig, RLParameter
from evo_grpo.settings.algorithm import AlgorithmConfig
from evo_grpo.settings.model import ModelConfig
from evo_grpo.sources import embedded_models


class UsualLR(NamedTuple):
    """The usual lr of a kind of model.

    Attributes:
        models: The kind of model, in words.
        lr: The default lr.
        low: Minimum of the default range.
        high: Maximum of the default range.
    """

    models: str
    lr: float
    low: float
    high: float


EMBEDDED = UsualLR("the embedded models", 1e-3, 1e-4, 1e-2)
OTHERS = UsualLR("models that are not embedded", 2e-5, 1e-6, 3e-4)


def usual_lr(model: ModelConfig | None) -> UsualLR:
    """Return the usual lr of a model; None stands for a transformers module."""
    embedded = model is not None and model.name in embedded_models()
    return EMBEDDED if embedded else OTHERS


def with_default_lr(
    algorithm: AlgorithmConfig,
    ranges: Mapping[str, RLParameter] | None,
    model: ModelConfig | None,
) -> tuple[AlgorithmConfig, Mapping[str, RLParameter] | None]:
    """Return `algorithm` and `ranges`, with the usual values for the model if lr is null.

    If lr is null, the usual values replace lr, and ranges of null. Otherwise ranges of null stay
    null, and mean a factor of ten around lr. A run folder records its lr, so that a resume does not
    change it.
    """
    if algorithm.lr is not None:
        return algorithm, ranges
    usual = usual_lr(model)
    if ranges is None and usual != EMBEDDED:  # the embedded range is a factor of ten around the lr
        ranges = HyperparameterConfig(lr=RLParameter(usual.low, usual.high)).parameters
    span = (ranges or {}).get("lr")
    lr = usual.lr if span is None else span.clip(usual.lr)
    return algorithm.replace(lr=lr), ranges


def unusual_lr(
    model: ModelConfig | None,
    first: Hparams,
    begin: Iterable[Hparams],
    ranges: Mapping[str, RLParameter] | None,
) -> str | None:
    """Return a sentence on the first lr in the settings that is far from the usual lr, or None.

    Args:
        model: The model; None stands for a transformers module.
        first: The hyperparameters of `algorithm`.
        begin: The initial hyperparameters of all agents.
        ranges: The ranges of hyperparameters; None for the default.
    """
    usual = usual_lr(model)
    if model is None:  # a module may be as small as the embedded models
        usual = usual._replace(models="modules of any size", high=EMBEDDED.high)
    # No warning far below the range of embedded models: the first template teaches such a start.
    low, high = OTHERS.low / DECADE, usual.high * DECADE
    rates = {"algorithm.lr": first.lr}
    rates |= {
        f"population.init[{i}].lr": hparams.lr
        for i, hparams in enumerate(begin)
        if hparams.lr != first.lr
    }
    if (span := (ranges or {}).get("lr")) is not None:
        name = "evolve.hyperparameters.lr"
        rates |= {f"{name}.min": span.min, f"{name}.max": span.max}
    far = (f"{name} {shown_value(lr)}" for name, lr in rates.items() if not low <= lr <= high)
    if (first_far := next(far, None)) is None:
        return None
    return (
        f"{first_far} is far from the usual lr of {usual.models}, "
        f"{shown_value(usual.low)} to {shown_value(usual.high)}: agents may learn nothing, or "
        f"collapse; leave lr and its range out to search there from {shown_value(usual.lr)}"
    )

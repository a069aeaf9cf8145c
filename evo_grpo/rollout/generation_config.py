"""A warning for options of a model's generation_config that rollouts do not apply.

Agents sample from the policy that their loss differentiates, and only the settings shape the draws.
Most options of a generation_config have no counterpart in that loss: a suppressed token, for
instance, still has a probability under the policy, so the ratio would compare other distributions.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from evo_grpo.model.base import SharedBase
from evo_grpo.settings.algorithm import AlgorithmConfig

_UNSET: tuple[Any, ...] = (None, [], (), {})
#: Option -> its neutral value and the effect of another value in `generate`, in the order of
#: transformers.
_ACTS: Mapping[str, tuple[object, str]] = {
    "guidance_scale": (1, "mixes in the logits of an empty prompt"),
    "sequence_bias": (None, "adds to the logits of some sequences"),
    # The prompt is the encoder's input to `generate`, also of a model that has no encoder.
    "encoder_repetition_penalty": (1, "favours or avoids the tokens of the prompt"),
    "no_repeat_ngram_size": (0, "repeats no n-gram of prompt and completion"),
    "encoder_no_repeat_ngram_size": (0, "repeats no n-gram of the prompt"),
    "bad_words_ids": (None, "never completes some sequences"),
    "forced_bos_token_id": (None, "forces the token after a prompt of one token"),
    "forced_eos_token_id": (None, "forces the last token"),
    "exponential_decay_length_penalty": (None, "raises the end token from some length on"),
    "suppress_tokens": (None, "never samples some tokens"),
    "begin_suppress_tokens": (None, "never begins with some tokens"),
    "watermarking_config": (None, "favours some tokens as a watermark"),
}
#: The same for options that act only with `do_sample`.
_SAMPLES: Mapping[str, tuple[object, str]] = {
    "top_h": (None, "samples from a set of bounded entropy"),
    "typical_p": (1, "samples from the locally typical tokens"),
    "epsilon_cutoff": (0, "samples no token below this probability"),
    "eta_cutoff": (0, "samples no token below a cutoff that follows the entropy"),
}


def warn_of_processors(base: SharedBase, algorithm: AlgorithmConfig, mutates: bool = False) -> None:
    """Warn once of all options of the model's generation_config that rollouts do not apply.

    Args:
        base: The base model.
        algorithm: The sampling settings that rollouts do apply.
        mutates: Whether the repetition penalty is a hyperparameter that mutates.
    """
    config = getattr(base.model, "generation_config", None)
    if config is None:
        return
    found = [
        *_searches(config),
        *_without_setting(config),
        *_set_otherwise(config, algorithm, mutates=mutates),
    ]
    if found:
        warnings.warn(
            f"generation_config of {base.name!r}: rollouts follow the settings of the run and "
            f"ignore that generate {'; '.join(found)}. Set these options to None in the model's "
            "generation_config; otherwise the trained model answers differently under generate "
            "than in training",
            UserWarning,
            stacklevel=4,
        )


def _searches(config: Any) -> Iterator[str]:  # noqa: ANN401 -- a GenerationConfig, of any release
    """Yield the ways in which `generate` searches instead of sampling token by token."""
    for name in ("constraints", "force_words_ids"):
        if getattr(config, name, None) is not None:
            yield f"searches for completions that hold some tokens ({name})"
    beams: Any = getattr(config, "num_beams", None) or 1
    if beams > 1:
        yield f"searches with {beams} beams (num_beams)"
        groups: Any = getattr(config, "num_beam_groups", None) or 1
        if groups > 1:
            yield f"keeps {groups} groups of beams apart (num_beam_groups)"
        return
    # The default top_k of `generate` is 50.
    several = getattr(config, "top_k", None)
    contrasts = (getattr(config, "penalty_alpha", None) or 0) > 0
    if contrasts and not getattr(config, "do_sample", None) and (several is None or several > 1):
        yield "prefers likely tokens that differ from the text so far (penalty_alpha)"
    if getattr(config, "dola_layers", None) is not None:
        yield "contrasts the logits of several layers (dola_layers)"


def _without_setting(config: Any) -> Iterator[str]:  # noqa: ANN401 -- as above
    """Yield the options that have no corresponding setting."""
    samples = bool(getattr(config, "do_sample", None))
    for name, (neutral, effect) in {**_ACTS, **(_SAMPLES if samples else {})}.items():
        value: Any = getattr(config, name, None)
        if value not in _UNSET and value != neutral:
            yield f"{effect} ({name})"


def _set_otherwise(config: Any, algorithm: AlgorithmConfig, *, mutates: bool) -> Iterator[str]:  # noqa: ANN401 -- as above
    """Yield the options whose corresponding setting has another value."""
    penalty: Any = getattr(config, "repetition_penalty", None)
    own = algorithm.repetition_penalty
    if penalty not in (None, 1, own) and not mutates:
        yield (
            f"divides the logits of tokens seen before by {penalty} (repetition_penalty; the "
            f"setting of that name is {own})"
        )
    for name in ("min_length", "min_new_tokens"):
        least: Any = getattr(config, name, None) or 0
        if least > algorithm.min_output_tokens:
            yield (
                f"ends after {least} tokens at the earliest ({name}; min_output_tokens is "
                f"{algorithm.min_output_tokens})"
            )
    strings: Any = getattr(config, "stop_strings", None) or []
    wanted = [strings] if isinstance(strings, str) else list(strings)
    if missing := [one for one in wanted if one not in algorithm.stop]:
        yield f"stops at {missing!r} (stop_strings; set algorithm.stop)"

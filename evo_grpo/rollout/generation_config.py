"""What a model's generation_config asks of `generate` and nothing here does: named once.

Agents sample from the policy that their loss differentiates, shaped by the settings alone. Most of
what a generation_config may add has no counterpart in that loss: a token that is never sampled
still has its share of the policy, and the ratio would be that of another distribution.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from evo_grpo.model.base import SharedBase
from evo_grpo.settings.algorithm import AlgorithmConfig

Test = Callable[[Any], bool]


def _given(value: object) -> bool:
    return value is not None


def _many(value: object) -> bool:
    return isinstance(value, list | tuple | dict) and len(value) > 0  # pyright: ignore[reportUnknownArgumentType] -- of any kind


def _below_one(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < 1


def _above_zero(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def _above_one(value: object) -> bool:
    return isinstance(value, int | float) and value > 1


def _not_one(value: object) -> bool:
    return isinstance(value, int | float) and value != 1


#: Name -> whether its value acts, and what `generate` does then, in transformers' own order.
_ACTS: Mapping[str, tuple[Test, str]] = {
    "guidance_scale": (_not_one, "mixes in the logits of an empty prompt"),
    "sequence_bias": (_many, "adds to the logits of some sequences"),
    # The prompt is the encoder's input to `generate`, also of a model that has no encoder.
    "encoder_repetition_penalty": (_not_one, "favours or avoids the tokens of the prompt"),
    "no_repeat_ngram_size": (_above_zero, "repeats no n-gram of prompt and completion"),
    "encoder_no_repeat_ngram_size": (_above_zero, "repeats no n-gram of the prompt"),
    "bad_words_ids": (_many, "never completes some sequences"),
    "forced_bos_token_id": (_given, "forces the token after a prompt of one token"),
    "forced_eos_token_id": (_given, "forces the last token"),
    "exponential_decay_length_penalty": (
        _given,
        "raises the end token from some length on",
    ),
    "suppress_tokens": (_many, "never samples some tokens"),
    "begin_suppress_tokens": (_many, "begins with none of some tokens"),
    "watermarking_config": (_given, "favours some tokens, to mark what it writes"),
    "stop_strings": (_given, "ends at some strings"),
}
#: The same, where `do_sample` is on.
_SAMPLES: Mapping[str, tuple[Test, str]] = {
    "top_h": (_given, "samples from a set of bounded entropy"),
    "typical_p": (_below_one, "samples from the locally typical tokens"),
    "epsilon_cutoff": (_below_one, "samples no token below this probability"),
    "eta_cutoff": (_below_one, "samples no token below a cutoff that follows the entropy"),
}


def warn_of_processors(base: SharedBase, algorithm: AlgorithmConfig, mutates: bool = False) -> None:
    """Name in one warning what the model's generation_config asks for and is not done.

    Args:
        base: The model; it may have none.
        algorithm: Says what is done.
        mutates: Whether the repetition penalty is the agents' own to find.
    """
    config = getattr(base.model, "generation_config", None)
    if config is None:
        return
    found = [
        *_searches(config),
        *_unknown(config),
        *_otherwise_set(config, algorithm, mutates=mutates),
    ]
    if found:
        warnings.warn(
            f"generation_config of {base.name!r}: agents sample from the policy itself, by the "
            f"settings alone, where generate {'; '.join(found)}. Training and its rewards know "
            "nothing of that: set it to None in the model's generation_config, or expect the "
            "trained model to answer otherwise under generate",
            UserWarning,
            stacklevel=4,
        )


def _searches(config: Any) -> Iterator[str]:  # noqa: ANN401 -- a GenerationConfig, of any release
    """Yield in which other way than token by token from one distribution `generate` decodes."""
    for name in ("constraints", "force_words_ids"):
        if _given(getattr(config, name, None)):
            yield f"searches for completions that hold some tokens ({name})"
    beams: Any = getattr(config, "num_beams", None)
    if _above_one(beams):
        yield f"searches with {beams} beams (num_beams)"
        groups: Any = getattr(config, "num_beam_groups", None)
        if _above_one(groups):
            yield f"keeps {groups} groups of beams apart (num_beam_groups)"
        return
    # Without a top_k `generate` takes one of 50.
    several = getattr(config, "top_k", None)
    contrasts = _above_zero(getattr(config, "penalty_alpha", None))
    if contrasts and not getattr(config, "do_sample", None) and (several is None or several > 1):
        yield "weighs likely tokens by how they differ from what is there (penalty_alpha)"
    if _given(getattr(config, "dola_layers", None)):
        yield "contrasts the logits of several layers (dola_layers)"


def _unknown(config: Any) -> Iterator[str]:  # noqa: ANN401 -- as above
    """Yield what no setting stands for."""
    samples = bool(getattr(config, "do_sample", None))
    for name, (acts, does) in {**_ACTS, **(_SAMPLES if samples else {})}.items():
        if acts(getattr(config, name, None)):
            yield f"{does} ({name})"


def _otherwise_set(config: Any, algorithm: AlgorithmConfig, *, mutates: bool) -> Iterator[str]:  # noqa: ANN401 -- as above
    """Yield what a setting stands for that has another value."""
    penalty: Any = getattr(config, "repetition_penalty", None)
    own = algorithm.repetition_penalty
    if _not_one(penalty) and penalty != own and not mutates:
        yield (
            f"divides the logits of tokens seen before by {penalty} (repetition_penalty; the "
            f"setting of that name is {own})"
        )
    for name in ("min_length", "min_new_tokens"):
        least: Any = getattr(config, name, None)
        if _above_zero(least) and least > algorithm.min_output_tokens:
            yield (
                f"ends after {least} tokens at the earliest ({name}; min_output_tokens is "
                f"{algorithm.min_output_tokens})"
            )

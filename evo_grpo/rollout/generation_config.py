"""What a model's generation_config asks of `generate` and nothing here does: named once.

Agents sample from the policy that their loss differentiates, shaped by the settings alone. Most of
what a generation_config may add has no counterpart in that loss: a token that is never sampled
still has its share of the policy, and the ratio would be that of another distribution.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from evo_grpo.model.base import SharedBase
from evo_grpo.settings.algorithm import AlgorithmConfig

_UNSET: tuple[Any, ...] = (None, [], (), {})
#: Name -> the value that does nothing, and what `generate` does with another one, in transformers'
#: own order.
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
    "begin_suppress_tokens": (None, "begins with none of some tokens"),
    "watermarking_config": (None, "favours some tokens, to mark what it writes"),
    "stop_strings": (None, "ends at some strings"),
}
#: The same, where `do_sample` is on.
_SAMPLES: Mapping[str, tuple[object, str]] = {
    "top_h": (None, "samples from a set of bounded entropy"),
    "typical_p": (1, "samples from the locally typical tokens"),
    "epsilon_cutoff": (0, "samples no token below this probability"),
    "eta_cutoff": (0, "samples no token below a cutoff that follows the entropy"),
}


def warn_of_processors(base: SharedBase, algorithm: AlgorithmConfig, mutates: bool = False) -> None:
    """Name in one warning what the model's generation_config asks for and is not done.

    `algorithm` says what is done; with `mutates` the repetition penalty is the agents' own to find.
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
        if getattr(config, name, None) is not None:
            yield f"searches for completions that hold some tokens ({name})"
    beams: Any = getattr(config, "num_beams", None) or 1
    if beams > 1:
        yield f"searches with {beams} beams (num_beams)"
        groups: Any = getattr(config, "num_beam_groups", None) or 1
        if groups > 1:
            yield f"keeps {groups} groups of beams apart (num_beam_groups)"
        return
    # Without a top_k `generate` takes one of 50.
    several = getattr(config, "top_k", None)
    contrasts = (getattr(config, "penalty_alpha", None) or 0) > 0
    if contrasts and not getattr(config, "do_sample", None) and (several is None or several > 1):
        yield "weighs likely tokens by how they differ from what is there (penalty_alpha)"
    if getattr(config, "dola_layers", None) is not None:
        yield "contrasts the logits of several layers (dola_layers)"


def _unknown(config: Any) -> Iterator[str]:  # noqa: ANN401 -- as above
    """Yield what no setting stands for."""
    samples = bool(getattr(config, "do_sample", None))
    for name, (rests, does) in {**_ACTS, **(_SAMPLES if samples else {})}.items():
        value: Any = getattr(config, name, None)
        if value not in _UNSET and value != rests:
            yield f"{does} ({name})"


def _otherwise_set(config: Any, algorithm: AlgorithmConfig, *, mutates: bool) -> Iterator[str]:  # noqa: ANN401 -- as above
    """Yield what a setting stands for that has another value."""
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

"""Warns of options of a model's generation_config that rollouts do not apply.

Only the run's settings change the draws, because agents should sample from the policy in their
loss. Most options have no counterpart in the loss: a suppressed token still has a probability under
the policy, so the ratio would compare the policy with a distribution that was not sampled from.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from evo_grpo.model.base import SharedBase
from evo_grpo.schema.validation import shown
from evo_grpo.settings.algorithm import AlgorithmConfig

_UNSET: tuple[Any, ...] = (None, [], (), {})
#: Options without a setting -> the value with which each does nothing. `generate` takes the prompt
#: for the encoder's input, also of a model that has no encoder.
_ACTS: Mapping[str, object] = {
    "guidance_scale": 1,
    "sequence_bias": None,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "watermarking_config": None,
    "constraints": None,
    "force_words_ids": None,
    "num_beams": 1,
    "dola_layers": None,
}
#: The same for options that act only with `do_sample`.
_SAMPLES: Mapping[str, object] = {
    "top_h": None,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
}


def warn_of_processors(base: SharedBase, algorithm: AlgorithmConfig, mutates: bool = False) -> None:
    """Warn once of all options of the model's generation_config that rollouts do not apply.

    `mutates` says whether the repetition penalty is a hyperparameter that mutates.
    """
    config: Any = getattr(base.model, "generation_config", None)

    def value_of(name: str) -> Any:  # noqa: ANN401 -- of any option, in any release
        return getattr(config, name, None)

    samples = bool(value_of("do_sample"))
    options = [
        f"{name}={shown(value_of(name))}"
        for name, neutral in {**_ACTS, **(_SAMPLES if samples else {})}.items()
        if value_of(name) not in _UNSET and value_of(name) != neutral
    ]
    # Contrastive search; the default top_k of `generate` is 50.
    if not samples and (value_of("penalty_alpha") or 0) > 0 and value_of("top_k") != 1:
        options.append(f"penalty_alpha={value_of('penalty_alpha')}")
    strings: Any = value_of("stop_strings") or []
    strings = [strings] if isinstance(strings, str) else strings
    # Options that have a setting, and whether the setting has the same effect.
    least, penalty = algorithm.min_output_tokens, algorithm.repetition_penalty
    for name, setting, same in (
        (
            "repetition_penalty",
            "repetition_penalty",
            mutates or value_of("repetition_penalty") in (None, 1, penalty),
        ),
        ("min_length", "min_output_tokens", (value_of("min_length") or 0) <= least),
        ("min_new_tokens", "min_output_tokens", (value_of("min_new_tokens") or 0) <= least),
        ("stop_strings", "stop", set(strings) <= set(algorithm.stop)),
    ):
        if not same:
            options.append(f"{name}={shown(value_of(name))} (the setting is algorithm.{setting})")
    if options:
        warnings.warn(
            f"generation_config of {base.name!r}: rollouts follow the settings of the run and "
            f"ignore {', '.join(options)}; set these options to None there, or the trained model "
            "answers differently under generate than in training",
            UserWarning,
            stacklevel=4,
        )

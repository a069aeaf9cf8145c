"""What a model's generation_config asks for is named; transformers itself says what acts."""

import inspect
import re
import warnings

import pytest
import tiny
import torch
from transformers import GenerationConfig, WatermarkingConfig

from evo_grpo import GRPO
from evo_grpo.model.base import SharedBase
from evo_grpo.settings import AlgorithmConfig
from evo_grpo.training.starting import warn_of_processors

#: A value that acts, for each setting of a GenerationConfig that shapes what `generate` samples.
ACTS = {
    "guidance_scale": 1.5,
    "sequence_bias": [[[5], 2.0]],
    "encoder_repetition_penalty": 1.5,
    "repetition_penalty": 1.1,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[5]],
    "min_length": 3,
    "min_new_tokens": 3,
    "forced_bos_token_id": 4,
    "forced_eos_token_id": 1,
    "exponential_decay_length_penalty": (3, 1.5),
    "suppress_tokens": [5, 6],
    "begin_suppress_tokens": [7],
    "watermarking_config": WatermarkingConfig(),
}
SAMPLING = {"top_h": 0.5, "typical_p": 0.9, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01}
#: Values with which each does nothing.
RESTS = {
    "guidance_scale": 1.0,
    "sequence_bias": None,
    "encoder_repetition_penalty": 1.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
#: What makes `generate` search, by the mode in which it then decodes, and what is named.
SEARCHES = {
    "beam_search": ({"num_beams": 4}, ["num_beams"]),
    "beam_sample": ({"num_beams": 4, "do_sample": True}, ["num_beams"]),
    "group_beam_search": ({"num_beams": 4, "num_beam_groups": 2}, ["num_beams"]),
    "constrained_beam_search": ({"force_words_ids": [[5]]}, ["force_words_ids"]),
    "contrastive_search": ({"penalty_alpha": 0.6, "top_k": 4}, ["penalty_alpha"]),
    "dola_generation": ({"dola_layers": "high"}, ["dola_layers"]),
}
#: What agents set themselves, in every evaluation and in training.
OWN = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1}
LORA = {"r": 2, "target_modules": "all-linear"}


def told(given, algorithm=None, mutates=False):
    """The warnings of a base with this generation_config, and the processors of transformers."""
    model = tiny.llama()
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0, **given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_processors(SharedBase(model, name="mine"), algorithm or AlgorithmConfig(), mutates)
    return [str(w.message) for w in caught], model


def processors(model):
    config = model.generation_config
    model._prepare_special_tokens(config, device="cpu")
    config.max_length = 20
    # As `generate` calls it, whose encoder input is the prompt where a model has no encoder.
    return model._get_logits_processor(
        config, input_ids_seq_length=4, encoder_input_ids=torch.tensor([[3, 4, 5, 6]]), device="cpu"
    )


@pytest.mark.parametrize("name", [*ACTS, *SAMPLING])
def test_what_shapes_the_samples_of_generate_is_named(name):
    given = {name: {**ACTS, **SAMPLING}[name], "do_sample": name in SAMPLING}
    (message,), model = told(given)
    assert len(processors(model)) == 1, "transformers does nothing, and nothing is to be named"
    assert f"{name}=" in message
    assert message.startswith("generation_config of 'mine': rollouts follow the settings")


def test_every_processor_of_transformers_is_known():
    """All at once: none of them is there beside those that are named, and those of settings."""
    known = {**ACTS, **SAMPLING}
    (message,), model = told({**known, **OWN})
    assert len(processors(model)) == len(known) + len(OWN) - 1
    assert all(f"{name}=" in message for name in known)
    # Whatever a later release of transformers reads there is to be looked at here.
    source = inspect.getsource(type(model)._get_logits_processor)
    read = set(re.findall(r"generation_config\.(\w+)", source))
    harmless = {"remove_invalid_values", "renormalize_logits", "use_cache"}
    lengths = {"max_length", "num_beams", "_eos_token_tensor"}
    assert read == {*known, *OWN, *harmless, *lengths}


@pytest.mark.parametrize("mode", SEARCHES)
def test_a_search_is_named(mode):
    given, names = SEARCHES[mode]
    (message,), model = told(given)
    assert model.generation_config.get_generation_mode() == mode
    assert re.findall(r"(\w+)=", message) == names


def test_every_search_of_transformers_is_known():
    read = set(re.findall(r"self\.(\w+)", inspect.getsource(GenerationConfig.get_generation_mode)))
    # Drafts are checked against the model, which changes how fast it samples and not what.
    drafts = {"use_mtp", "prompt_lookup_num_tokens", "assistant_early_exit"}
    named = {name for _, names in SEARCHES.values() for name in names}
    assert read - drafts == {*named, "constraints", "do_sample", "num_beam_groups", "top_k"}


@pytest.mark.parametrize("given", [{}, OWN, RESTS])
def test_what_does_nothing_or_is_a_setting_is_not_named(given):
    messages, _ = told(given)
    assert messages == []


def test_a_setting_that_does_the_same_is_no_difference():
    given = {"repetition_penalty": 1.1, "min_new_tokens": 3}
    assert told(given, AlgorithmConfig(repetition_penalty=1.1, min_output_tokens=3))[0] == []
    assert told({"repetition_penalty": 1.1}, mutates=True)[0] == []
    ((message,), _) = told(given, AlgorithmConfig(repetition_penalty=1.2, min_output_tokens=2))
    assert "ignore min_new_tokens=3, repetition_penalty=1.1; set these options" in message


def test_strings_that_end_a_completion_are_named():
    (message,), _ = told({"stop_strings": ["</s>"]})
    assert "ignore stop_strings=['</s>']; set" in message
    for same in (["</s>"], "</s>", ["</s>", "\n"]):
        assert told({"stop_strings": same}, AlgorithmConfig(stop=["\n", "</s>"]))[0] == []


def test_agents_are_told_once():
    model = tiny.llama()
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0, suppress_tokens=[5])
    with pytest.warns(UserWarning, match=r"ignore suppress_tokens=\[") as caught:
        GRPO.population(size=2, model=model, lora=LORA, max_output_tokens=1, device="cpu")
    assert len(caught) == 1

"""What the configuration of a model says of its layers."""

import tiny

from evo_grpo.model.llama.families import describe


def test_mistral_has_its_window_whatever_the_key_of_other_types_says():
    """As in transformers, whose Mistral does not read `use_sliding_window`."""
    for used in (True, False):
        config = tiny.mistral(sliding_window=16, use_sliding_window=used).config
        assert [layer.window for layer in describe(config).layers] == [16, 16]


def test_a_qwen_that_does_not_use_its_window_has_none():
    config = tiny.qwen2(sliding_window=16, use_sliding_window=False).config
    assert [layer.window for layer in describe(config).layers] == [None, None]

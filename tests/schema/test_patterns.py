"""Regular expressions of modules, as settings have them."""

import math
import warnings
from types import SimpleNamespace

import pytest

from evo_grpo.errors import ConfigError
from evo_grpo.schema import patterns
from evo_grpo.schema.patterns import why_no_pattern
from evo_grpo.settings import LoraSettings, from_dict


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("(a", "missing ), unterminated subpattern at position 0"),
        ("*", "nothing to repeat at position 0"),
        ("(?L)a", "cannot use 'L' flag"),
        ("a{99999999999}", "the repetition number is too large"),
        ("(" * 5000 + ")" * 5000, "nested too deep"),
        ("x" * 10_001, "at most 10,000 characters, not 10,001"),
    ],
    ids=range(6),
)
def test_what_is_no_regular_expression(text, why):
    assert why in why_no_pattern(text)
    for settings in (
        {"target_modules": text},
        {"exclude_modules": text},
        {"rank_pattern": {text: 2}},
        {"alpha_pattern": {text: 2.0}},
    ):
        (name,) = settings
        with pytest.raises(ConfigError, match=rf"model\.lora\.{name}.*regular expression"):
            from_dict({"model": {"name": "tiny-sums", "lora": settings}, "env": "sums"})


def test_a_set_that_a_later_python_reads_otherwise_is_one():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert why_no_pattern("[[a]_proj") is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank_pattern": {"q_proj": "2"}}, "rank_pattern.q_proj: expected an integer >= 1, got"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj: expected an integer >= 1, got 0"),
        ({"rank_pattern": {"q_proj": True}}, "expected an integer >= 1, got true"),
        ({"alpha_pattern": {"q_proj": 0}}, "alpha_pattern.q_proj: expected a number > 0 from"),
        ({"alpha_pattern": {"q_proj": math.inf}}, "from 1e-06 to 1e+06, got inf"),
        ({"alpha_pattern": {"q_proj": 1e-40}}, "from 1e-06 to 1e+06, got 1e-40"),
        ({"alpha": 1e-40}, "alpha: expected a number from 1e-06 to 1e+06, which float32 can"),
        ({"alpha_pattern": [1]}, "alpha_pattern: expected a mapping, got a list ([1])"),
    ],
)
def test_ranks_and_alphas_of_single_layers_are_numbers(settings, message):
    with pytest.raises(ConfigError) as caught:
        LoraSettings(**settings)
    assert message in str(caught.value)


def test_pefts_words_for_layers_are_not_asked_for_more():
    lora = SimpleNamespace(target_modules={"q_proj"}, exclude_modules=None, rank_pattern={})
    assert patterns.module_patterns(lora) == {}

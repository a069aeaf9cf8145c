"""Regular expressions that PEFT would match for ever, through every door."""

import math
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

from evo_grpo.errors import ConfigError
from evo_grpo.schema import patterns
from evo_grpo.schema.patterns import check_patterns, module_patterns, why_no_pattern
from evo_grpo.settings import LoraSettings, from_dict
from evo_grpo.training.sizing.model_size import lora_parameters, read_model_size

NAMES = [f"model.layers.{n}.self_attn.{part}_proj" for n in range(4) for part in "qkvo"]
ENDLESS = ["(.+)+!", r"(?=(\w|\w\w|\w\w\w|\.)*!).*"]
HARMLESS = [
    r".*\.(q|v)_proj",
    r"model\.layers\.\d+\.(\w+\.)*q_proj",
    r"(a+)+$",  # of these names none begins with an a
    r".*.*.*.*q_proj",
    "(?i).*Q_PROJ",
]


@pytest.mark.parametrize("pattern", ENDLESS)
def test_a_pattern_that_does_not_end_is_refused(pattern):
    with pytest.raises(ConfigError) as caught:
        check_patterns({"target_modules": pattern}, NAMES, "tiny-sums")
    assert str(caught.value).startswith(
        "lora.target_modules: expected a regular expression that matches the modules of tiny-sums "
        f"within 0.5 s, got {pattern!r}"
    )


@pytest.mark.parametrize("pattern", HARMLESS)
def test_a_pattern_that_ends_passes(pattern):
    check_patterns({"target_modules": pattern}, NAMES, "tiny-sums")


def test_the_setting_that_does_not_end_is_named():
    given = {"target_modules": HARMLESS[0], "exclude_modules": ENDLESS[0]}
    with pytest.raises(ConfigError, match=r"^lora\.exclude_modules: "):
        check_patterns(given, NAMES, "m")
    with pytest.raises(ConfigError, match=r"^lora\.rank_pattern\.\(\.\+\)\+!: "):
        check_patterns(module_patterns(LoraSettings(rank_pattern={ENDLESS[0]: 2})), NAMES, "m")


def test_lists_of_names_and_all_linear_need_no_process(monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    for targets in ("all-linear", ["q_proj", "(.+)+!"]):
        assert module_patterns(LoraSettings(target_modules=targets)) == {}
        check_patterns(module_patterns(LoraSettings(target_modules=targets)), NAMES, "m")


def test_the_same_question_is_asked_once(monkeypatch):
    check_patterns({"target_modules": "once.*"}, NAMES, "m")
    monkeypatch.setattr(subprocess, "run", None)
    check_patterns({"target_modules": "once.*"}, NAMES, "m")


def test_without_another_process_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    check_patterns({"target_modules": "unasked.*"}, NAMES, "m")


def test_a_process_that_is_not_stopped_is_given_up(monkeypatch):
    def late(command, timeout, **given):
        raise subprocess.TimeoutExpired(command, timeout, output=b"0\n1\n")

    monkeypatch.setattr(subprocess, "run", late)
    with pytest.raises(ConfigError, match=r"lora\.b"):
        check_patterns({"a": "late", "b": "later"}, NAMES, "m")


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
        check_patterns({"target_modules": "[[a]_proj"}, NAMES, "m")


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


def test_a_plan_does_not_hang():
    size = read_model_size("tiny-sums")
    for settings in ({"target_modules": ENDLESS[0]}, {"exclude_modules": ENDLESS[0]}):
        with pytest.raises(ConfigError, match="expected a regular expression that matches"):
            lora_parameters(size, LoraSettings(**settings))


def test_an_agent_does_not_hang():
    import tiny
    from peft import LoraConfig

    from evo_grpo.model.base import SharedBase
    from evo_grpo.model.lora.configs import adapted_modules
    from evo_grpo.model.lora.slots import AdapterSlots

    base = SharedBase(tiny.llama(), None)
    config = LoraConfig(target_modules=ENDLESS[0])
    for doing in (
        lambda: AdapterSlots(base, config).add("one"),
        lambda: adapted_modules(base.model, config),
    ):
        with pytest.raises(ConfigError, match="expected a regular expression that matches"):
            doing()
    with pytest.raises(ConfigError, match=r"lora\.target_modules: expected a regular expression, "):
        AdapterSlots(base, LoraConfig(target_modules="(a")).add("one")
    AdapterSlots(base, LoraConfig(target_modules=HARMLESS[0])).add("one")


def test_pefts_words_for_layers_are_not_asked_for_more():
    lora = SimpleNamespace(target_modules={"q_proj"}, exclude_modules=None, rank_pattern={})
    assert patterns.module_patterns(lora) == {}

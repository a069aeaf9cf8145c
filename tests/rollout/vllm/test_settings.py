"""`engine.vllm`: contradictions, what has no effect, and what `check` says of it."""

import sys
from types import SimpleNamespace

import pytest

from evo_grpo.cli.plan import plan
from evo_grpo.errors import ConfigError
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.rollout.vllm.vllm_engine import means_policy, sampling_keywords
from evo_grpo.settings import AgentSettings, VLLMSettings, from_dict, warnings
from evo_grpo.settings.engines.vllm import OURS


def config(*, lora=None, **engine):
    model = {"name": "tiny-sums", "lora": lora or {}}
    return from_dict({"model": model, "env": "sums", "engine": {"rollout": "vllm", **engine}})


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"vllm": {"sleep_level": 2}, "device": "cpu"}, "vllm.sleep_level: expected 0 with engine"),
        (
            {"vllm": {"devices": [1], "tensor_parallel_size": 2}},
            r"vllm.devices: expected at least tensor_parallel_size \(2\) devices, got a list",
        ),
        (
            {"vllm": {"options": {"seed": 1}}},
            "options.seed: the run passes this keyword to vLLM",
        ),
        (
            {"vllm": {"process": "inside"}},
            r"engine.vllm.process: expected child, got .*: it was removed, and vLLM always",
        ),
        ({"vllm": {"devices": [-1]}}, r"vllm.devices: expected null, or a list of device numbers"),
        ({"vllm": {"pyton": "x"}}, "engine.vllm.pyton: .*did you mean 'python'"),
        ({"rollout": "vlm"}, "engine.rollout: expected 'native' or 'vllm'.*"),
    ],
)
def test_a_contradiction_is_named(engine, said):
    with pytest.raises(ConfigError, match=said):
        config(**engine)


def test_a_rank_that_does_not_fit_is_named_before_vllm_starts():
    lora = {"r": 8, "rank_pattern": {"q_proj": 24}}
    with pytest.raises(ConfigError, match="max_lora_rank: expected at least 24, the largest r"):
        config(lora=lora, vllm={"max_lora_rank": 16})
    config(lora=lora, vllm={"max_lora_rank": 24})
    # In Python, PEFT's own object may say another rank than the settings do.
    AgentSettings(engine={"vllm": {"max_lora_rank": 1}})


def test_contradictions_have_the_names_of_keywords_in_python():
    from evo_grpo import GRPO

    with pytest.raises(ConfigError, match=r"^vllm.sleep_level: expected 0 with engine.device"):
        GRPO(model="tiny-sums", device="cpu", vllm={"sleep_level": 1})


def test_what_has_no_effect_is_said():
    native = config(rollout="native", vllm={"max_loras": 3})
    assert any(w.startswith("engine.vllm has no effect with engine.rol") for w in warnings(native))
    bounded = config(max_decode_prompts=2)
    assert any(w.startswith("engine.max_decode_prompts has no effect") for w in warnings(bounded))
    for quiet in (config(), config(rollout="native"), config(vllm={"max_loras": 3})):
        assert not [w for w in warnings(quiet) if w.startswith("engine.")]


def test_every_keyword_that_follows_from_settings_is_refused_as_an_option(pair, tmp_path):
    from evo_grpo.rollout.vllm.process import llm_keywords

    settings = AgentSettings(
        engine={
            "rollout": "vllm",
            "vllm": {
                "quantization": "q",
                "kv_cache_dtype": "k",
                "kv_cache_memory_bytes": 1,
                "max_num_batched_tokens": 1,
            },
        }
    )
    given = llm_keywords(pair, settings, folder="f", context=9, rank=8)
    assert set(given) - {"enable_chunked_prefill"} | {"tokenizer"} == set(OURS)


def about_vllm(engine):
    """Return what a plan warns of that names vLLM."""
    return [line for line in plan.make_plan(engine).warnings if "engine.vllm" in line]


def test_a_plan_says_what_is_missing(monkeypatch):
    (absent,) = about_vllm(config())
    assert 'pip install "evo-grpo[vllm]"' in absent
    (absent,) = about_vllm(config(vllm={"python": "/no/python"}))
    assert absent.startswith("engine.vllm.python: /no/python is not a program on this machine")
    assert about_vllm(config(vllm={"python": sys.executable})) == []
    monkeypatch.setattr("evo_grpo.settings.engines.vllm.find_spec", lambda name: name == "vllm")
    assert about_vllm(config()) == []


PLAIN = {"temperature": 0.7, "max_output_tokens": 4}


@pytest.mark.parametrize(
    ("sampling", "vllm", "told"),
    [
        ({}, {}, True),
        ({"top_k": 40}, {}, True),  # as many as there are
        ({"top_k": 39}, {}, False),
        ({"top_p": 0.99}, {}, False),
        ({"min_p": 0.01}, {}, False),
        ({"repetition_penalty": 1.01}, {}, False),
        ({"min_output_tokens": 1}, {}, False),
        ({"temperature": 0.009}, {}, False),
        ({}, {"presence_penalty": 0.1}, False),
        ({}, {"frequency_penalty": -0.1}, False),
    ],
)
def test_when_vllms_logprobs_are_the_policys(sampling, vllm, told):
    assert means_policy(Sampling(**PLAIN | sampling), 40, VLLMSettings(**vllm)) is told


def test_sampling_in_vllms_words():
    sampling = Sampling(0.7, 0.9, 5, 0.1, 1.2, 8, 3)
    settings = VLLMSettings(presence_penalty=0.5, frequency_penalty=0.25)
    ends = SimpleNamespace(ids=frozenset((7, 1)), strings=("a",))
    assert sampling_keywords(sampling, ends, settings) == {
        "n": 1,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "min_tokens": 3,
        "stop_token_ids": [1, 7],
        "stop": ["a"],
        "detokenize": True,
        "logprobs": 0,
    }
    plain_ends = SimpleNamespace(ids=frozenset((1,)), strings=())
    plain = sampling_keywords(Sampling(temperature=0.001), plain_ends, VLLMSettings())
    assert plain["temperature"] == 0
    assert plain["detokenize"] is False
    assert not plain.keys() & {"top_k", "stop"}

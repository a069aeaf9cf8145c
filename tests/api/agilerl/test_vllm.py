"""`use_vllm=True` and VLLMConfig: AgileRL's names, on our engine over vLLM."""

from dataclasses import fields

import pytest
import torch
from peft import LoraConfig
from vllm_doubles import doubled

from evo_grpo.agilerl import GRPO, VLLMConfig
from evo_grpo.api.agilerl.arguments import Arguments
from evo_grpo.errors import ConfigError
from evo_grpo.settings import VLLMSettings
from evo_grpo.settings.engine import EngineConfig

DOCUMENTED = {
    "tensor_parallel_size": 1,
    "gpu_memory_utilization": 0.3,
    "max_num_seqs": 8,
    "max_num_batched_tokens": None,
    "enforce_eager": None,
    "sleep_mode": False,
    "sleep_mode_level": 1,
    "dtype": None,
    "quantization": None,
    "vllm_model_name_or_path": None,
    "kv_cache_dtype": None,
    "max_lora_rank": 16,
    "max_loras": 1,
    "stop_sequences": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "kv_cache_memory_bytes": None,
    "lora_staging_dir": None,
}

# AgileRL's name, another value than its default -> where it acts, and what stands there.
ACTS = {
    "tensor_parallel_size": (2, "tensor_parallel_size", 2),
    "gpu_memory_utilization": (0.5, "gpu_memory_utilization", 0.5),
    "max_num_batched_tokens": (4096, "max_num_batched_tokens", 4096),
    "enforce_eager": (True, "enforce_eager", True),
    "dtype": ("bfloat16", "dtype", "bfloat16"),
    "quantization": ("awq", "quantization", "awq"),
    "vllm_model_name_or_path": ("/awq", "model", "/awq"),
    "kv_cache_dtype": ("fp8", "kv_cache_dtype", "fp8"),
    "max_lora_rank": (64, "max_lora_rank", 64),
    "max_loras": (3, "max_loras", 3),
    "presence_penalty": (0.5, "presence_penalty", 0.5),
    "frequency_penalty": (0.25, "frequency_penalty", 0.25),
    "kv_cache_memory_bytes": (5, "kv_cache_memory_bytes", 5),
    "lora_staging_dir": ("/staging", "adapter_folder", "/staging"),
    "python": ("/other/python", "python", "/other/python"),
}


def engine_of(config, **arguments):
    given = {"model_name": "tiny-sums", "use_vllm": True, "vllm_config": config, **arguments}
    settings, _ = Arguments.of((), given).translated("grpo")
    return settings.engine


def test_all_documented_fields_are_there_in_their_order_with_their_defaults():
    found = {field.name: field.default for field in fields(VLLMConfig)}
    assert list(found)[: len(DOCUMENTED)] == list(DOCUMENTED)
    assert {name: found[name] for name in DOCUMENTED} == DOCUMENTED


def test_without_a_config_the_engine_has_what_the_agents_need():
    for config in (None, VLLMConfig()):
        engine = engine_of(config)
        assert engine.rollout == "vllm"
        assert engine.vllm == VLLMSettings()
        assert engine.max_decode_rows == EngineConfig().max_decode_rows


@pytest.mark.parametrize("name", ACTS)
def test_a_field_acts_where_ours_does(name):
    value, ours, expected = ACTS[name]
    engine = engine_of(VLLMConfig(**{name: value}))
    assert engine.vllm == VLLMSettings(**{ours: expected})
    assert VLLMConfig.of(engine) == VLLMConfig(**{name: value})


def test_every_field_acts_or_is_said_not_to():
    elsewhere = {"max_num_seqs", "sleep_mode", "sleep_mode_level", "stop_sequences"}
    assert set(ACTS) | elsewhere == {field.name for field in fields(VLLMConfig)}
    assert engine_of(VLLMConfig(max_num_seqs=64)).max_decode_rows == 64
    assert VLLMConfig.of(engine_of(VLLMConfig(max_num_seqs=64))).max_num_seqs == 64
    given = {"model_name": "tiny-sums", "use_vllm": True}
    settings, _ = Arguments.of(
        (), {**given, "vllm_config": VLLMConfig(stop_sequences=["</a>"])}
    ).translated("grpo")
    assert settings.algorithm.stop == ["</a>"]
    of = VLLMConfig.of(settings.engine, settings.algorithm.stop)
    assert of == VLLMConfig(stop_sequences=["</a>"])


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_mode_and_its_level_are_one_setting(level):
    config = VLLMConfig(sleep_mode=True, sleep_mode_level=level)
    engine = engine_of(config, device="cuda")
    assert engine.vllm.sleep_level == level
    assert VLLMConfig.of(engine) == config
    with pytest.raises(ConfigError, match=r"^vllm_config.sleep_mode: expected 0 with engine.devic"):
        engine_of(config, device="cpu")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"dtype": "half"}, r"^vllm_config.dtype: expected .*'float16'.*got the string 'half'"),
        (
            {"max_num_seqs": 0},
            r"^vllm_config.max_num_seqs: expected an integer >= 1, or null",
        ),
        ({"sleep_mode": True, "sleep_mode_level": 3}, r"^vllm_config.sleep_mode: expected"),
        ({"max_loras": 0}, r"^vllm_config.max_loras: expected an integer >= 1, or null, got"),
        ({"vllm_model_name_or_path": ""}, r"^vllm_config.vllm_model_name_or_path: expected"),
        ({"stop_sequences": 0.5}, r"^vllm_config.stop_sequences: expected a list of strings"),
    ],
)
def test_a_wrong_value_has_the_name_it_was_given_by(config, said):
    with pytest.raises(ConfigError, match=said):
        engine_of(VLLMConfig(**config))


def test_agents_generate_with_one_vllm_and_learn(monkeypatch):
    observation = [{"input_ids": torch.tensor([[3, 4, 5]])}]
    with doubled(monkeypatch) as double:
        config = VLLMConfig(max_loras=2)
        agents = GRPO.population(
            2, 0, "<pad>", "tiny-sums", use_vllm=True, vllm_config=config, group_size=4, lr=1e-2,
            beta=0.0, top_p=1.0, top_k=0, lora_config=LoraConfig(r=2, target_modules=["q_proj"]),
        )  # fmt: skip
        seen = GRPO.inspect_attributes(agents[0], input_args_only=True)
        assert (seen["use_vllm"], seen["vllm_config"]) == (True, config)
        before = agents[0].cohort.slots.state("actor_0")
        for agent in agents:
            ids, masks = agent.get_action(observation)
            assert [len(group) for group in ids] == [4]
            agent.learn((ids, masks, [0.0, 1.0, 0.5, 0.2]))
        agents[0].get_action(observation)
        (engine,) = double.made
        asked = [what for name, what in engine.calls if name == "generate"][2:]
        assert [(what["rows"], what["bare"]) for what in asked] == [(4, 0)] * 3
        assert len({what["adapters"][0] for what in asked}) == 3
        after = agents[0].cohort.slots.state("actor_0")
        assert any(not torch.equal(before[key], after[key]) for key in before)
        agents[0].cohort.close_engine()

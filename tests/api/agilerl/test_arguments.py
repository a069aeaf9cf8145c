"""AgileRL's arguments: positions, types, ranges, what they become, and what has no effect."""

import json

import numpy as np
import pytest
import torch
from peft import LoraConfig
from tiny_cohort import build_model

from evo_grpo import agilerl
from evo_grpo.agilerl import (
    CISPO,
    GRPO,
    GSPO,
    CosineLRScheduleConfig,
    HyperparameterConfig,
    RLParameter,
    VLLMConfig,
)
from evo_grpo.api.agilerl.arguments import ARGUMENTS, KEYWORDS, Arguments, without_spaces
from evo_grpo.errors import ConfigError, EngineUnavailable, ModelError
from evo_grpo.learn.updates import lr_factor
from evo_grpo.settings import LRSchedule
from evo_grpo.settings.keywords import AGENT_KEYWORDS

LORA = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")


def make(*args, **given):
    return GRPO(*args, **{"lora_config": LORA, **given})


class Box:
    """A gymnasium space, as far as a constructor looks."""

    shape = (3,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"hf_generate_chunk_size": 0},
            "hf_generate_chunk_size: expected an integer >= 1, or null, got 0",
        ),
        ({"micro_batch_size_per_gpu": 0}, "micro_batch_size_per_gpu: .*got 0"),
        ({"lora_config": {"rank": 4}}, "lora_config.rank: "),
        ({"cosine_lr_schedule_config": 3}, "cosine_lr_schedule_config: expected"),
        ({"hp_config": {"lr": 1}}, "hp_config.lr: expected a range"),
        (
            {"actor_network": torch.nn.Linear(2, 2)},
            "actor_network: expected the name of a model or a transformers causal .* got Linear",
        ),
        ({"pad_token_id": "<pad>"}, "pad_token_id: expected an integer >= 0, or None, got '<pad>'"),
        ({"bogus": 1}, "the constructor: unknown argument 'bogus'. Expected one of pad_token_id, "),
        ({"group_sise": 4}, ".*unknown argument 'group_sise'. Did you mean 'group_size'"),
        ({"accelerator": object()}, "accelerator: expected an accelerate.Accelerator"),
        ({"actor_network": None}, ".*exactly one of model_name= and actor_network="),
        ({"model_name": "tiny-sums"}, ".*exactly one of model_name= and actor_network="),
        ({"model_config": {"a": 1}}, "model_config: expected only with the name of a model"),
        ({"loss_type": "grop"}, "loss_type: .*'grpo'.* did you mean 'grpo'"),
    ],
)
def test_what_an_argument_cannot_be_is_named(given, message):
    with pytest.raises(ConfigError, match=f"(?s)^{message}"):
        make(**{"actor_network": build_model(), **given})


def test_vllm_that_is_not_installed_is_named():
    with pytest.raises(EngineUnavailable, match="needs the package vllm, and this Python"):
        make(actor_network=build_model(), use_vllm=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"use_kl_advantage_shaping": True, "beta": 0.0},
            "use_kl_advantage_shaping: has no effect with beta 0",
        ),
        ({"vllm_config": VLLMConfig()}, "vllm_config: has no effect without use_vllm=True"),
        ({"wrap": False}, "wrap: False has no effect"),
        (
            {"max_output_tokens": 1024},
            "max_output_tokens: completions are cut at max_model_len=1024",
        ),
        ({"use_memory_efficient_params": False}, "use_memory_efficient_params: False has no"),
        ({"cast_logprobs_to_fp32": False}, "cast_logprobs_to_fp32: False has no effect"),
        ({"calc_position_embeddings": False}, "calc_position_embeddings: False has no"),
        ({"torch_compiler": "default"}, "torch_compiler: default has no effect: nothing"),
        ({"use_liger_loss": True}, "use_liger_loss: True has no effect: the chunked log-probs"),
        ({"clone": True}, "clone: True has no effect: use agent.clone"),
        ({"adv_filter_eps": 0.1}, "adv_filter_eps: has no effect without filter_zero_adv"),
    ],
)
def test_what_cannot_act_warns(given, message):
    with pytest.warns(UserWarning, match=message):
        make(actor_network=build_model(), **given)


def test_numbers_of_numpy_and_devices_of_torch_are_as_good(tmp_path):
    agent = make(
        np.int64(1),
        actor_network=build_model(),
        seed=np.int64(3),
        device=torch.device("cpu"),
        max_output_tokens=np.int32(4),
        adv_clip_range=np.float32(2),
    )
    assert agent.cohort.base.pad_id == 1
    agent.save_checkpoint(tmp_path)
    attributes = json.loads((tmp_path / "attributes.json").read_text())
    settings = attributes["settings"]
    assert settings["seed"] == 3
    wanted = {"max_output_tokens": 4, "adv_clip_range": 2.0}
    assert wanted.items() <= settings["algorithm"].items()
    assert attributes["padding"] == [1, None]


def test_a_value_outside_its_own_range_is_refused_but_not_of_a_checkpoint(tmp_path):
    ranges = HyperparameterConfig(lr=RLParameter(min=1e-4, max=1e-2))
    message = r"^lr: expected a value inside hp_config.lr \[0.0001, 0.01\], got 5e-07"
    for build in (GRPO, lambda **given: GRPO.population(2, **given)):
        with pytest.raises(ConfigError, match=message):
            build(actor_network=build_model(), lora_config=LORA, hp_config=ranges)
    agent = GRPO(model_name="tiny-sums", lora_config=LORA, lr=1e-3, hp_config=ranges)
    agent.hparams = agent.hparams.with_value("lr", 1.0)
    agent.save_checkpoint(tmp_path)
    assert GRPO.load(tmp_path).hparams.lr == 1.0


def test_positions_are_those_of_the_documented_signatures():
    assert ARGUMENTS[-2:] == ("loss_type", "tokenizer")
    agent = GSPO(0, "<pad>", "tiny-sums", None, None, None, 4, 6)
    assert (agent.cohort.base.name, agent.index, agent.hparams.batch_size) == ("tiny-sums", 4, 6)
    assert without_spaces((Box(), Box()), {"lr": 1.0}) == ((), {"lr": 1.0})
    assert without_spaces((), {"observation_space": 1, "action_space": 2}) == ((), {})


def test_a_network_in_the_first_position_is_not_taken_for_a_space():
    with pytest.raises(ConfigError, match="pad_token_id: expected an integer >= 0, or None, got L"):
        make(build_model(), model_name="tiny-sums")


class Wrapper:
    def __init__(self, agent, mark=None):
        self.agent, self.mark = agent, mark


def test_a_population_takes_its_wrapper_in_either_way():
    given = {"actor_network": build_model(), "lora_config": LORA}
    population = GRPO.population(2, Box(), Box(), Wrapper, {"mark": 7}, **given)
    assert [type(w) for w in population] == [Wrapper, Wrapper]
    assert population[1].mark == 7
    given = {"actor_network": build_model(), "lora_config": LORA}
    (alone,) = GRPO.population(1, wrapper_cls=Wrapper, **given)
    assert alone.mark is None


@pytest.mark.parametrize("cls", [GRPO, GSPO, CISPO])
def test_the_defaults_are_those_of_the_pages(cls):
    agent = cls(model_name="tiny-sums")
    algorithm, engine = agent.settings.algorithm, agent.settings.engine
    hparams = {"lr": 5e-7, "beta": 0.001, "temperature": 0.9, "top_p": 0.95, "top_k": 50}
    hparams |= {"max_grad_norm": 0.1, "update_epochs": 1, "batch_size": 16, "group_size": 8}
    assert hparams.items() <= dict(agent.hparams).items()
    assert (algorithm.separate_reference, algorithm.max_model_len) == (True, 1024)
    assert (engine.device, engine.gradient_checkpointing, agent.settings.seed) == ("cpu", True, 42)
    lora = agent.cohort.slots.lora_config(agent.state.adapter)
    assert (lora.r, lora.lora_alpha, agent.settings.lora.r) == (16, 32, 16)
    assert not agent.hp_config
    assert agent.cohort.learner.loss.loss_type == agent.kind == cls.__name__.lower()


#: A value of each argument that acts, other than its default, and what it becomes.
OTHERS = {
    "seed": 1,
    "device": "auto",
    "batch_size": None,
    "beta": 0.2,
    "lr": 1e-3,
    "clip_coef": (0.8, 1.3),
    "max_grad_norm": 1.0,
    "update_epochs": 2,
    "group_size": 4,
    "temperature": 1.0,
    "repetition_penalty": 1.5,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.1,
    "micro_batch_size_per_gpu": 3,
    "max_output_tokens": 4,
    "min_output_tokens": 2,
    "max_model_len": 48,
    "hf_generate_chunk_size": 5,
    "gradient_checkpointing": False,
    "use_kl_advantage_shaping": True,
    "adv_norm": "mean_only",
    "use_separate_reference_adapter": False,
    "whiten_advantages": True,
    "adv_clip_range": 2.0,
    "filter_zero_adv": True,
    "adv_filter_eps": 0.25,
    "loss_type": "dr_grpo",
    "model_config": {"attn_implementation": "eager"},
    "hp_config": HyperparameterConfig(beta=RLParameter(min=0.0, max=0.5)),
    "cosine_lr_schedule_config": CosineLRScheduleConfig(8, 0.5),
}


def value_at(settings, path):
    for part in path:
        settings = getattr(settings, part)
    return settings


@pytest.mark.parametrize("name", sorted(set(KEYWORDS) - {"model_name"}))
def test_an_argument_becomes_the_setting_that_stands_for_it(name):
    given = {"model_name": "tiny-sums", name: OTHERS[name]}
    if name == "adv_filter_eps":
        given["filter_zero_adv"] = True
    settings, _ = Arguments.of((), given).translated("grpo")
    plain, _ = Arguments.of((), {"model_name": "tiny-sums"}).translated("grpo")
    got = value_at(settings, AGENT_KEYWORDS[KEYWORDS[name]])
    assert got != value_at(plain, AGENT_KEYWORDS[KEYWORDS[name]])
    wanted = {
        "hp_config": lambda: OTHERS[name].parameters,
        "cosine_lr_schedule_config": lambda: OTHERS[name].schedule(),
    }
    assert got == wanted.get(name, lambda: OTHERS[name])()


def test_all_arguments_come_back_from_the_agent():
    given = {name: value for name, value in OTHERS.items() if name != "device"}
    agent = GRPO(3, "<x>", "tiny-sums", lora_config=LORA, index=4, **given)
    seen = GRPO.inspect_attributes(agent, input_args_only=True)
    assert seen.keys() == set(ARGUMENTS) - {"actor_network", "tokenizer"}
    assert given.items() <= seen.items()
    named = {"pad_token_id": 3, "pad_token": "<x>", "model_name": "tiny-sums", "index": 4}
    assert named.items() <= seen.items()
    assert seen["lora_config"].r == 2


def test_a_model_config_that_no_settings_can_hold_is_refused():
    with pytest.raises(ConfigError, match=r"^model_config: expected strings, numbers, .*object"):
        make(model_name="tiny-sums", model_config={"quantization_config": object()})


def test_a_padding_id_outside_the_vocabulary_leaves_the_model_as_it_was():
    model = build_model()
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(ModelError, match=r"pad_token_id: expected an id in \[0, 19\)"):
        make(99, actor_network=model)
    assert [name for name, _ in model.named_modules()] == names


@pytest.mark.parametrize("spelling", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("word", [torch.bfloat16, "bfloat16"])
def test_both_spellings_of_the_dtype_act_and_come_back(tmp_path, spelling, word):
    agent = make(model_name="tiny-sums", model_config={spelling: word})
    assert agent.cohort.base.dtype is torch.bfloat16
    agent.save_checkpoint(tmp_path)
    loaded = GRPO.load(tmp_path)
    assert loaded.cohort.base.dtype is torch.bfloat16
    assert loaded.settings.engine.dtype == "bfloat16"


def test_two_spellings_that_differ_are_refused():
    with pytest.raises(ValueError, match="got dtype='float32' and torch_dtype='bfloat16'"):
        make(model_name="tiny-sums", model_config={"dtype": "float32", "torch_dtype": "bfloat16"})
    config = {"dtype": "bfloat16", "torch_dtype": torch.bfloat16}
    agent = make(model_name="tiny-sums", model_config=config)
    assert agent.cohort.base.dtype is torch.bfloat16


def test_lengths_that_only_warned_do_not_stop_a_load(tmp_path):
    with pytest.warns(UserWarning, match="max_output_tokens: completions are cut"):
        make(model_name="tiny-sums", max_output_tokens=2000).save_checkpoint(tmp_path)
    assert GRPO.load(tmp_path).settings.algorithm.max_output_tokens == 1023


NAMES = (
    *("GRPO", "GSPO", "CISPO", "ReasoningGym", "HuggingFaceGym", "MultiTurnGym"),
    *("TokenObservationWrapper", "HyperparameterConfig", "RLParameter", "TournamentSelection"),
    *("Mutations", "CosineLRScheduleConfig", "VLLMConfig", "finetune_llm_reasoning"),
    *("finetune_llm_multiturn", "save_llm_checkpoint"),
)


def test_every_name_of_the_pages_is_there():
    assert set(agilerl.__all__) == set(NAMES)
    assert all(getattr(agilerl, name) is not None for name in NAMES)


def test_a_schedule_is_that_of_the_settings():
    config = CosineLRScheduleConfig(num_epochs=np.int64(8), warmup_proportion=0.25)
    assert config.schedule() == LRSchedule(steps=8, warmup_proportion=0.25)
    factors = [config.factor(step) for step in range(9)]
    assert factors == [lr_factor(config.schedule(), step) for step in range(9)]
    assert factors[:2] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_epochs": 0}, r"^num_epochs: expected an integer >= 1, got 0"),
        ({"num_epochs": 2.5}, r"^num_epochs: expected an integer >= 1, got 2.5"),
        (
            {"num_epochs": 5, "warmup_proportion": 1.0},
            r"^warmup_proportion: expected a number in \[0, 1\), got 1.0",
        ),
    ],
)
def test_values_out_of_range_are_named(given, message):
    with pytest.raises(ConfigError, match=message):
        CosineLRScheduleConfig(**given)

"""The constructor's arguments: positions, types, ranges, and what cannot act."""

import json
import math

import numpy as np
import pytest
import torch
from evo_grpo.cohort.arguments import POSITIONS, by_name
from evo_grpo.cohort.settings import argument_names
from peft import LoraConfig
from tiny_cohort import build_model

from evo_grpo import GRPO, GSPO, CosineLRScheduleConfig, HyperparameterConfig, RLParameter
from evo_grpo.errors import ConfigError, ModelError

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
            {"max_output_tokens": 0},
            "max_output_tokens: expected a whole number >= 1, or None",
        ),
        ({"max_output_tokens": -3}, "max_output_tokens: .*got -3"),
        ({"max_model_len": 0}, "max_model_len: expected a whole number >= 2, or None, got 0"),
        ({"hf_generate_chunk_size": 0}, "hf_generate_chunk_size: .*got 0; None decodes all"),
        ({"hf_generate_chunk_size": -1}, "hf_generate_chunk_size: .*got -1"),
        ({"micro_batch_size_per_gpu": 0}, "micro_batch_size_per_gpu: .*got 0"),
        ({"micro_batch_size_per_gpu": -2}, "micro_batch_size_per_gpu: .*got -2"),
        ({"min_output_tokens": -1}, "min_output_tokens: expected a whole number >= 0.*got -1"),
        (
            {"min_output_tokens": 9, "max_output_tokens": 4},
            r"min_output_tokens: expected at most max_output_tokens \(4\), got 9",
        ),
        (
            {"max_output_tokens": 8, "max_model_len": 8},
            r"max_output_tokens: expected less than max_model_len \(8\)",
        ),
        ({"repetition_penalty": math.inf}, "repetition_penalty: expected a finite number"),
        ({"top_k": 3.5}, "top_k: expected a whole number"),
        ({"top_k": None}, "top_k: .*got None"),
        ({"top_p": None}, "top_p: .*got None"),
        ({"lr": "1e-4"}, "lr: .*got '1e-4'"),
        ({"clip_coef": (0.8,)}, "clip_coef: .*ratio bounds"),
        ({"clip_coef": None}, "clip_coef: .*got None"),
        ({"max_grad_norm": None}, "max_grad_norm: .*math.inf never clips"),
        ({"temperature": True}, "temperature: .*got True"),
        ({"seed": None}, "seed: expected a whole number, got None"),
        ({"seed": 1.5}, "seed: expected a whole number, got 1.5"),
        ({"index": -1}, "index: expected a whole number >= 0"),
        ({"lora_config": {"rank": 4}}, "lora_config: expected keywords of LoraConfig.*'rank'"),
        ({"lora_config": 4}, "lora_config: expected a LoraConfig, or None, got 4"),
        (
            {"cosine_lr_schedule_config": {"epochs": 3}},
            "cosine_lr_schedule_config: expected keywords of CosineLRScheduleConfig",
        ),
        ({"hp_config": {"lr": 1}}, "hp_config: expected a HyperparameterConfig.*RLParameter"),
        ({"tokenizer": "abc"}, "tokenizer: expected a transformers tokenizer.*got 'abc'"),
        ({"actor_network": torch.nn.Linear(2, 2)}, "actor_network: expected a transformers causal"),
        ({"model_config": [1]}, r"model_config: expected a mapping.*got \[1\]"),
        ({"group_size": 4.0}, "group_size: expected a whole number"),
        ({"batch_size": 2.5}, "batch_size: expected a whole number"),
        ({"update_epochs": 1.5}, "update_epochs: expected a whole number"),
        ({"adv_clip_range": -1.0}, "adv_clip_range: expected a finite number > 0, or None"),
        ({"adv_filter_eps": -1.0, "filter_zero_adv": True}, "adv_filter_eps: expected a finite"),
        ({"whiten_advantages": "yes"}, "whiten_advantages: expected True or False, got 'yes'"),
        ({"device": "tpu"}, "device: expected auto, cpu, mps, cuda or cuda:N, got 'tpu'"),
        ({"bogus": 1}, r"unknown argument 'bogus'\. Expected one of"),
    ],
)
def test_what_an_argument_cannot_be_is_named(given, message):
    with pytest.raises(ConfigError, match=f"(?s)^{message}"):
        make(**{"actor_network": build_model(), **given})


def test_a_cuda_device_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match=r"^device: 'cuda:1' asked for"):
        make(actor_network=build_model(), device="cuda:1")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"micro_batch_size_per_gpu": 4, "reduce_memory_peak": True},
            "micro_batch_size_per_gpu: has no effect with reduce_memory_peak=True",
        ),
        (
            {"use_kl_advantage_shaping": True, "beta": 0.0},
            "use_kl_advantage_shaping: has no effect with beta=0.0",
        ),
        ({"pad_token": "<pad>"}, "pad_token: has no effect without pad_token_id"),
        ({"wrap": False}, "wrap: False has no effect"),
        ({"max_output_tokens": 1024}, "max_output_tokens: expected less than max_model_len"),
    ],
)
def test_what_cannot_act_warns(given, message):
    with pytest.warns(UserWarning, match=message):
        make(actor_network=build_model(), **given)


def test_kl_shaping_is_no_dead_setting_where_beta_may_mutate():
    ranges = HyperparameterConfig(beta=RLParameter(min=0.0, max=0.1))
    make(actor_network=build_model(), use_kl_advantage_shaping=True, beta=0.0, hp_config=ranges)


def test_a_padding_token_that_is_not_the_one_of_the_id_warns():
    with pytest.warns(UserWarning, match="pad_token: expected the text of token 1, .*'zz'"):
        GRPO(1, "zz", "tiny-sums")
    eos = GRPO(model_name="tiny-sums").cohort.base.tokenizer.eos_token
    assert GRPO(1, eos, "tiny-sums").cohort.base.pad_id == 1


def test_mappings_stand_for_configurations():
    agent = GRPO(
        actor_network=build_model(),
        lora_config={"r": 2, "target_modules": "all-linear"},
        cosine_lr_schedule_config={"num_epochs": 3},
    )
    assert agent.cohort.slots.lora_config(agent.state.adapter).r == 2
    assert agent.cohort.options.lr_schedule == CosineLRScheduleConfig(num_epochs=3)


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
    assert attributes["not_saved"] == []
    wanted = {"seed": 3, "max_output_tokens": 4, "adv_clip_range": 2.0}
    assert wanted.items() <= attributes["arguments"].items()


def test_any_whole_number_is_a_seed_of_its_own():
    def drawn(seed):
        agent = make(actor_network=build_model(), seed=seed, max_output_tokens=8)
        (ids,), _ = agent.get_action([{"input_ids": torch.tensor([[3, 4, 5]])}])
        return ids.tolist()

    assert drawn(-1) == drawn(-1)
    assert drawn(-1) != drawn(1)
    assert drawn(-1) != drawn(42)


def test_a_value_outside_its_own_range_is_refused_but_not_of_a_checkpoint(tmp_path):
    ranges = HyperparameterConfig(lr=RLParameter(min=1e-4, max=1e-2))
    message = r"^lr: expected a value inside its range of hp_config, \[0.0001, 0.01\], got 5e-07"
    for build in (GRPO, lambda **given: GRPO.population(2, **given)):
        with pytest.raises(ConfigError, match=message):
            build(actor_network=build_model(), lora_config=LORA, hp_config=ranges)
    agent = GRPO(model_name="tiny-sums", lora_config=LORA, lr=1e-3, hp_config=ranges)
    agent.hparams = agent.hparams.with_value("lr", 1.0)
    agent.save_checkpoint(tmp_path)
    assert GRPO.load(tmp_path).hparams.lr == 1.0


def test_positions_are_those_of_the_documented_signatures():
    assert set(POSITIONS) <= set(argument_names())
    agent = GSPO(0, "<pad>", "tiny-sums", None, None, None, 4, 6)
    assert (agent.cohort.base.name, agent.index, agent.hparams.batch_size) == ("tiny-sums", 4, 6)
    assert by_name((Box(), Box()), {"lr": 1.0}) == {"lr": 1.0}
    assert by_name((), {"observation_space": 1, "action_space": 2}) == {}


@pytest.mark.parametrize(
    ("args", "given", "message"),
    [
        (
            (0, "<pad>", "tiny-sums"),
            {"model_name": "x"},
            "model_name: expected it once.*'x' by",
        ),
        ((0,), {"pad_token_id": 1}, "pad_token_id: expected it once, got 0 by position and 1"),
        (("<eos>", 1), {}, "positional arguments: expected pad_token_id .* first, got '<eos>'"),
        ((Box(), Box(), 3), {}, r"expected at most 2 \(observation_space, action_space\), got 3"),
        ((Box(),), {}, "action_space: expected it beside observation_space"),
        ((Box(), Box()), {"action_space": 1}, "action_space: expected it once"),
        (tuple(range(99)), {}, "positional arguments: expected at most .*got 99"),
        ((build_model,), {}, "positional arguments: expected pad_token_id"),
        ((1.5,), {}, "positional arguments: expected pad_token_id"),
    ],
)
def test_positional_arguments_that_do_not_fit_are_refused(args, given, message):
    with pytest.raises(ConfigError, match=message):
        make(*args, **given)


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


@pytest.mark.parametrize(
    ("args", "given", "message"),
    [
        ((2.5,), {}, "population: size: expected a whole number >= 1, got 2.5"),
        (
            (2,),
            {"wrapper_kwargs": {"mark": 1}},
            "wrapper_kwargs: has no effect without",
        ),
        ((2,), {"wrapper_cls": 3}, "wrapper_cls: expected a class, or None, got 3"),
        ((2,), {"wrapper_cls": Wrapper, "wrapper_kwargs": 3}, "wrapper_kwargs: expected a mapping"),
        ((2,), {"index": 5}, "index: expected none for a population"),
        ((2, Box(), Box(), Wrapper), {"wrapper_cls": Wrapper}, "wrapper_cls: expected it once"),
    ],
)
def test_a_population_refuses_what_cannot_act(args, given, message):
    with pytest.raises(ConfigError, match=message):
        GRPO.population(*args, **given)


def test_further_arguments_are_refused_by_name():
    agent = make(actor_network=build_model())
    with pytest.raises(ConfigError, match="get_action: expected no further arguments, got foo=1"):
        agent.get_action([{"input_ids": torch.tensor([[3]])}], foo=1)
    with pytest.raises(ConfigError, match=r"test: expected no further arguments, got 5, x=2"):
        agent.test("sums", 1, 5, x=2)


def test_every_default_passes_its_own_rule():
    with pytest.raises(ConfigError, match="exactly one of model_name= and actor_network="):
        GRPO()

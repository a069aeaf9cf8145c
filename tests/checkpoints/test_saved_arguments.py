"""What `load` builds an agent with is what it was built with, and what is lost is named."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig
from tiny_cohort import build_model, same, weights

from evo_grpo import (
    CISPO,
    GRPO,
    GSPO,
    CosineLRScheduleConfig,
    HyperparameterConfig,
    RLParameter,
)
from evo_grpo.checkpoints.manifest import read_attributes
from evo_grpo.errors import CheckpointError, ConfigError

LORA = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])
OBS = [{"input_ids": torch.tensor([[3, 4, 5]])}]
SUMS = {"model_name": "tiny-sums", "lora_config": LORA, "max_output_tokens": 3}


def make(cls=GRPO, **given):
    return cls(
        **{
            "actor_network": build_model(),
            "lora_config": LORA,
            "group_size": 4,
            "max_output_tokens": 3,
            "batch_size": None,
            **given,
        }
    )


def step(agent):
    ids, masks = agent.get_action(OBS)
    agent.learn((ids, masks, [0.0, 1.0, 0.5, 0.2]))


def change(folder, **changes):
    file = folder / "attributes.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def dtype(agent):
    return agent.cohort.base.dtype


def test_schedule_mutations_and_hyperparameters_come_back(tmp_path):
    agent = GRPO(
        **SUMS,
        group_size=4,
        clip_coef=(0.9, 1.3),
        cosine_lr_schedule_config=CosineLRScheduleConfig(8, 0.5),
        hp_config=HyperparameterConfig(
            lr=RLParameter(min=1e-7, max=1e-2), group_size=RLParameter(2, 9, int, 0.5, 1.5)
        ),
        adv_norm="mean_only",
    )
    step(agent)
    agent.save_checkpoint(tmp_path)
    loaded = GRPO.load(tmp_path)
    assert loaded.settings.evolution == agent.settings.evolution
    assert loaded.hp_config == agent.hp_config
    assert loaded.hparams == agent.hparams
    assert loaded.settings.loss == agent.settings.loss
    # In the middle of the warm-up, and not at the full rate.
    assert loaded.cohort.lr_factor(0) == agent.cohort.lr_factor(0) == 0.5
    assert [g["lr"] for g in loaded.state.optimizer.param_groups] == [agent.hparams.lr]


@pytest.mark.parametrize("lora_only", [True, False])
@pytest.mark.parametrize("spelling", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("word", [torch.bfloat16, "bfloat16"])
def test_both_spellings_of_the_dtype_act_and_come_back(tmp_path, spelling, word, lora_only):
    agent = GRPO(**SUMS, model_config={spelling: word})
    assert dtype(agent) is torch.bfloat16
    agent.save_checkpoint(tmp_path, lora_only=lora_only)
    loaded = GRPO.load(tmp_path)
    assert dtype(loaded) is torch.bfloat16
    assert loaded.settings.model.model_config == {"dtype": "bfloat16"}


def test_a_model_given_as_an_object_comes_back_in_its_dtype(tmp_path):
    agent = make(actor_network=build_model().to(torch.bfloat16), pad_token_id=0, pad_token="<pad>")
    step(agent)
    agent.save_checkpoint(tmp_path, lora_only=False)
    loaded = GRPO.load(tmp_path)
    assert dtype(loaded) is torch.bfloat16
    assert loaded.cohort.base.tokenizer is None
    assert loaded.cohort.base.pad_id == 0
    assert same(weights(loaded.cohort, 0), weights(agent.cohort, 0))
    step(loaded)
    # And once more, from what was loaded.
    loaded.save_checkpoint(tmp_path / "again", lora_only=False)
    assert dtype(GRPO.load(tmp_path / "again")) is torch.bfloat16


def test_a_base_saved_with_its_tokenizer_comes_back_with_it(tmp_path):
    agent = GRPO(**SUMS)
    agent.save_checkpoint(tmp_path, lora_only=False)
    loaded = GRPO.load(tmp_path)
    assert loaded.cohort.base.tokenizer is not None
    assert loaded.settings.model.actor_network is None


def test_what_json_cannot_hold_is_named(tmp_path):
    tokenizer = GRPO(**SUMS).cohort.base.tokenizer
    agent = GRPO(**SUMS, tokenizer=tokenizer)
    agent.save_checkpoint(tmp_path / "a")
    with pytest.warns(UserWarning, match="a: tokenizer cannot be written to attributes.json"):
        GRPO.load(tmp_path / "a")
    # The base's folder holds it.
    agent.save_checkpoint(tmp_path / "b", lora_only=False)
    GRPO.load(tmp_path / "b")
    attributes = read_attributes(tmp_path / "b")
    assert attributes["not_saved"] == ["tokenizer"]
    assert "actor_network" not in attributes["arguments"]


def test_keywords_of_the_model_are_kept_or_named(tmp_path):
    config = {"attn_implementation": "eager", "key_mapping": {"^x": "y"}, "weights": {1: 2}}
    agent = GRPO(**SUMS)
    object.__setattr__(agent.settings.model, "model_config", config)
    agent.save_checkpoint(tmp_path)
    attributes = read_attributes(tmp_path)
    assert attributes["not_saved"] == ["model_config['weights']"]
    del config["weights"]
    assert attributes["arguments"]["model_config"] == config


def test_a_missing_optimizer_is_missed(tmp_path):
    agent = GRPO(**SUMS, group_size=4)
    step(agent)
    agent.save_checkpoint(tmp_path)
    (tmp_path / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors is missing; put it back"):
        GRPO.load(tmp_path)
    # Checkpoints of the first days said only that they have one.
    attributes = read_attributes(tmp_path)
    del attributes["optimizer_sha256"], attributes["moments"]
    (tmp_path / "attributes.json").write_text(json.dumps(attributes))
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors is missing; put it back"):
        GRPO.load(tmp_path)
    agent.save_checkpoint(tmp_path, save_optimizer=False)
    assert GRPO.load(tmp_path).state.optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("named", [True, False])
def test_a_checkpoint_of_another_class_is_refused(tmp_path, named):
    GRPO(**SUMS).save_checkpoint(tmp_path)
    if not named:
        change(tmp_path, algorithm=None)
    for cls in (GSPO, CISPO):
        message = rf"{cls.__name__}.load: checkpoint .* is of GRPO, .* use GRPO.load\(path\)"
        with pytest.raises(ConfigError, match=message):
            cls.load(tmp_path)
    assert GRPO.load(tmp_path).settings.loss.loss_type == "grpo"
    GSPO(**SUMS).load_checkpoint(tmp_path)


def test_a_loss_chosen_by_argument_stays_with_its_class(tmp_path):
    GRPO(**SUMS, loss_type="gspo").save_checkpoint(tmp_path)
    assert GRPO.load(tmp_path).settings.loss.loss_type == "gspo"


@pytest.mark.parametrize(
    "arguments",
    [
        [1],
        {"cosine_lr_schedule_config": {"epochs": 3}},
        {"hp_config": {"lr": {"min": 1.0}}},
        {"hp_config": {"lr": {"min": 1.0, "max": 2.0, "dtype": "complex"}}},
    ],
)
def test_damaged_arguments_are_named(tmp_path, arguments):
    GRPO(**SUMS).save_checkpoint(tmp_path)
    change(tmp_path, arguments=arguments)
    with pytest.raises(CheckpointError, match="arguments are not what save_checkpoint writes"):
        GRPO.load(tmp_path)


def test_two_spellings_that_differ_are_refused():
    with pytest.raises(ValueError, match="got dtype='float32' and torch_dtype='bfloat16'"):
        GRPO(**SUMS, model_config={"dtype": "float32", "torch_dtype": "bfloat16"})
    config = {"dtype": "bfloat16", "torch_dtype": torch.bfloat16}
    assert dtype(GRPO(**SUMS, model_config=config)) is torch.bfloat16


def test_another_base_of_equal_shapes_is_told(tmp_path):
    GRPO(**{**SUMS, "model_name": "tiny-foods"}).save_checkpoint(tmp_path / "a")
    agent = GRPO(**SUMS)
    other = "over base 'tiny-foods', this agent's base is 'tiny-sums', whose weights are others"
    with pytest.warns(UserWarning, match=other):
        agent.load_checkpoint(tmp_path / "a")
    # Checkpoints of the first days have no digest: their names are compared.
    change(tmp_path / "a", base_digest="")
    with pytest.warns(UserWarning, match="tiny-foods.*by its name another one"):
        agent.load_checkpoint(tmp_path / "a")
    # A copy under another name is the same base; so is one in another dtype.
    agent.save_checkpoint(tmp_path / "b", lora_only=False)
    shutil.move(tmp_path / "b" / "base", tmp_path / "moved")
    GRPO(**{**SUMS, "model_name": str(tmp_path / "moved")}).load_checkpoint(tmp_path / "b")
    GRPO(**SUMS, model_config={"dtype": "bfloat16"}).load_checkpoint(tmp_path / "b")

"""What `load` builds an agent with is what it was built with, and what is lost is named."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig
from tiny_cohort import build_model, same, weights

from evo_grpo import CISPO, GRPO, GSPO, HyperparameterConfig, RLParameter, agilerl
from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.population.checkpoints.read import read_attributes

LORA = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])
OBS = [{"input_ids": torch.tensor([[3, 4, 5]])}]
SUMS = {"model": "tiny-sums", "lora": LORA, "max_output_tokens": 3, "device": "cpu"}


def make(cls=GRPO, **given):
    settings = {"lora": LORA, "group_size": 4, "max_output_tokens": 3, "device": "cpu"}
    return cls(**{"model": build_model(), **settings, **given})


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
        lr_schedule={"steps": 8, "warmup_proportion": 0.5},
        hyperparameters=HyperparameterConfig(
            lr=RLParameter(min=1e-7, max=1e-2), group_size=RLParameter(2, 9, int, 0.5, 1.5)
        ),
        adv_norm="mean_only",
    )
    step(agent)
    agent.save_checkpoint(tmp_path)
    loaded = GRPO.load(tmp_path, device="cpu")
    assert loaded.settings == agent.settings
    assert loaded.hp_config == agent.hp_config
    assert loaded.hparams == agent.hparams
    # In the middle of the warm-up, and not at the full rate.
    schedule = agent.settings.algorithm.lr_schedule
    assert [one.state.lr_factor(schedule) for one in (loaded, agent)] == [0.5, 0.5]
    assert [g["lr"] for g in loaded.state.optimizer.param_groups] == [agent.hparams.lr]


@pytest.mark.parametrize("lora_only", [True, False])
def test_the_dtype_comes_back(tmp_path, lora_only):
    agent = GRPO(**SUMS, dtype="bfloat16")
    assert dtype(agent) is torch.bfloat16
    agent.save_checkpoint(tmp_path, lora_only=lora_only)
    assert dtype(GRPO.load(tmp_path, device="cpu")) is torch.bfloat16


def test_a_model_given_as_an_object_comes_back_in_its_dtype(tmp_path):
    agent = make(model=build_model().to(torch.bfloat16))
    step(agent)
    agent.save_checkpoint(tmp_path, lora_only=False)
    loaded = GRPO.load(tmp_path)
    assert dtype(loaded) is torch.bfloat16
    assert loaded.cohort.base.tokenizer is None
    assert loaded.cohort.base.pad_id == agent.cohort.base.pad_id
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
    assert loaded.cohort.base.model is not agent.cohort.base.model


def test_what_json_cannot_hold_is_named(tmp_path):
    tokenizer = GRPO(**SUMS).cohort.base.tokenizer
    agent = GRPO(**SUMS, tokenizer=tokenizer)
    agent.save_checkpoint(tmp_path / "a")
    with pytest.warns(UserWarning, match="a: tokenizer cannot be written to attributes.json"):
        GRPO.load(tmp_path / "a")
    # The base's folder holds it.
    agent.save_checkpoint(tmp_path / "b", lora_only=False)
    GRPO.load(tmp_path / "b")
    assert "tokenizer" in read_attributes(tmp_path / "b")["objects"]


def test_keywords_of_the_model_come_back(tmp_path):
    config = {"attn_implementation": "eager", "key_mapping": {"^x": "y"}}
    GRPO(**SUMS, config=config).save_checkpoint(tmp_path)
    assert GRPO.load(tmp_path).settings.model.config == config
    with pytest.raises(ConfigError, match=r"^config: expected strings, numbers, .*found a object"):
        GRPO(**SUMS, config={"quantization_config": object()})


def test_padding_comes_back(tmp_path):
    agent = agilerl.GRPO(5, None, "tiny-sums", lora_config=LORA, group_size=4, max_output_tokens=3)
    agent.save_checkpoint(tmp_path)
    for cls in (agilerl.GRPO, GRPO):
        assert cls.load(tmp_path).cohort.base.padding == (5, None)
    agent.load_checkpoint(tmp_path)


def test_a_checkpoint_of_another_class_is_refused(tmp_path):
    GRPO(**SUMS).save_checkpoint(tmp_path)
    for cls in (GSPO, CISPO, agilerl.CISPO):
        message = rf"{cls.__name__}.load: checkpoint .* is of GRPO, .* use GRPO.load\(path\)"
        with pytest.raises(ConfigError, match=message):
            cls.load(tmp_path)
    assert GRPO.load(tmp_path).cohort.learner.loss.loss_type == "grpo"
    GSPO(**SUMS).load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": {"lr_schedule": {"epochs": 3}}},
        {"hyperparameters": {"lr": {"min": 1.0}}},
        {"hyperparameters": {"lr": {"min": 1.0, "max": 2.0, "dtype": "complex"}}},
    ],
)
def test_damaged_settings_are_named(tmp_path, settings):
    GRPO(**SUMS).save_checkpoint(tmp_path)
    change(tmp_path, settings=settings)
    with pytest.raises(CheckpointError, match="settings are not what save_checkpoint writes"):
        GRPO.load(tmp_path)


def test_another_base_of_equal_shapes_is_told(tmp_path):
    GRPO(**{**SUMS, "model": "tiny-foods"}).save_checkpoint(tmp_path / "a")
    agent = GRPO(**SUMS)
    other = "over base 'tiny-foods', this agent's base is 'tiny-sums', whose weights are others"
    with pytest.warns(UserWarning, match=other):
        agent.load_checkpoint(tmp_path / "a")
    # Where there is no digest, names are compared.
    change(tmp_path / "a", base_digest="")
    with pytest.warns(UserWarning, match="tiny-foods.*by its name another one"):
        agent.load_checkpoint(tmp_path / "a")
    # A copy under another name is the same base; so is one in another dtype.
    agent.save_checkpoint(tmp_path / "b", lora_only=False)
    shutil.move(tmp_path / "b" / "base", tmp_path / "moved")
    GRPO(**{**SUMS, "model": str(tmp_path / "moved")}).load_checkpoint(tmp_path / "b")
    GRPO(**SUMS, dtype="bfloat16").load_checkpoint(tmp_path / "b")

"""An adapter that a run starts from, as `check` and the run itself take it."""

import re

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from evo_grpo import GRPO, run
from evo_grpo.cli.plan.plan import make_plan
from evo_grpo.errors import ConfigError
from evo_grpo.settings import from_dict
from evo_grpo.sources import resolve

QV = ["q_proj", "v_proj"]
MERGE = "merge this adapter into its base"


def settings(folder, evolve=None, **model):
    return from_dict(
        {
            "model": {"name": "tiny-sums", "adapter": str(folder), **model},
            "evolve": evolve or {},
            "env": "sums",
            "population": {"size": 2, "rounds": 1, "steps_per_round": 1},
        }
    )


def saved(folder, **given):
    base = AutoModelForCausalLM.from_pretrained(resolve("tiny-sums").path)
    with torch.random.fork_rng():
        get_peft_model(base, LoraConfig(**{"r": 4, "target_modules": QV, **given})).save_pretrained(
            folder
        )
    return folder


def refused(config, tmp_path, said):
    """`check` and the run say the same, and no folder is left."""
    for begin in (make_plan, lambda config: run(config, out=tmp_path / "run")):
        with pytest.raises(ConfigError, match=said):
            begin(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"use_dora": True}, f"lora.use_dora=True: .*{MERGE}"),
        ({"modules_to_save": ["lm_head"]}, f"lora.modules_to_save=.*{MERGE}"),
        ({"bias": "lora_only"}, f"lora.bias='lora_only': .*{MERGE}"),
        ({"trainable_token_indices": {"embed_tokens": [5]}}, f"trainable_token_indices=.*{MERGE}"),
        ({"init_lora_weights": "pissa"}, f"'pissa': it rewrites the base, .*{MERGE}"),
        (
            {"target_modules": ["q_proj", "embed_tokens"]},
            r"head left out: as .*embed_tokens",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to")
def test_an_adapter_that_cannot_be_trained_is_refused_with_a_remedy(tmp_path, given, said):
    refused(settings(saved(tmp_path / "start", **given)), tmp_path, said)


def test_an_adapter_of_another_base_is_refused(tmp_path):
    start = tmp_path / "start"
    get_peft_model(tiny.llama(), tiny.lora(4)).save_pretrained(start)
    said = r"linear layers of tiny-sums .*down_proj.lora_A.weight \(4, 256\)"
    refused(settings(start), tmp_path, said)
    said = rf"model.adapter {start}: expected A and B, .*; give .*, or {MERGE}"
    with pytest.raises(ConfigError, match=said):
        GRPO(model="tiny-sums", adapter=str(start))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_that_is_not_finite_is_refused_by_file_and_tensor(tmp_path, value):
    file = saved(tmp_path / "start") / "adapter_model.safetensors"
    tensors = load_file(file)
    key = max(tensors)
    tensors[key][0, 0] = value
    save_file(tensors, file)
    said = re.escape(f"expected finite numbers, got NaN or infinity in {key} of {file}")
    refused(settings(tmp_path / "start"), tmp_path, said)


def test_settings_beside_an_adapter_are_those_of_the_adapter_or_refused(tmp_path):
    said = re.escape(
        f"expected r 4 of model.adapter {saved(tmp_path / 'start')}, got 16; leave mod"
    )
    with pytest.raises(ConfigError, match=said):
        make_plan(settings(tmp_path / "start", lora={"r": 16}))
    with pytest.raises(ConfigError, match=r"expected the layers of model.adapter .*'all-linear'; "):
        make_plan(settings(tmp_path / "start", lora={"r": 4, "alpha": 8, "dropout": 0.0}))


@pytest.mark.parametrize(
    ("given", "parameters"),
    [
        ({}, 6_144),
        ({"exclude_modules": ["layers.0.self_attn.q_proj"]}, 5_248),
        ({"layers_to_transform": [2, 3], "layers_pattern": "layers"}, 3_072),
    ],
)
def test_the_plan_has_the_size_of_the_adapter(tmp_path, given, parameters):
    start = saved(tmp_path / "start", **given)
    assert make_plan(settings(start)).adapter_parameters == parameters

"""One schema, two doors: what YAML and Python give arrives as the same settings, where it acts."""

import json
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from vllm_doubles import doubled

from evo_grpo import GRPO
from evo_grpo.api.calls import separated
from evo_grpo.evolve.explore.on_copy import NoExploration
from evo_grpo.evolve.select.halving import NoSelection
from evo_grpo.population.cohort.sampler import PopulationSampler
from evo_grpo.schema.hparams import MUTABLE, PATHS, AgentFields
from evo_grpo.settings import AgentSettings, LossConfig, RunConfig, from_dict
from evo_grpo.settings.algorithm import LossFields
from evo_grpo.settings.keywords import (
    AGENT_KEYWORDS,
    POPULATION_KEYWORDS,
    TRAIN_KEYWORDS,
    agent_settings,
)
from evo_grpo.training.assemble import build_cohort, round_settings

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = {"model": "tiny-sums", "env": "sums"}

# A value that is not the default, for every setting.
AGENT = {
    "seed": 3,
    "model": "tiny-foods",
    "lora": {"r": 2, "alpha": 3.0},
    "config": {"attn_implementation": "eager"},
    "trust_remote_code": True,
    "adapter": "FOLDER",
    **{name: 0.3 if MUTABLE[name] is float else 3 for name in AgentFields.model_fields},
    "clip_coef": (0.5, 1.5),
    "importance_sampling_level": "sequence",
    "delta": 4.0,
    "kl_bias_correction": True,
    "sapo_temperature_pos": 1.5,
    "sapo_temperature_neg": 1.6,
    "vespo_positive": (1.0, 2.0),
    "vespo_negative": (1.5, 2.5),
    "sampler_correction": "token_mask",
    "sampler_ratio_cap": 2.0,
    "off_policy_mask_threshold": 0.5,
    "loss_type": "dapo",
    "prompts_per_step": 3,
    "max_output_tokens": 9,
    "min_output_tokens": 2,
    "stop": ["</a>", 5],
    "max_model_len": 40,
    "adv_norm": "batch_std",
    "whiten_advantages": True,
    "adv_clip_range": 2.0,
    "filter_zero_adv": True,
    "adv_filter_eps": 0.1,
    "mask_truncated_completions": True,
    "overlong_buffer": 2,
    "overlong_penalty": 0.5,
    "dynamic_sampling_tokens": 100,
    "kl_shaping": True,
    "separate_reference": True,
    "lr_schedule": {"steps": 10, "warmup_proportion": 0.5},
    "hyperparameters": {"beta": {"min": 0.0, "max": 0.5}},
    "device": "cpu",
    "dtype": "bfloat16",
    "quantization": "int8",
    "threads": 2,
    "base": "sharded",
    "zero": 2,
    "rollout": "vllm",
    "vllm": {"gpu_memory_utilization": 0.5},
    "memory": "8GB",
    "max_tokens_per_microbatch": 77,
    "max_rows_per_microbatch": 5,
    "max_decode_rows": 6,
    "max_decode_prompts": 7,
    "shards": 2,
    "overlap": True,
    "offload_adapters": True,
    "gradient_checkpointing": True,
    "cuda_graphs": False,
    "kernels": "off",
}
# What a setting needs beside it.
BESIDE = {"offload_adapters": {"shards": 3}}
TRAIN = {
    "name": "mine",
    "rounds": 2,
    "steps_per_round": 3,
    "decisions": [1, 3],
    "sizes": "constant",
    "stop": {"fitness": 0.9, "patience": 3, "minutes": 5.0, "tokens": 1e6, "no_signal": 4},
    "selection": "none",
    "exploration": "none",
    "significance": 0.3,
    "archive": False,
    "dead_steps": 3,
    "fitness": {
        "prompts": 5,
        "samples": 2,
        "temperature": 0.5,
        "racing": 0.5,
        "window": 3,
        "test_prompts": 7,
        "test_samples": 1,
        "final_samples": 3,
        "correct": 0.7,
        "between": 2,
    },
    "inherit_optimizer": False,
    "completions": 1,
    "columns": ["a"],
    "metrics": False,
    "checkpoints": "last",
    "optuna": False,
    "storage": "sqlite",
    "trackers": ["wandb", {"kind": "tensorboard", "folder": "boards"}],
}


def at(path, value):
    """A run file with one more setting."""
    data = json.loads(json.dumps(MINIMAL | {"model": {"name": "tiny-sums"}}))
    *above, last = path
    place = data
    for name in above:
        place = place.setdefault(name, {})
    if path == ("model", "name"):
        place = data["model"]
    place[last] = value
    return data


def yaml_path(name):
    path = AGENT_KEYWORDS[name]
    return ("evolve", "hyperparameters") if name == "hyperparameters" else path


def plain(value):
    return list(value) if isinstance(value, tuple) else value


def test_every_setting_has_a_value_here_that_is_not_its_default():
    assert set(AGENT) == set(AGENT_KEYWORDS)
    assert set(TRAIN) == set(TRAIN_KEYWORDS)
    default = AgentSettings(model="tiny-sums")
    for name in set(AGENT) - {"device"}:
        given = {"model": "tiny-sums", **BESIDE.get(name, {}), name: AGENT[name]}
        assert agent_settings(given, kind="grpo") != default


def test_the_last_part_of_every_path_is_unique_in_a_call():
    groups = {
        name: field.annotation
        for name, field in RunConfig.model_fields.items()
        if hasattr(field.annotation, "model_fields") and name != "env"
    }
    # A group's own name stands for its shorthand, and the class for the algorithm's kind.
    own = {"model": "name", "algorithm": "kind"}
    names = [n for g, c in groups.items() for n in c.model_fields if n != own.get(g)]
    names += ["model", "seed", "name"]
    # The constructors have the strings that end a completion, `train` the rules that end a run.
    assert sorted(names) == sorted([*set(names), "stop"])
    given = {*AGENT_KEYWORDS, *POPULATION_KEYWORDS, *TRAIN_KEYWORDS}
    assert given == set(names), "every setting of a run file but those of env is a keyword"


@pytest.mark.parametrize("name", AGENT)
def test_both_doors_give_equal_settings(name):
    beside = BESIDE.get(name, {})
    python = {"model": "tiny-sums", **beside, name: AGENT[name]}
    settings, _ = separated(python, "grpo")
    data = at(yaml_path(name), plain(AGENT[name]))
    if beside:
        data["engine"].update(beside)
        data["population"] = {"size": 3, "sizes": "constant"}
    assert from_dict(data).agents() == settings


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAIN)
def test_both_doors_of_train_give_equal_settings(name, monkeypatch, tmp_path):
    seen = {}
    population = GRPO.population(size=2, model="tiny-sums")

    def record(config, out, folder, prepared, observer):
        seen.update(config=config, settings=prepared.round_settings)
        raise KeyboardInterrupt  # before anything is trained

    monkeypatch.setattr("evo_grpo.api.population.play_and_judge", record)
    # Not every tracker among the values is installed.
    monkeypatch.setattr("evo_grpo.api.population.check_trackers", lambda trackers: None)
    with pytest.raises(KeyboardInterrupt):
        population.train("sums", out=tmp_path / "run", progress=False, **{name: TRAIN[name]})
    data = at(TRAIN_KEYWORDS[name], TRAIN[name])
    data["population"] = {**data.get("population", {}), "size": 2}
    config = from_dict(data).settled(8)
    assert seen["config"] == config
    assert seen["settings"] == round_settings(config.population, config.evolve, config.record, 4, 8)


OWN = ("sapo_", "vespo_")  # settings of one loss alone

OF_A_STEP = (
    *("mask_truncated_completions", "overlong_buffer", "overlong_penalty"),
    "dynamic_sampling_tokens",
)
OF_ADVANTAGES = [
    "whiten_advantages",
    "adv_clip_range",
    "filter_zero_adv",
    "adv_filter_eps",
    "kl_shaping",
]
# Where each setting acts: read off the object that uses it.
ARRIVES = {
    # The learner reads a hyperparameter off the agent at each call; those below go further.
    **{
        name: (lambda a, path=f"{place}.{name}": attrgetter(path)(a))
        for place, names in {
            "hparams": AgentFields.model_fields,
            "cohort.learner.loss": [*LossFields.model_fields, "loss_type"],
            "cohort.settings.algorithm": OF_A_STEP,
            "cohort.learner.algorithm": OF_ADVANTAGES,
            "cohort.learner.engine": ("max_rows_per_microbatch", "gradient_checkpointing"),
        }.items()
        for name in names
    },
    "seed": lambda a: a.cohort.seed,
    "model": lambda a: a.cohort.base.name,
    "lora": lambda a: {
        "r": a.cohort.slots.lora_config("actor_0").r,
        "alpha": a.cohort.slots.lora_config("actor_0").lora_alpha,
    },
    "config": lambda a: {"attn_implementation": a.cohort.base.model.config._attn_implementation},
    "prompts_per_step": lambda a: a.settings.algorithm.prompts_per_step,
    "max_output_tokens": lambda a: a.cohort.sampling(a.hparams).max_output_tokens,
    "min_output_tokens": lambda a: a.cohort.sampling(a.hparams).min_output_tokens,
    "stop": lambda a: [*a.cohort.engine.ends.strings, *(a.cohort.engine.ends.ids & {5})],
    "max_model_len": lambda a: a.cohort.context_length,
    "adv_norm": lambda a: {"batch": "batch_std"}[a.settings.algorithm.adv_scale(a.hparams)],
    "separate_reference": lambda a: a.state.has_reference,
    "lr_schedule": lambda a: a.settings.algorithm.lr_schedule.model_dump(),
    "hyperparameters": lambda a: {
        n: {"min": a.hp_config[n].min, "max": a.hp_config[n].max} for n in a.hp_config.names()
    },
    "device": lambda a: a.cohort.base.device.type,
    "dtype": lambda a: str(a.cohort.base.dtype).removeprefix("torch."),
    "quantization": lambda a: a.cohort.base.quantization,
    "threads": lambda a: torch.get_num_threads(),
    "rollout": lambda a: {"VLLMEngine": "vllm"}[type(a.cohort.engine).__name__],
    "vllm": lambda a: a.cohort.engine._settings.engine.vllm.model_dump(include=AGENT["vllm"]),
    "max_tokens_per_microbatch": lambda a: a.cohort.learner._tokens,
    "max_decode_rows": lambda a: a.cohort.engine.max_rows,
    "max_decode_prompts": lambda a: a.cohort.engine.max_prompts,
    "shards": lambda a: a.cohort.shards,
    "overlap": lambda a: a.cohort.settings.engine.overlap,
    "base": lambda a: "replicated" if a.cohort.base.specialized else "sharded",
    "lr": lambda a: a.state.optimizer.param_groups[0]["initial_lr"],
    "group_size": lambda a: PopulationSampler.in_training(a.cohort, [0], stream=()).group_sizes[0],
    **{
        name: (lambda a, name=name: getattr(a.cohort.sampling(a.hparams), name))
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    },
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize("name", ARRIVES)
def test_a_setting_arrives_at_the_object_that_uses_it(name, monkeypatch):
    threads = torch.get_num_threads()
    needs = {
        "adv_filter_eps": {"filter_zero_adv": True},
        "overlong_penalty": {"overlong_buffer": 2},
        "kl_shaping": {"beta": 0.1},
        "kl_bias_correction": {"beta": 0.1},
        "separate_reference": {"beta": 0.1},
        **{name: {"loss_type": name.split("_")[0]} for name in AGENT if name.startswith(OWN)},
        "sampler_correction": {"rollout": "vllm"},
        "sampler_ratio_cap": {"rollout": "vllm"},
        "vllm": {"rollout": "vllm"},
    }
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        if "rollout" in (name, *needs.get(name, {})):
            stack.enter_context(doubled(monkeypatch))
        given = {"model": "tiny-sums", "device": "cpu", **needs.get(name, {}), name: AGENT[name]}
        agent = GRPO(**given)
        assert ARRIVES[name](agent) == AGENT[name]
        agent.cohort.close_engine()


def test_the_rest_arrives_while_the_base_is_loaded(tmp_path, monkeypatch):
    # DeepSpeed tests its stage, tests/device the graphs and agents in host memory, those of the
    # model the kernels; a memory decides
    # the limits of a run, and nothing here.
    elsewhere = {
        "trust_remote_code", "adapter", "zero", "memory", "cuda_graphs", "kernels",
        "offload_adapters",
    }  # fmt: skip
    assert set(AGENT) - set(ARRIVES) == elsewhere
    first = GRPO(model="tiny-sums")
    with torch.no_grad():
        for parameter in first.cohort.slots.parameters("actor_0"):
            parameter.add_(0.5)
    first.save_checkpoint(tmp_path)
    again = GRPO(
        model="tiny-sums", adapter=str(tmp_path / "actor"), separate_reference=True, beta=0.1
    )
    for role in ("actor_0", "reference_0"):
        for mine, theirs in zip(
            again.cohort.slots.parameters(role),
            first.cohort.slots.parameters("actor_0"),
            strict=True,
        ):
            assert torch.equal(mine, theirs)
    seen = {}

    def load(name, **keywords):
        seen.update(keywords)
        raise ZeroDivisionError

    monkeypatch.setattr("evo_grpo.training.assemble.SharedBase.load", load)
    for value in (True, False):
        with pytest.raises(ZeroDivisionError):
            build_cohort(agent_settings({"model": "m", "trust_remote_code": value}, kind="grpo"))
        assert seen["trust_remote_code"] is value


def test_strategies_arrive_as_the_objects_that_plan():
    config = from_dict(MINIMAL | {"evolve": {"selection": "none", "exploration": "none"}})
    settings = round_settings(config.population, config.evolve, config.record, 4, 8)
    assert (settings.selector, settings.explorer) == (NoSelection(), NoExploration())


def test_every_name_is_in_the_documentation_and_the_schema():
    classes = (ROOT / "docs" / "api.md").read_text()
    pages = (ROOT / "docs" / "configuration.md").read_text()
    schema = (ROOT / "population.schema.json").read_text()
    for name in (*AGENT_KEYWORDS, *POPULATION_KEYWORDS, *TRAIN_KEYWORDS):
        assert f"\n    {name}: " in classes
        assert f"`{name}`" in pages
        assert f'"{name}"' in schema
    # What agents have in place of a setting of `algorithm`, `env` or `model` for all of them.
    named = {name for name, kind in MUTABLE.items() if kind in (str, bool)}
    more = {"clip_low", "clip_high", "max_output_tokens", *PATHS.values(), *named}
    assert set(MUTABLE) - set(AgentFields.model_fields) == more
    assert named - {"prompt", "lora.target_modules"} < set(AGENT_KEYWORDS)
    assert set(LossConfig.model_fields) - set(AGENT_KEYWORDS) == {"max_completion_length"}

"""The plan of a run: rows, tokens and bytes before anything is loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from evo_grpo.cli.plan.plan import make_plan
from evo_grpo.errors import ConfigError, DataError
from evo_grpo.settings import from_dict, load

ROOT = Path(__file__).resolve().parents[3]
MINIMAL = {"model": "tiny-sums", "env": "sums"}


# --- rows and tokens -----------------------------------------------------------------------------


def test_rows_and_tokens_are_upper_bounds_over_the_range_of_group_size():
    overrides = [
        "population={size: 4, rounds: 3, steps_per_round: 5}",
        "algorithm={prompts_per_step: 2, group_size: 6}",
        "evolve.hyperparameters={group_size: {min: 4, max: 10}}",
        "evolve.fitness={prompts: 20, samples: 2, test_prompts: 30, test_samples: 3}",
    ]
    plan = make_plan(from_dict(MINIMAL, overrides))
    assert plan.group_sizes == (4, 10)
    assert plan.max_output_tokens == 4  # the hint of the task
    assert plan.rows_per_step == 4 * 2 * 10
    assert plan.tokens_per_round == 5 * 80 * 4
    assert plan.evaluation_tokens == 4 * 20 * 2 * 4
    assert plan.test_tokens == 2 * 30 * 3 * 4
    assert plan.total_tokens == 3 * (1600 + 640) + 720
    assert plan.rows == {"train": 9000, "validation": 500, "test": 500}


def test_evaluations_take_no_more_prompts_than_there_are():
    overrides = ["env.args={validation_size: 10, test_size: 7}"]
    plan = make_plan(from_dict(MINIMAL, overrides))
    assert plan.evaluation_tokens == 8 * 10 * 4
    assert plan.test_tokens == 2 * 7 * 4 * 4
    assert "evolve.fitness.prompts is 64, but validation has 10 rows" in plan.warnings
    assert "evolve.fitness.test_prompts is 256, but test has 7 rows" in plan.warnings


def test_a_context_without_room_for_a_prompt_is_warned_of():
    (text,) = make_plan(
        load(ROOT / "population.yaml", ["algorithm.max_output_tokens=512"])
    ).warnings
    assert "no room for a prompt in a context of 512" in text


GAME = """
class Echo:
    def reset(self, *, seed=None):
        return "say a", {}

    def step(self, action):
        return "say a", float(action == "a"), False, False, {}
"""


def test_a_game_has_turns_and_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "echo_game.py").write_text(GAME)
    monkeypatch.chdir(tmp_path)
    env = {"kind": "python:echo_game:Echo", "max_turns": 3}
    overrides = ["algorithm.max_output_tokens=5", "evolve.fitness={test_prompts: 10}"]
    plan = make_plan(from_dict({"model": "tiny-sums", "env": env}, overrides))
    assert (plan.rows, plan.turns) == ({}, 3)
    assert plan.tokens_per_round == 4 * 8 * 4 * 8 * 5 * 3
    assert plan.evaluation_tokens == 8 * 64 * 5 * 3
    assert plan.test_tokens == 2 * 10 * 4 * 5 * 3


def test_bytes_are_those_of_adapter_gradient_and_adam():
    plan = make_plan(from_dict(MINIMAL, ["population.size=3", "population.rounds=2"]))
    assert plan.adapter_parameters == 58_368
    assert plan.bytes_per_agent == 58_368 * 16
    assert plan.base_bytes == {"float32": 453_216 * 4, "bfloat16": 453_216 * 2}
    assert plan.checkpoint_bytes == 2 * 3 * 58_368 * 12
    last = from_dict(MINIMAL, ["record.checkpoints=last", "engine.dtype=float16"])
    assert make_plan(last).checkpoint_bytes == 8 * 58_368 * 12
    assert make_plan(last).base_bytes == {"float16": 453_216 * 2}


def test_an_unknown_architecture_is_not_guessed(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    plan = make_plan(from_dict({**MINIMAL, "model": str(tmp_path)}))
    assert plan.base.parameters is None
    assert plan.adapter_parameters is None
    assert plan.bytes_per_agent is plan.checkpoint_bytes is None
    assert plan.base.note == "the layers of architecture 'mamba' are not known here"


def test_target_modules_that_match_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"target_modules: \['qproj'\] matches no layer of tiny-"):
        make_plan(from_dict(MINIMAL, ["model.lora.target_modules=[qproj]"]))


# --- order and cost ------------------------------------------------------------------------------


def test_the_task_is_looked_at_before_the_model(tmp_path: Path):
    rows = tmp_path / "rows.csv"
    rows.write_text("question,answer\n")
    settings = {
        "model": "no/such/model",
        "env": {"kind": "dataset", "train": str(rows), "reward": "operator:eq"},
    }
    with pytest.raises((DataError, ConfigError)) as caught:
        make_plan(from_dict(settings))
    assert "model" not in str(caught.value)


def test_a_plan_loads_nothing_heavy():
    code = (
        "import sys\n"
        "from evo_grpo.settings import load\n"
        "from evo_grpo.cli.plan.plan import make_plan\n"
        "make_plan(load('population.yaml'))\n"
        "heavy = {'torch', 'transformers', 'peft', 'pandas', 'optuna', 'datasets'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from engine_contract import prompts_of

import evo_grpo
from evo_grpo.errors import PromptTooLongError
from evo_grpo.rollout.engine import RolloutEngine, RolloutRequest, engine_class, make_engine
from evo_grpo.rollout.native.native_engine import NativeEngine
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.settings import AgentSettings
from evo_grpo.settings.engine import ENGINES, EngineConfig


def test_the_native_engine_takes_every_setting(pair):
    settings = AgentSettings(
        engine={"max_decode_rows": 5, "max_decode_prompts": 2}, algorithm={"max_model_len": 7}
    )
    engine = make_engine(pair, settings)
    assert isinstance(engine, NativeEngine)
    assert (engine.max_rows, engine.max_prompts) == (5, 2)
    request = RolloutRequest(0, "a0", prompts_of(7), 1, Sampling(), 0)
    with pytest.raises(PromptTooLongError, match="context of 7 tokens"):
        engine.rollout([request])


@pytest.mark.parametrize("name", ENGINES)
def test_a_name_in_the_table_is_an_engine(name):
    assert issubclass(engine_class(EngineConfig(rollout=name)), RolloutEngine)


DECLARATION = """
from evo_grpo.settings.engines.declaration import RolloutSettings
from evo_grpo.settings.engines.declaration import Part


class ToySettings(RolloutSettings):
    implementation = "evo_grpo.rollout.toy:ToyEngine"
"""
ENGINE = """
from evo_grpo.rollout.engine import RolloutEngine
from evo_grpo.types import Completion, CompletionGroup


class ToyEngine(RolloutEngine):
    exact = False

    def __init__(self, slots, settings):
        print("a toy for", *slots.names)

    def rollout(self, requests):
        one = Completion((1,), "7", None, True)
        return [[CompletionGroup(r.agent, p, (one,) * r.samples) for p in r.prompts]
                for r in requests]
"""
CONFIG = {
    "model": "tiny-sums",
    "env": "sums",
    "population": {"size": 1, "rounds": 1, "steps_per_round": 1},
    "algorithm": {"group_size": 2, "prompts_per_step": 2},
    "evolve": {
        "selection": "none",
        "fitness": {"prompts": 2, "test_prompts": 2, "final_samples": 1},
    },
    "record": {"optuna": False},
    "engine": {"rollout": "toy", "device": "cpu"},
}


@pytest.mark.slow
def test_a_run_samples_with_a_new_engine_of_two_files_and_a_line_in_the_table(tmp_path):
    package = tmp_path / "evo_grpo"
    shutil.copytree(Path(evo_grpo.__file__).parent, package, ignore=shutil.ignore_patterns("*.pyc"))
    (package / "settings/engines/toy.py").write_text(DECLARATION)
    (package / "rollout/toy.py").write_text(ENGINE)
    table = package / "settings/engine.py"
    lines = table.read_text().replace(
        "ENGINES: Mapping",
        "from evo_grpo.settings.engines.toy import ToySettings\nENGINES: Mapping",
    )
    entry = '"native": NativeSettings'
    assert entry in lines
    table.write_text(lines.replace(entry, f'"toy": ToySettings, {entry}'))
    (tmp_path / "population.yaml").write_text(yaml.safe_dump(CONFIG))
    done = subprocess.run(
        [sys.executable, "-m", "evo_grpo", "run", "population.yaml", "--out", "run", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "a toy for" in done.stdout

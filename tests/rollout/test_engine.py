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
from evo_grpo.rollout.native.engine import NativeEngine
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
from evo_grpo.schema.problems import Problem
from evo_grpo.settings.engines.declaration import RolloutSettings
from evo_grpo.settings.engines.declaration import Part


class ToySettings(RolloutSettings):
    implementation = "evo_grpo.rollout.toy:ToyEngine"
    ignores = {"max_decode_rows": "which samples one row at a time; leave it out"}

    def problems(self, device, lora):
        if device == "mps":
            yield Problem((), "expected no Mac, got one")

    def missing(self):
        yield "the toy lacks a wheel"

    def held_memory(self, load):
        return (Part("toy", 3_000_000, "engine.rollout"),)
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


@pytest.fixture(scope="module")
def with_toy(tmp_path_factory):
    """The command of a copy of the package with a third engine: two files, a line in the table."""
    folder = tmp_path_factory.mktemp("toy")
    package = folder / "evo_grpo"
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

    def call(*arguments, **engine):
        config = {
            "model": "tiny-sums",
            "env": "sums",
            "population": {"size": 1, "rounds": 1, "steps_per_round": 1},
            "algorithm": {"group_size": 2, "prompts_per_step": 2},
            "evolve": {
                "selection": "none",
                "fitness": {"prompts": 2, "test_prompts": 2, "final_samples": 1},
            },
            "record": {"optuna": False},
            "engine": {"rollout": "toy", "device": "cpu", **engine},
        }
        file = folder / "population.yaml"
        file.write_text(yaml.safe_dump(config))
        return subprocess.run(
            [sys.executable, "-m", "evo_grpo", arguments[0], str(file), *arguments[1:]],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )

    return call


@pytest.mark.slow
def test_check_reads_the_declaration_of_a_new_engine(with_toy):
    shown = " ".join(with_toy("check", max_decode_rows=3).stdout.split())
    for text in (
        "toy 3.0 MB",
        "warning: the toy lacks a wheel",
        "max_decode_rows has no effect with engine.rollout toy, which samples one row at a time",
    ):
        assert text in shown
    refused = with_toy("check", device="mps")
    assert "engine.toy: expected no Mac, got one" in refused.stderr
    zero = with_toy("check", zero=2)
    assert "engine.rollout: expected native with zero 2, got the string 'toy'" in zero.stderr


@pytest.mark.slow
def test_a_run_samples_with_a_new_engine(with_toy):
    done = with_toy("run", "--out", "run", "--json")
    assert done.returncode == 0, done.stderr
    assert "a toy for" in done.stdout

"""Agents that take turns on DeepSpeed's engine, in processes of their own.

`make test-deepspeed` installs DeepSpeed and fails where a test would be skipped.
"""

import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from rank_runs import POPULATION, alone, evo, slow_reward, wait_for, written
from ranks import finish, free_port, start
from safetensors.torch import load_file
from small_run import SETTINGS

from evo_grpo.record.leaderboard import leaderboard

HELPERS = Path(__file__).parents[1] / "helpers"
#: Without shards, which ranks that train together have none of.
ENGINE = {name: value for name, value in POPULATION["engine"].items() if name != "shards"}
TWO_ROUNDS = {"population": {**POPULATION["population"], "rounds": 2, "sizes": [5, 4]}}
#: No mutation, so that one hair's breadth cannot lead to another.
STILL = {
    "evolve": {**SETTINGS["evolve"], "hyperparameters": {}},
    "algorithm": {**POPULATION["algorithm"], "lr": 1e-4},
}

if find_spec("deepspeed") is None and os.environ.get("EVO_GRPO_DEEPSPEED"):
    raise RuntimeError("expected DeepSpeed to be installed: pip install 'evo-grpo[deepspeed]'")
pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(
        find_spec("deepspeed") is None,
        reason="needs DeepSpeed: pip install 'evo-grpo[deepspeed]'",
    ),
]


@pytest.mark.parametrize(
    ("stage", "ranks", "tolerance"), [(2, 1, 1e-6), (2, 2, 1e-5), (3, 2, 1e-5)]
)
def test_agents_on_the_engine_train_like_those_with_adamw(tmp_path, stage, ranks, tolerance):
    """The cases of tests/helpers/zero_cases.py, from steps to birth and death."""
    processes = start(ranks, HELPERS / "zero_cases.py", stage, tmp_path, tolerance)
    for out, said, code in finish(processes, seconds=170):
        assert code == 0, out + said
        found = dict(re.findall(r"^(\w+): (\S+)$", out, re.MULTILINE))
        names = ("steps", "failure", "clone", "sampling", "saving", "resizing", "birth_and_death")
        assert tuple(found) == names
        assert all(float(apart) <= tolerance for apart in found.values())
        assert "DeepSpeed" not in out, "it talks on standard output"


def apart(first, second, name="adapter_model.safetensors"):
    """The largest difference of two runs' tensors."""
    files = sorted(p.relative_to(first) for p in first.rglob(name))
    assert files == sorted(p.relative_to(second) for p in second.rglob(name))
    assert files
    return max(
        float((value - load_file(second / file)[key]).abs().max())
        for file in files
        for key, value in load_file(first / file).items()
    )


def nproc(ranks, *arguments):
    done = subprocess.run(
        [sys.executable, *map(str, evo(*arguments, "--nproc", ranks))],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=170,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def test_a_run_of_two_ranks_is_that_of_adamw_and_goes_on_without_deepspeed(tmp_path):
    file = written(tmp_path, engine={**ENGINE, "base": "sharded"}, **TWO_ROUNDS, **STILL)
    alone("run", file, "--out", tmp_path / "own")
    file = written(tmp_path, engine={**ENGINE, "zero": 2}, **TWO_ROUNDS, **STILL)
    nproc(2, "run", file, "--out", tmp_path / "zero")
    assert apart(tmp_path / "own", tmp_path / "zero") <= 1e-5
    assert apart(tmp_path / "own", tmp_path / "zero", "optimizer.safetensors") <= 1e-5
    told = [leaderboard(tmp_path / name)[["agent", "fitness"]] for name in ("own", "zero")]
    assert told[0].equals(told[1])
    # Two ranks have saved, and one loads, which may be one without DeepSpeed.
    config = (tmp_path / "zero" / "population.yaml").read_text()
    assert "zero: 2" in config
    (tmp_path / "zero" / "population.yaml").write_text(config.replace("zero: 2", "zero: null"))
    without = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    (tmp_path / "deepspeed.py").write_text("raise ImportError('not on this machine')\n")
    (went_on,) = finish(start(1, *evo("resume", tmp_path / "zero", "--rounds", 3), env=without))
    assert went_on[2] == 0, went_on[1]
    alone("resume", tmp_path / "own", "--rounds", 3)
    assert apart(tmp_path / "own", tmp_path / "zero") <= 1e-5


def test_a_rank_that_is_killed_ends_all_and_one_goes_on(tmp_path):
    reward = slow_reward(tmp_path)
    file = written(tmp_path, engine={**ENGINE, "zero": 2}, **reward)
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    processes = start(2, *evo("run", file, "--out", tmp_path / "run"), env=env)
    wait_for(tmp_path / "run" / "rounds.jsonl", 1, processes)
    processes[1].send_signal(signal.SIGKILL)
    (_, said, code), _ = finish(processes, seconds=60)
    assert code == 1
    assert "rank 1 of 2 has ended" in " ".join(said.split())
    assert f"evo-grpo resume {tmp_path / 'run'}" in said
    assert "Traceback" not in said
    (done,) = finish(start(1, *evo("resume", tmp_path / "run"), env=env))
    assert done[2] == 0, done[1]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 4


def test_an_accelerator_trains_the_agents_of_a_script(tmp_path):
    """As AgileRL's pages have it, started by torchrun."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         "--master-port", str(free_port()), str(HELPERS / "zero_script.py"), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=170,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as it should be") == 2


def test_a_missing_deepspeed_is_named_with_its_remedy(tmp_path):
    (tmp_path / "deepspeed.py").write_text("raise ImportError('none here')\n")
    file = written(tmp_path, engine={**ENGINE, "zero": 2})
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    ((_, said, code),) = finish(start(1, *evo("run", file, "--out", tmp_path / "run"), env=env))
    assert code == 2
    assert "engine.zero: DeepSpeed is not installed; install it with: pip install" in said
    assert not (tmp_path / "run").exists()

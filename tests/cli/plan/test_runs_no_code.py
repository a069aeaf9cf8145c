"""`check` runs nobody's code, and no config reaches into the standard library."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import small

from evo_grpo import resume, run
from evo_grpo.cli.plan.plan import make_plan
from evo_grpo.errors import ConfigError
from evo_grpo.settings import from_dict, to_yaml

ROOT = Path(__file__).resolve().parents[3]
CODE = '''
from pathlib import Path

Path("ran").write_text("ran")

def reward(completion, answer):
    Path("ran").write_text("ran")
    return 1.0

class Game:
    """Guess."""

    def __init__(self, high=9):
        Path("ran").write_text("ran")

    def reset(self, seed=None):
        return "?", {}

    def step(self, action):
        return "", 1.0, True, False, {}

class Tools:
    def reset(self, **row):
        return "?"

    def get_reward(self):
        return 1.0

class Strategy:
    def __init__(self, share=0.5):
        Path("ran").write_text("ran")

    def plan(self, histories, places, rng):
        return []

    def explore(self, candidate, hp_config, rng):
        return candidate.hparams
'''
ROWS = "\n".join(json.dumps({"question": f"{n}?", "answer": str(n)}) for n in range(20))
NAMED = {
    "reward": {"env": {"kind": "dataset", "train": "rows.jsonl", "reward": "planted:reward"}},
    "reward of a built-in task": {"env": {"kind": "sums", "reward": ["planted:reward"]}},
    "in a package": {"env": {"kind": "sums", "reward": "pack.inner:reward"}},
    "python": {"env": {"kind": "python:planted:Game", "args": {"high": 3}}},
    "trl": {"env": {"kind": "trl:planted:Tools", "train": "rows.jsonl"}},
    "selection": {"evolve": {"selection": "planted:Strategy"}},
    "exploration": {"evolve": {"exploration": {"kind": "planted:Strategy", "args": {"share": 1}}}},
}


@pytest.fixture(autouse=True)
def folder(tmp_path):
    (tmp_path / "planted.py").write_text(CODE)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text(CODE)
    (tmp_path / "pack" / "inner.py").write_text("from ..planted import *\nfrom . import reward")
    (tmp_path / "rows.jsonl").write_text(ROWS)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in ("planted", "pack")]:
        del sys.modules[name]


def config(**changes):
    return from_dict({"model": "tiny-sums", "env": "sums", **changes})


@pytest.mark.parametrize("named", NAMED)
def test_a_plan_imports_nothing_that_a_config_names(folder, named):
    before, path = set(sys.modules), list(sys.path)
    make_plan(config(**NAMED[named]))
    assert not (folder / "ran").exists()
    assert not {name.split(".")[0] for name in set(sys.modules) - before} & {"planted", "pack"}
    assert sys.path == path


def test_the_command_finds_modules_beside_the_file_and_runs_none(folder):
    (folder / "population.yaml").write_text(
        "model: tiny-sums\nenv: {kind: dataset, train: rows.jsonl, reward: 'planted:reward'}\n"
        "evolve: {selection: 'planted:Strategy'}\n"
    )
    program = "import sys; from evo_grpo.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "check", "population.yaml"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT)}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "population.yaml is valid" in done.stdout
    assert not (folder / "ran").exists()


def test_rows_are_counted_and_columns_compared_all_the_same():
    plan = make_plan(config(**NAMED["reward"]))
    assert plan.rows == {"train": 16, "validation": 2, "test": 2}
    rows = "\n".join(json.dumps({"question": f"{n}?"}) for n in range(20))
    Path("rows.jsonl").write_text(rows)
    with pytest.raises(Exception, match=r"answer.*the reward function 'reward'"):
        make_plan(config(**NAMED["reward"]))


COMMAND = {"kind": "python:os:system", "args": {"command": "touch ran"}}
STANDARD = {
    "python": {"env": COMMAND},
    "a module in a package": {"env": {"kind": "python:concurrent.futures:ThreadPoolExecutor"}},
    "trl": {"env": {"kind": "trl:subprocess:Popen", "args": {"args": "touch ran"}}},
    "verifiers": {"env": "verifiers:os"},
    "reward": {"env": {"kind": "sums", "reward": "os:system"}},
    "second reward": {"env": {"kind": "sums", "reward": ["planted:reward", "subprocess:run"]}},
    "selection": {"evolve": {"selection": {"kind": "os:system", "args": {"command": "touch ran"}}}},
    "exploration": {"evolve": {"exploration": "code:interact"}},
    "by way of another module": {"env": {**COMMAND, "kind": "python:relay:os.system"}},
    "by way of a name of it": {"env": {**COMMAND, "kind": "python:relay:system"}},
    "by way of two": {"env": {**COMMAND, "kind": "python:again:relayed"}},
}


@pytest.fixture
def relays(folder):
    (folder / "relay.py").write_text("import os\nfrom os import system\n")
    (folder / "again.py").write_text("from relay import system as relayed\n")
    yield
    for name in ("relay", "again"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("relays")
@pytest.mark.parametrize("named", STANDARD)
def test_check_run_and_resume_refuse_the_standard_library(folder, named):
    given = STANDARD[named]
    expected = r"a module of Python's standard library, which may run any command; write a function"
    with pytest.raises(ConfigError, match=expected):
        make_plan(config(**given))
    with pytest.raises(ConfigError, match=expected):
        run(config(**given), out="run")
    assert not (folder / "run").exists()
    # A folder that was shared: somebody wrote another config into it.
    stopped = folder / "stopped"
    stopped.mkdir()
    (stopped / "rounds.jsonl").write_text("")
    (stopped / "population.yaml").write_text(to_yaml(config(**given)))
    with pytest.raises(ConfigError, match=expected):
        resume(stopped)
    assert not (folder / "ran").exists()


def test_a_file_with_the_name_of_a_standard_module_is_to_be_renamed(folder):
    (folder / "code.py").write_text(CODE)
    with pytest.raises(ConfigError, match=r"one of 'code', .*; rename code.py of this folder"):
        make_plan(config(env={"kind": "sums", "reward": "code:reward"}))


@pytest.mark.filterwarnings("ignore:round 1 had nothing to learn from")
def test_a_run_imports_what_its_config_names(folder):
    run(small(env={"kind": "sums", "reward": "planted:reward"}), out="run")
    assert (folder / "ran").exists()

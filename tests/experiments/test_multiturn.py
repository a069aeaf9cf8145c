"""experiments/multiturn: its game, its settings, and one seed of its one command."""

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from evo_grpo import resume, run
from evo_grpo import settings as configuration
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.observer import Observer

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "multiturn"
QUICK = [
    "population.size=2",
    "population.rounds=2",
    "population.steps_per_round=1",
    "algorithm.prompts_per_step=2",
    "algorithm.group_size=4",
    "evolve.fitness.prompts=4",
    "evolve.fitness.test_prompts=4",
]


@pytest.fixture
def game():
    spec = spec_from_file_location("game", FOLDER / "game.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MiddleDigit()


def test_the_game_asks_for_a_sum_and_then_for_its_middle_digit(game):
    question, _ = game.reset(seed=3)
    assert game.reset(seed=3)[0] == question
    total = f"{sum(int(part) for part in question[:-1].split('+')):03d}"
    assert game.step(total)[:4] == ("?", 1.0, False, False)
    assert game.step(total[1])[1:4] == (1.0, True, False)
    game.reset(seed=3)
    assert game.step("no")[1:4] == (0.0, True, False)


def test_its_settings_run_and_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "game", raising=False)
    config = configuration.load(FOLDER / "population.yaml", QUICK)
    whole = read_rounds(run(config, out=tmp_path / "whole"))
    assert len(whole) == 2
    metrics = whole[0].agents[0].metrics
    assert 1.0 <= metrics["turns"] <= 2.0
    assert metrics["dropped"] == 0.0

    class Stop(Exception):
        """Stands for Ctrl-C after the first round."""

    class Stopping(Observer):
        def stage(self, round, name, done, total):
            if round == 1:
                raise Stop

    with pytest.raises(Stop):
        run(config, out=tmp_path / "stopped", observer=Stopping())
    again = read_rounds(resume(tmp_path / "stopped"))
    for record, other in zip(whole, again, strict=True):
        for agent, resumed in zip(record.agents, other.agents, strict=True):
            assert agent.score == resumed.score
            assert agent.adapter_sha256 == resumed.adapter_sha256


@pytest.mark.slow
def test_the_command_prints_a_row_per_round(tmp_path):
    small = ["population.rounds=2", "population.steps_per_round=1", "evolve.fitness.prompts=4"]
    sets = [word for one in small for word in ("--set", one)]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), "--seeds", "10", "--out", str(tmp_path), *sets],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| 10 ")]
    assert [int(row[2]) for row in rows] == [1, 2]
    assert all(0 <= float(row[3]) <= float(row[4]) for row in rows)

"""The command that steers: a run in a process of its own, and what a person is told."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import evo, refused
from forked import Forked
from small_run import SETTINGS

from evo_grpo.record.folder import read_rounds

REWARD = """
import time

def score(completions, answer, **_):
    time.sleep(0.1)
    return [float(str(a) in c) for c, a in zip(completions, answer, strict=True)]
"""


@pytest.fixture(autouse=True)
def _a_slow_run():
    Path("my_reward.py").write_text(REWARD)
    slow = {**SETTINGS["env"], "reward": "my_reward:score"}
    population = {**SETTINGS["population"], "rounds": 4, "steps_per_round": 3}
    text = json.dumps({**SETTINGS, "env": slow, "population": population})
    Path("population.yaml").write_text(text)


def started(*arguments: str) -> Forked:
    path = f"{os.getcwd()}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return Forked(("-m", "evo_grpo", *arguments), env=environment)


def ended(process: Forked, code: int = 0) -> str:
    out, said = process.communicate(timeout=120)
    assert process.returncode == code, out + said
    assert "Traceback" not in said
    return out + said


def told(*arguments: str) -> str:
    return evo(*arguments, expected=0).stdout


def wait(true, process: Forked | None = None):
    until = time.monotonic() + 100
    while not true():
        assert time.monotonic() < until
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)


def rounds_of(folder: str) -> int:
    file = Path(folder, "rounds.jsonl")
    return file.read_text().count("\n") if file.exists() else 0


@pytest.mark.slow
def test_a_run_is_paused_looked_at_and_ended():
    # Enough rounds that one is left to stop after, however slow the machine.
    more = ("--set", "population.rounds=20")
    process = started("run", "population.yaml", "--out", "run", *more)
    wait(lambda: rounds_of("run") >= 1, process)
    said = told("steer", "run", "pause")
    assert re.search(r"carried out after round \d+, or a round later", said)
    assert "is paused or will be after this round" in refused("steer", "run", "pause")
    wait(lambda: "paused after round" in told("steer", "run"), process)
    played = len(read_rounds(Path("run")))
    time.sleep(1.5)
    assert len(read_rounds(Path("run"))) == played
    assert "carried out now, since the run is paused" in told("steer", "run", "set", "0", "lr=2e-3")
    wait(lambda: "set 0 lr=0.002: done" in told("steer", "run"), process)
    assert f"round {played + 1} begins" in told("steer", "run", "continue")
    told("steer", "run", "stop-after-round")
    said = ended(process)
    assert (
        said.count(f"paused after round {played}; continue with: evo-grpo steer run continue") == 1
    )
    last = len(read_rounds(Path("run")))  # a slow machine may play one more before it is asked
    assert last > played
    assert f"the process ends after round {last}, as asked for" in said
    assert f"stopped after round {last}; continue with: evo-grpo resume run" in said
    assert "no process trains it" in told("steer", "run")
    assert "set by hand" in told("lineage", "run")
    assert not Path("run/summary.json").exists()


@pytest.mark.slow
def test_a_paused_run_is_interrupted_at_once():
    process = started("run", "population.yaml", "--out", "run")
    wait(lambda: Path("run/inputs.json").exists(), process)
    told("steer", "run", "pause")
    wait(lambda: "paused after round" in told("steer", "run"), process)
    played = len(read_rounds(Path("run")))
    process.send_signal(signal.SIGINT)
    assert f"stopped after round {played}; continue with: evo-grpo resume run" in ended(
        process, 130
    )


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ("stop", "steer: expected stop-agent, clone, set, pause"),
        ("stop-agent", "steer: expected stop-agent AGENT, with agents by number, got 'stop-agent'"),
        ("stop-agent 1 2", "expected stop-agent AGENT"),
        ("clone 1", "expected clone FROM TO"),
        ("pause 1", "expected pause, with agents by number, got 'pause 1'"),
        ("stop-agent one", "with agents by number, got 'stop-agent one'"),
        ("set 1", "expected set AGENT NAME=VALUE"),
        ("set 1 lr", "expected set AGENT NAME=VALUE"),
        ("set 1 lr=", "got 'set 1 lr='"),
        ("set 1 lr={", "expected YAML"),
        ("set 1 lr=5", "lr: expected a value inside of its range [0.0001, 0.01], got 5"),
        ("set 9 lr=1e-3", "agent 9: expected one that trains in round"),
    ],
)
def test_bad_requests(request_: str, said: str):
    run_of_nothing()
    message = refused("steer", "run", *request_.split())
    assert said in message
    assert len(message.splitlines()) == 1
    assert not Path("run/steering").exists()


def run_of_nothing() -> None:
    """A run that was stopped in its first round."""
    from evo_grpo import settings as configuration
    from evo_grpo.record.run_dir import RunDir

    config = configuration.load("population.yaml")
    RunDir.create("run", config.name, configuration.to_yaml(config)).close()


def test_what_nobody_hears_is_kept_and_can_be_withdrawn():
    run_of_nothing()
    assert "no requests" in told("steer", "run")
    said = told("steer", "run", "set", "0", "lr=2e-3", "clip_coef=[0.8, 1.25]")
    assert said == (
        "run: set 0 lr=0.002 clip_coef=[0.8, 1.25]: no process trains this run; it is "
        "saved and carried out after its first round, with: evo-grpo resume run\n"
    )
    shown = told("steer", "run")
    assert "run: no process trains it; 0 of 4 rounds are played" in shown
    assert re.search(r"waiting: set 0 lr=0\.002 .*, requested \d+ s ago", shown)
    assert told("steer", "run", "cancel") == "run: 1 withdrawn\n"
    assert told("steer", "run", "cancel") == "run: nothing was waiting\n"


def test_the_command_loads_nothing_slow():
    run_of_nothing()
    code = (
        "import sys; from evo_grpo.cli.commands import app;"
        "app(['steer', 'run', 'stop-agent', '0'], standalone_mode=False);"
        "print([n for n in ('torch', 'optuna', 'pandas') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"

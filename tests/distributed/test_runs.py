"""A run divided among processes is the run in one; a process that ends loses nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rank_runs import (
    DYNAMIC,
    POPULATION,
    alone,
    children,
    equal,
    evo,
    sent,
    slow_reward,
    together,
    wait_for,
    written,
)
from ranks import finish, start
from small_run import SETTINGS

pytestmark = pytest.mark.distributed

#: `test_ranks_without_a_common_disk_equal_one` plays the run as it is.
CASES = {
    "archive, racing, a mean and dynamic sampling": {
        "seed": 7,
        "algorithm": DYNAMIC,
        "evolve": {
            **SETTINGS["evolve"],
            "archive": True,
            "dead_steps": 4,
            "significance": 0.4,
            "fitness": {**SETTINGS["evolve"]["fitness"], "final_samples": 1, "racing": 1.0},
        },
        "record": {"checkpoints": "last"},
    },
    # With adapters of every layer the stacks are so large that rounding depends on their number.
    "every layer": {
        "model": {"name": "tiny-sums"},
        "population": {"size": 8, "rounds": 2, "steps_per_round": 2, "sizes": [8, 5]},
        "engine": {"device": "cpu", "threads": 1, "shards": 2},
    },
    "ranks and layers of adapters": {
        "model": {
            "name": "tiny-sums",
            "lora": {"r": 2, "target_sets": {"attention": ["q_proj", "v_proj"], "up": ["up_proj"]}},
        },
        "evolve": {
            **SETTINGS["evolve"],
            "hyperparameters": {
                "lora.r": {"min": 1, "max": 12},
                "lora.target_modules": {"choices": ["attention", "up"]},
            },
            "exploration": {"kind": "mutate", "no_mutation": 0},
            "archive": True,
            "fitness": {**SETTINGS["evolve"]["fitness"], "final_samples": 1},
        },
    },
    "two goals": {
        "seed": 2,
        "algorithm": {**POPULATION["algorithm"], "lr": 0.01},
        "model": {**SETTINGS["model"], "name": "tiny-foods"},
        "env": {"kind": "foods"},
        "evolve": {
            **SETTINGS["evolve"],
            "selection": "pareto",
            "significance": 0.4,
            "archive": True,
            "fitness": {
                **SETTINGS["evolve"]["fitness"],
                "objectives": ["contains", {"name": "tokens", "direction": "minimize"}],
            },
        },
        "record": {"checkpoints": "last"},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_to_the_bit(tmp_path, case):
    file = written(tmp_path, **CASES[case])
    alone("run", file, "--out", tmp_path / "one")
    together(2, "run", file, "--out", tmp_path / "two")
    equal(tmp_path / "one", tmp_path / "two")
    assert any(sent(tmp_path / "one")), "no child's parent lived elsewhere"


def test_parts_that_take_turns_and_become_empty_are_equal_on_one_two_and_three_ranks(tmp_path):
    engine = {**POPULATION["engine"], "shards": 5, "overlap": True}
    file = written(tmp_path, engine=engine)
    alone("run", file, "--out", tmp_path / "one")
    for ranks in (2, 3):
        together(ranks, "run", file, "--out", tmp_path / f"{ranks}")
        equal(tmp_path / "one", tmp_path / f"{ranks}")


def test_ranks_without_a_common_disk_equal_one(tmp_path):
    file = written(tmp_path)
    alone("run", file, "--out", tmp_path / "one")
    # A relative path names another folder in each of them, as it would on two machines.
    places = [tmp_path / "here", tmp_path / "there"]
    for place in places:
        place.mkdir()
    together(2, "run", file, "--out", "run", places=places)
    assert not (places[1] / "run").exists()
    equal(tmp_path / "one", places[0] / "run")


def test_a_rank_that_is_killed_ends_all_and_the_run_resumes_to_the_same_end(tmp_path):
    file = written(tmp_path, **slow_reward(tmp_path))
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    together(2, "run", file, "--out", tmp_path / "whole", env=env)
    for killed in (0, 1):
        folder = tmp_path / f"run-{killed}"
        processes = start(2, *evo("run", file, "--out", folder), env=env)
        wait_for(folder / "rounds.jsonl", 2, processes)
        processes[killed].send_signal(signal.SIGKILL)
        ended = finish(processes, seconds=60)
        assert ended[killed][2] == -signal.SIGKILL
        _, said, code = ended[1 - killed]
        assert code == 1
        assert f"rank {killed} of 2 has ended" in said
        if killed:  # the first rank says how to go on
            assert f"evo-grpo resume {folder}" in said
        assert "Traceback" not in said
        # One process takes up what two had begun.
        done = finish(start(1, *evo("resume", folder), env=env))[0]
        assert done[2] == 0, done[1]
        equal(tmp_path / "whole", folder)


def test_a_failure_of_one_rank_is_told_by_the_first_and_ends_all(tmp_path):
    file = written(tmp_path, **slow_reward(tmp_path, rank_that_fails=1))
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    first, second = finish(start(2, *evo("run", file, "--out", tmp_path / "run"), env=env))
    assert (first[2], second[2]) == (1, 2)  # that of a reward
    assert "rank 1 of 2 failed: RewardError" in first[1]
    assert "no luck" in first[1]
    assert "Traceback" not in first[1] + second[1]


@pytest.mark.parametrize(("shards", "most"), [(2, 2), (5, 3)])
def test_ranks_without_agents_are_refused_before_a_folder_is_made(tmp_path, shards, most):
    file = written(tmp_path, engine={**POPULATION["engine"], "shards": shards})
    ranks = most + 1
    first, *others = finish(start(ranks, *evo("run", file, "--out", tmp_path / "run")))
    assert first[2] == 2
    assert (
        f"expected at most {most} processes, one for each of engine.shards and for each agent of "
        f"the smallest round, got {ranks}"
    ) in first[1]
    assert all(code == 2 for _, _, code in others)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_nproc_starts_the_ranks_and_passes_a_stop_on(tmp_path, number, expected):
    file = written(tmp_path, **slow_reward(tmp_path))
    env = {**os.environ, "OMP_NUM_THREADS": "1",
           "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}  # fmt: skip
    command = [sys.executable, *map(str, evo("run", file, "--out", tmp_path / "run", "--nproc", 2))]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(tmp_path / "run" / "rounds.jsonl", 1, [process])
    process.send_signal(number)
    out, said = process.communicate(timeout=60)
    assert process.returncode == expected, out + said
    assert f"continue with: evo-grpo resume {tmp_path / 'run'}" in said
    assert "Traceback" not in said
    config = (tmp_path / "run" / "population.yaml").read_text()
    assert "shards: 2" in config
    if number == signal.SIGINT:
        return  # it goes on as after the other one
    again = subprocess.run(
        [sys.executable, *map(str, evo("resume", tmp_path / "run", "--nproc", 2))],
        env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert Path(tmp_path / "run" / "summary.json").is_file()


def test_nproc_names_the_rank_that_died_and_stops_the_others_gently(tmp_path):
    file = written(tmp_path, **slow_reward(tmp_path))
    long = (
        (tmp_path / "my_reward.py")
        .read_text()
        .replace(
            "time.sleep(0.15)",
            "time.sleep(60 if os.environ['RANK'] == '0' and os.path.exists('stuck') else 0)",
        )
    )
    (tmp_path / "my_reward.py").write_text(long)
    (tmp_path / "stuck").touch()
    env = {**os.environ, "OMP_NUM_THREADS": "1",
           "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, *map(str, evo("run", file, "--out", "run", "--nproc", 2))],
        cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while not (tmp_path / "run" / "inputs.json").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(1)
    os.kill(children(process)[1], signal.SIGKILL)
    out, said = process.communicate(timeout=60)
    assert process.returncode == 143, out + said
    assert "rank 1 of 2 was ended by SIGKILL" in said
    assert "continue with: evo-grpo resume run" in said

"""A rank that is slow is waited for; one that is gone, stopped or elsewhere is named by all."""

import os
import signal
import time

import pytest
from forked import Forked
from rank_runs import POPULATION, equal, evo, slow_reward, together, wait_for, written
from ranks import finish, fresh, start

pytestmark = pytest.mark.distributed

LIMIT = 8
THREE = {
    "population": {**POPULATION["population"], "sizes": [5, 4, 3]},
    "engine": {**POPULATION["engine"], "shards": 3},
}


def begun(tmp_path, ranks, begin=Forked, **changes):
    """Start a run whose reward takes its time; returns its processes, one round later."""
    env = {
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        "EVO_GRPO_RANK_TIMEOUT": str(LIMIT),
    }
    file = written(tmp_path, **slow_reward(tmp_path), **changes)
    processes = start(ranks, *evo("run", file, "--out", tmp_path / "run"), env=env, begin=begin)
    wait_for(tmp_path / "run" / "rounds.jsonl", 1, processes)
    return processes


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_stopped_is_named_by_every_other_one(tmp_path, lost):
    processes = begun(tmp_path, 3, **THREE)
    processes[lost].send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    others = [process for rank, process in enumerate(processes) if rank != lost]
    try:
        ended = [process.communicate(timeout=60)[1] for process in others]
        assert time.monotonic() - stopped > LIMIT / 2
    finally:
        processes[lost].kill()
        finish(processes)
    for process, said in zip(others, ended, strict=True):
        assert process.returncode == 1, said
        assert f"rank {lost} of 3 has given no sign of life for" in " ".join(said.split())
        assert "Traceback" not in said


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_killed_is_named_by_every_other_one(tmp_path, lost):
    # Fresh, because torch reads how much its C++ code may log when it is loaded. Rank 0 has the
    # store: every other rank loses a connection to it.
    processes = begun(tmp_path, 3, begin=fresh, **THREE)
    processes[lost].kill()
    ended = finish(processes, seconds=60)
    for rank in {0, 1, 2} - {lost}:
        _, said, code = ended[rank]
        assert code == 1, said
        assert f"rank {rank} of 3 ends, since rank {lost} of 3 has ended;" in " ".join(said.split())
        assert "Exception raised from" not in said
        assert "Traceback" not in said


def test_a_rank_that_is_slow_is_waited_for_and_changes_nothing(tmp_path):
    reward = slow_reward(tmp_path)
    code = (tmp_path / "my_reward.py").read_text()
    slow = "time.sleep(9 if os.environ.get('RANK') == '1' and not done else 0); done.append(1)"
    (tmp_path / "my_reward.py").write_text("done = []\n" + code.replace("time.sleep(0.15)", slow))
    file = written(tmp_path, **reward, population={**POPULATION["population"], "rounds": 2})
    env = {
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        "EVO_GRPO_RANK_TIMEOUT": "4",
    }
    together(2, "run", file, "--out", tmp_path / "uneven", env=env)
    together(1, "run", file, "--out", tmp_path / "even", env=env)
    equal(tmp_path / "even", tmp_path / "uneven")


def test_a_rank_that_comes_late_to_a_second_run_is_waited_for():
    program = (
        "import os, time\nfrom evo_grpo.population.ranks.ranks import find_team\n"
        "assert find_team().gather(1) == [1, 1]\n"
        "if os.environ['RANK'] == '0':\n    time.sleep(9)\n"
        "assert find_team().gather(2) == [2, 2]\n"
    )
    env = {"EVO_GRPO_RANK_TIMEOUT": "4"}
    for _, said, code in finish(start(2, "-c", program, env=env), seconds=60):
        assert code == 0, said


def test_a_limit_that_is_no_number_is_refused(tmp_path):
    env = {"EVO_GRPO_RANK_TIMEOUT": "soon"}
    command = evo("run", written(tmp_path), "--out", tmp_path / "run")
    for _, said, code in finish(start(2, *command, env=env), seconds=60):
        assert code == 2
        assert "EVO_GRPO_RANK_TIMEOUT: expected seconds, a positive number, got 'soon'" in said
        assert "Traceback" not in said


def test_an_error_between_exchanges_reaches_all_ranks():
    program = (
        "import os\nfrom evo_grpo.population.ranks.ranks import find_team\n"
        "team = find_team()\n"
        "with team.sharing_errors():\n"
        "    if os.environ['RANK'] == '1':\n        raise ValueError('no luck')\n"
        "    team.agree(0, sum)\n"
    )
    first, second = finish(start(2, "-c", program), seconds=60)
    assert (first[2], second[2]) == (1, 1)
    assert "OtherRankError: rank 1 of 2 failed: ValueError: no luck" in first[1]
    assert "ValueError: no luck" in second[1]
    assert "OtherRankError" not in second[1]


def test_an_error_of_the_decision_reaches_all_ranks():
    program = (
        "from evo_grpo.population.ranks.ranks import find_team\n"
        "team = find_team()\n"
        "with team.sharing_errors():\n"
        "    print(team.agree(team.rank, lambda parts: sum(parts) + 10))\n"
        "    team.agree(0, lambda parts: 1 / sum(parts))\n"
    )
    first, second = finish(start(2, "-c", program), seconds=60)
    assert [out.strip() for out, _, _ in (first, second)] == ["11", "11"]
    assert "ZeroDivisionError" in first[1]
    assert "OtherRankError: rank 0 of 2 failed: ZeroDivisionError" in second[1]


def test_a_rank_that_never_starts_ends_the_others_within_the_patience(tmp_path):
    env = {"EVO_GRPO_RANK_START_MINUTES": "0.1"}
    command = evo("run", written(tmp_path), "--out", tmp_path / "run")
    (first, *others) = start(2, *command, env=env)
    for process in others:
        process.kill()
        process.communicate()
    _, said = first.communicate(timeout=60)
    said = " ".join(said.split())
    assert first.returncode == 2, said
    assert "ranks: expected 2 processes that reach each other at MASTER_ADDR=127.0.0.1" in said
    assert "within 0.1 minutes" in said
    assert "EVO_GRPO_RANK_START_MINUTES" in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()

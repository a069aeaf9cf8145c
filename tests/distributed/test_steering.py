"""What is asked of a run in several processes is done as in one, also from one to another."""

import os
import time

import pytest
from rank_runs import POPULATION, evo, slow_reward, wait_for, written
from ranks import finish, start
from small_run import SETTINGS
from steered_runs import steered_outcome, tensors

from evo_grpo.record.folder import read_rounds
from evo_grpo.record.steering import ask, state_of

pytestmark = pytest.mark.distributed

#: Five agents on two shards: 0 to 2 on one, 3 and 4 on the other.
QUIET = {
    "population": {**POPULATION["population"], "sizes": "constant"},
    "evolve": {**SETTINGS["evolve"], "selection": {"kind": "none"}},
}
#: Each of them across the two shards, and a set of what was cloned.
ASKED = [
    ("clone", {"source": 0, "agent": 4}),
    ("set", {"agent": 4, "values": {"lr": 0.003, "group_size": 6}}),
    ("clone", {"source": 3, "agent": 1}),
    ("stop-agent", {"agent": 2}),
]


def wait(true, processes):
    until = time.monotonic() + 120
    while not true():
        assert time.monotonic() < until
        assert all(process.poll() is None for process in processes)
        time.sleep(0.02)


def play(tmp_path, folder, ranks, act):
    """Play a run in some processes, and do something once its first round is recorded."""
    file = written(tmp_path, **QUIET, **slow_reward(tmp_path))
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    processes = start(ranks, *evo("run", file, "--out", folder), env=env)
    wait_for(folder / "rounds.jsonl", 1, processes)
    act(processes)
    return processes, env


def steer(folder):
    def act(processes):
        for op, given in ASKED:
            ask(folder, op, **given)

    return act


def test_two_ranks_that_are_steered_equal_one_to_the_bit(tmp_path):
    for name, ranks in (("one", 1), ("two", 2)):
        processes, _ = play(tmp_path, tmp_path / name, ranks, steer(tmp_path / name))
        for out, said, code in finish(processes):
            assert code == 0, out + said
        (record,) = [r for r in read_rounds(tmp_path / name) if r.steering]
        assert record.round == 1
        assert [one.refused for one in record.steering] == [""] * 4
    assert steered_outcome(tmp_path / "one") == steered_outcome(tmp_path / "two")
    assert tensors(tmp_path / "one") == tensors(tmp_path / "two")


def test_a_pause_holds_all_ranks_and_a_stop_ends_them(tmp_path):
    folder = tmp_path / "run"

    def act(processes):
        ask(folder, "pause")
        wait(lambda: state_of(folder).paused, processes)
        played = len(read_rounds(folder))
        time.sleep(2)
        assert len(read_rounds(folder)) == played
        ask(folder, "clone", source=0, agent=4)
        ask(folder, "continue")
        ask(folder, "stop-after-round")

    processes, env = play(tmp_path, folder, 2, act)
    for out, said, code in finish(processes, seconds=60):
        assert code == 0, out + said
    assert not (folder / "summary.json").exists()
    done = finish(start(2, *evo("resume", folder), env=env))
    assert [code for _, _, code in done] == [0, 0], done
    ops = [agent.mutation.op for record in read_rounds(folder) for agent in record.agents]
    assert "steer-clone" in ops

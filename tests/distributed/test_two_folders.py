"""Ranks without a common disk, each in a folder of its own: begun, stopped, gone on with."""

import os
import signal

import pytest
from rank_runs import POPULATION, alone, equal, evo, slow_reward, together, wait_for, written
from ranks import finish, start
from small_run import SETTINGS

pytestmark = pytest.mark.distributed

#: With what only the first rank does at the end, and with an archive that is sent in a resume.
EVERYTHING = {
    "evolve": {
        **SETTINGS["evolve"],
        "archive": True,
        "fitness": {**SETTINGS["evolve"]["fitness"], "final_samples": 1},
    }
}


@pytest.fixture
def places(tmp_path):
    found = [tmp_path / "here", tmp_path / "there"]
    for place in found:
        written(place, **slow_reward_in(place), **EVERYTHING)
    return found


def slow_reward_in(place):
    place.mkdir(parents=True, exist_ok=True)
    return slow_reward(place)


def environment(place=""):
    return {"PYTHONPATH": os.pathsep.join([".", os.environ.get("PYTHONPATH", "")])}


@pytest.fixture
def whole(places, monkeypatch):
    """The same run in one process, never stopped."""
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    alone("run", "population.yaml", "--out", "whole", cwd=places[0])
    return places[0] / "whole"


def test_a_run_that_was_killed_is_resumed_to_the_bit(places, whole):
    command = evo("run", "population.yaml", "--out", "run")
    processes = start(2, *command, places=places, env=environment())
    wait_for(places[0] / "run" / "rounds.jsonl", 2, processes)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    finish(processes)
    together(2, "resume", "run", places=places, env=environment())
    assert not (places[1] / "run").exists()
    equal(whole, places[0] / "run")


def test_a_shorter_run_is_extended_from_python_to_the_bit(places, whole):
    program = (
        "import evo_grpo\n"
        "run = evo_grpo.run({config!r}, out='run', progress=True)\n"
        "again = evo_grpo.resume(run, rounds={rounds}, progress=True)\n"
        "print('folder', again)\n"
    )
    short = {**POPULATION["population"], "rounds": 2}
    for place in places:
        written(place / "short", **slow_reward(place), **EVERYTHING, population=short)
    given = program.format(
        config="short/population.yaml", rounds=POPULATION["population"]["rounds"]
    )
    ended = finish(start(2, "-c", given, places=places, env=environment()))
    for out, said, code in ended:
        assert code == 0, out + said
        assert "folder run" in out
    # The first rank shows the run; the other one does not see its folder.
    assert "leaderboard" in ended[0][0] or "Next:" in ended[0][0] or "round 4/4" in ended[0][0]
    assert "round" not in ended[1][0]
    assert not (places[1] / "run").exists()
    first, second = whole, places[0] / "run"
    names = [p.relative_to(first) for p in (first / "checkpoints").rglob("*.safetensors")]
    last = [name for name in names if "round-0003" in name.parts]
    assert last
    for name in last:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_a_run_that_is_not_there_is_told_by_the_first_rank_at_once(places):
    (_, first, one), (_, _, two) = finish(
        start(2, *evo("resume", "nowhere"), places=places, env=environment()), seconds=60
    )
    assert (one, two) == (2, 1)
    assert "nowhere" in first
    assert "Traceback" not in first

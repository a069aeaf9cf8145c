"""A run that is steered, and killed at any instant, ends as one that is steered and not killed."""

import random
import shutil

import pytest
from small_run import Told, small
from steered_runs import OPERATIONS, steered_outcome, tensors
from torture_table import shares, tried

from evo_grpo import run
from evo_grpo.analysis.verify import verify
from evo_grpo.record.folder import is_run
from evo_grpo.record.steering import ask

SETTINGS = {"record__checkpoints": "last", "evolve__archive": True}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, runs):
    """A run that is steered in its second round: its folder and touches of the disk."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    _, touches = runs.ask("run", folder, SETTINGS, steer=True)
    found = verify(folder)
    assert found.damage == found.notes == []
    return folder, touches


@pytest.fixture(scope="module")
def asked(tmp_path_factory, whole):
    """A run that was stopped after two rounds, and asked for the same while nobody trained."""
    folder = tmp_path_factory.mktemp("asked") / "run"
    with pytest.raises(KeyboardInterrupt):
        run(small(**SETTINGS), out=folder, observer=Told(("learn", 2)))
    for op, given in OPERATIONS.values():
        ask(folder, op, **given)
    return folder


def check(folder, whole):
    assert steered_outcome(folder) == steered_outcome(whole)
    assert tensors(folder) == tensors(whole)
    found = verify(folder)
    assert found.damage == found.notes == []
    shutil.rmtree(folder)


def go_on(runs, folder, at=None):
    do = "resume" if is_run(folder) else "run"
    killed, touches = runs.ask(do, folder, SETTINGS, at=at, steer=True)
    if is_run(folder):
        assert verify(folder).damage == []
    return killed, touches


def kill_at(runs, folder, whole, touch, rng):
    """Kill at a touch of the disk, kill what goes on at another, and let the third end."""
    assert go_on(runs, folder, touch)[0]
    again = go_on(runs, folder, rng.randrange(1, whole[1]))[0]
    go_on(runs, folder)
    check(folder, whole[0])
    return 1 + again


@shares(4, cases=2)
def test_a_kill_at_a_touch_of_a_steered_run_changes_nothing(runs, whole, tmp_path, part):
    rng = random.Random(3)
    touches = part(range(1, whole[1] + 1))
    kills = sum(kill_at(runs, tmp_path / "run", whole, touch, rng) for touch in touches)
    tried("kill -9 at every touch of the disk of a run that is steered", "all operations", kills)


@pytest.mark.slow
@pytest.mark.parametrize("touch", range(1, 40, 13))
def test_a_kill_while_a_resume_does_what_was_asked_for_changes_nothing(
    runs, whole, asked, tmp_path, touch
):
    shutil.copytree(asked, tmp_path / "run")
    assert go_on(runs, tmp_path / "run", touch)[0]
    go_on(runs, tmp_path / "run")
    check(tmp_path / "run", whole[0])

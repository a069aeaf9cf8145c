"""Two small runs whose best agent ever is of their last round, each test with a copy of its own."""

import shutil

import pytest
from small_run import Told, small

from evo_grpo import run
from evo_grpo.analysis.arms import compare, replay

#: With this seed every round has a better agent than all before.
CHANGES = {
    "seed": 1,
    "population__size": 2,
    "algorithm__lr": 5e-3,
    "record__checkpoints": "last",
    "evolve__archive": True,
}


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Three rounds: a run, one that was stopped after two, and one with all that can be added."""
    folder = tmp_path_factory.mktemp("verified")
    run(small(**CHANGES), out=folder / "finished")
    with pytest.raises(KeyboardInterrupt):
        run(small(**CHANGES), out=folder / "stopped", observer=Told(("learn", 2)))
    shutil.copytree(folder / "finished", folder / "added")
    compare(folder / "added")
    replay(folder / "added", repeats=1)
    return folder


@pytest.fixture
def finished(made, tmp_path):
    return shutil.copytree(made / "finished", tmp_path / "finished")


@pytest.fixture
def stopped(made, tmp_path):
    return shutil.copytree(made / "stopped", tmp_path / "stopped")


@pytest.fixture
def added(made, tmp_path):
    return shutil.copytree(made / "added", tmp_path / "added")

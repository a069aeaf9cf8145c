"""Whatever happens to a file of a stopped run: a resume gives the same result, or refuses."""

import shutil

import pytest
from damage import empty, flip, folder_instead
from small_run import Told, outcome, small
from torture_table import tried

from evo_grpo import resume, run
from evo_grpo.analysis.verify import verify
from evo_grpo.errors import EvoGrpoError


def cut_in_half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def cut_the_end(file):
    file.write_bytes(file.read_bytes()[:-1])


def delete(file):
    file.unlink()


def replace_by_another(file):
    file.write_bytes(b"{}\n")


DAMAGES = [cut_in_half, cut_the_end, empty, delete, flip, folder_instead, replace_by_another]
OF_THE_RUN = (
    *("population.yaml", "inputs.json", "rounds.jsonl", "journal.log", "leaderboard.csv"),
    *("completions/round-0000.jsonl", "completions/round-0001.jsonl"),
    *("metrics/round-0000.jsonl", "metrics/round-0001.jsonl"),
)
OF_AN_AGENT = (
    *("attributes.json", "optimizer.safetensors"),
    *("actor/adapter_model.safetensors", "actor/adapter_config.json"),
)
LAST = tuple(f"checkpoints/round-0001/agent-01/{name}" for name in OF_AN_AGENT)
EARLIER = tuple(f"checkpoints/round-0000/agent-01/{name}" for name in OF_AN_AGENT)
BEST = tuple(f"checkpoints/best/{name}" for name in OF_AN_AGENT)
LINES = ("population.yaml", "inputs.json", "rounds.jsonl")
DERIVED = ("journal.log", "leaderboard.csv")
"""Made from the rounds: `verify` does not look at them, and a resume makes them anew."""


def stopped(folder, keep):
    """Stop after two of three rounds."""
    with pytest.raises(KeyboardInterrupt):
        run(small(record__checkpoints=keep), out=folder, observer=Told(("learn", 2)))
    return folder


@pytest.fixture(scope="module", params=["all", pytest.param("last", marks=pytest.mark.torture)])
def runs(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("runs")
    whole = run(small(record__checkpoints=request.param), out=folder / "whole")
    return stopped(folder / "stopped", request.param), outcome(whole), request.param


def damaged_copy(source, target, name, damage):
    shutil.copytree(source, target)
    if not (target / name).exists():
        pytest.skip(f"a run that keeps the last checkpoints alone has no {name}")
    before = (target / name).read_bytes()
    damage(target / name)
    return not (target / name).is_file() or (target / name).read_bytes() != before


def check(runs, tmp_path, name, damage):
    folder = tmp_path / "run"
    if not damaged_copy(runs[0], folder, name, damage):
        return
    damaged, refused = seen(folder), False
    try:
        resume(folder)
    except EvoGrpoError:
        refused = True
    # A line without its end is whole.
    assert damaged != (name in DERIVED or (damage is cut_the_end and name in LINES))
    assert not (refused and name in DERIVED and damage is not folder_instead)
    if refused or "completions" in name or name in EARLIER:
        # Refused, the run is as it was: with the file put back, it goes on. What is not needed to
        # go on, such as the completions, stays as it is.
        put_back(runs[0] / name, folder / name)
    resume(folder)
    assert {**outcome(folder), "files": []} == {**runs[1], "files": []}
    what = "a file of a stopped run cut, emptied, deleted, flipped in a bit or replaced"
    tried(what, f"checkpoints: {runs[2]}", 1)


def seen(folder):
    """Whether `verify` finds that something is not as it was."""
    try:
        return bool(verify(folder).damage)
    except EvoGrpoError:
        return True


def put_back(source, target):
    if target.is_dir():
        shutil.rmtree(target)
    shutil.copyfile(source, target)


def test_an_undamaged_run_is_as_it_was_written(runs):
    found = verify(runs[0])
    assert found.damage == []
    assert found.rounds == 2
    assert found.files > 20


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        # Files of one kind are read by the same code: of most places a sample is enough.
        pytest.param(
            name,
            damage,
            marks=pytest.mark.slow
            if name in (*OF_THE_RUN, *LAST) or damage in (cut_in_half, delete, flip)
            else pytest.mark.torture,
        )
        for name in (*OF_THE_RUN, *LAST, *BEST, *EARLIER)
        for damage in DAMAGES
    ],
)
def test_a_damaged_file_is_refused_or_made_good(runs, tmp_path, name, damage):
    check(runs, tmp_path, name, damage)

"""Completions and checkpoints: what has to be there, and what a stop may leave."""

import shutil
from dataclasses import asdict

import pytest
from random_runs import make_run
from small_run import Told

from evo_grpo import resume, run
from evo_grpo import settings as configuration
from evo_grpo.after.verifying.files import _bests
from evo_grpo.after.verifying.verify import verify
from evo_grpo.record.family import best_ever
from evo_grpo.record.files import seal
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.run_dir import RunDir
from evo_grpo.training.inputs.recorded_inputs import read_inputs_of

BEST = "checkpoints/best"


@pytest.fixture
def since_all(stopped):
    """A run that kept its last round alone, and was resumed to keep all from then on."""
    file = stopped / "population.yaml"
    file.write_text(file.read_text().replace("checkpoints: last", "checkpoints: all"))
    return resume(stopped)


def test_what_an_earlier_policy_dropped_need_not_be_there(since_all):
    assert not (since_all / "checkpoints/round-0000").exists()
    found = verify(since_all)
    assert found.damage == found.notes == []


@pytest.mark.parametrize("kept", [1, 2])
def test_what_no_policy_dropped_has_to_be_there(since_all, kept):
    shutil.rmtree(since_all / f"checkpoints/round-000{kept}/agent-01")
    damage = verify(since_all).damage
    assert damage
    assert all(f"round-000{kept}/agent-01" in text and "is missing" in text for text in damage)


def test_a_policy_that_a_later_version_filled_in_dropped_nothing(since_all):
    with RunDir.open(since_all) as opened:
        inputs = read_inputs_of(since_all)
        (change,) = [one for one in inputs.changes if one["name"] == "record.checkpoints"]
        changes = [{**change, "from": None, "filled_in": True}]
        opened.write("inputs.json", seal({**asdict(inputs), "changes": changes}))
    assert any("round-0000" in text and "is missing" in text for text in verify(since_all).damage)


def test_the_bests_are_those_that_were_the_best_ever():
    for seed in range(20):
        rounds = make_run(rounds=6, seed=seed, failures=0.2)
        ever = [best_ever(rounds[:n]) for n in range(1, 7)]
        assert list(_bests(rounds)) == [
            one for number, one in enumerate(ever) if one and one not in ever[:number]
        ]


def of_the_round_before(folder, made):
    """As a kill between the line of a round and the copy of its best leaves checkpoints/best."""
    first = best_ever(read_rounds(folder)[:1])
    shutil.rmtree(folder / BEST)
    shutil.copytree(made / "early" / first.checkpoint, folder / BEST)


@pytest.fixture(scope="session")
def early(made):
    """The stopped run with the checkpoints of its first round, which it dropped."""
    config = configuration.load(made / "stopped/population.yaml")
    every = config.replace(record=config.record.replace(checkpoints="all"))
    with pytest.raises(KeyboardInterrupt):
        run(every, out=made / "early", observer=Told(("learn", 2)))
    return made


def absent(folder, made):
    shutil.rmtree(folder / BEST)


def half_way(folder, made):
    (folder / BEST).rename(folder / "checkpoints/.best-old")
    (folder / "checkpoints/.best-new").mkdir()


@pytest.mark.parametrize("state", [of_the_round_before, absent, half_way])
def test_a_best_that_a_resume_brings_up_to_the_rounds_is_noted(stopped, early, state):
    state(stopped, early)
    found = verify(stopped)
    assert found.damage == []
    assert any("is behind the best agent" in text for text in found.notes)
    resume(stopped)
    assert verify(stopped).damage == verify(stopped).notes == []


def test_what_a_stop_left_beside_a_best_that_is_current_is_noted_and_removed(stopped):
    aside = stopped / "checkpoints/.best-old"
    shutil.copytree(stopped / BEST, aside)
    found = verify(stopped)
    assert found.damage == []
    assert f"{aside}: left by a stop" in found.notes
    with RunDir.open(stopped) as opened:
        opened.keep_best()
    assert not aside.exists()
    assert verify(stopped).damage == []


@pytest.mark.parametrize("state", [of_the_round_before, absent, half_way])
def test_a_best_that_nothing_brings_back_is_damage(stopped, early, state):
    last = best_ever(read_rounds(stopped)).checkpoint
    state(stopped, early)
    (stopped / last / "attributes.json").write_text("{}")
    assert any(BEST in text for text in verify(stopped).damage)


def test_a_best_that_a_resume_leaves_as_it_is_is_damage(stopped):
    file = stopped / BEST / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    (text,) = verify(stopped).damage
    assert str(file) in text
    assert "has changed" in text


def test_the_best_of_a_finished_run_is_there(finished, early):
    of_the_round_before(finished, early)
    assert any(BEST in text for text in verify(finished).damage)


def test_what_belongs_to_no_round_is_left_by_nothing_once_the_run_has_ended(finished):
    for part in (
        "completions/round-0003.jsonl",
        "metrics/round-0003.jsonl",
        "checkpoints/round-0003",
    ):
        path = finished / part
        path.mkdir() if "checkpoints" in part else path.write_text("")
        (text,) = verify(finished).damage
        assert f"{path}: belongs to a round that is not recorded" in text
        path.rmdir() if path.is_dir() else path.unlink()
    assert verify(finished).damage == []


def test_the_round_that_was_interrupted_is_noted(stopped):
    (stopped / "completions/round-0002.jsonl").write_text("")
    (stopped / "checkpoints/round-0002").mkdir()
    (stopped / "completions/.round-0002.jsonl.tmp").write_text("")
    (stopped / "metrics/round-0002.jsonl").write_text("")
    (stopped / "metrics/.round-0002.jsonl.tmp").write_text("")
    found = verify(stopped)
    assert found.damage == []
    assert len(found.notes) == 5
    (stopped / "checkpoints/round-0003").mkdir()
    assert len(verify(stopped).damage) == 1

"""The summary of a run, and those of its earlier ends."""

import json
import shutil

import pytest

from evo_grpo import resume
from evo_grpo.after.verifying.verify import verify


@pytest.fixture(scope="session")
def extended_once(made):
    return resume(shutil.copytree(made / "finished", made / "extended"), rounds=4)


@pytest.fixture
def extended(extended_once, tmp_path):
    return shutil.copytree(extended_once, tmp_path / "run")


def change(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_an_extended_run_is_as_it_was_written(extended):
    found = verify(extended)
    assert found.damage == found.notes == []
    assert found.rounds == 4


def test_the_summary_of_an_earlier_end_is_missing(extended):
    (extended / "summary.rounds-3.json").unlink()
    (text,) = verify(extended).damage
    assert "summary.json: its earlier ends differ" in text


@pytest.mark.parametrize("values", [{"gain": 7.0}, {"gain": "much"}, {"rounds": 2}])
def test_the_summary_of_an_earlier_end_says_something_else(extended, values):
    change(extended / "summary.rounds-3.json", **values)
    damage = verify(extended).damage
    assert damage
    if values != {"gain": 7.0}:
        assert "summary.rounds-3.json" in damage[0]


def test_a_summary_of_an_earlier_end_has_the_rounds_of_its_name(extended):
    (extended / "summary.json").unlink()
    change(extended / "summary.rounds-3.json", rounds=2)
    (text,) = verify(extended).damage
    assert "is of 2 rounds, expected 3 as in its name" in text


def test_no_end_has_more_rounds_than_there_are(extended):
    (extended / "summary.rounds-3.json").rename(extended / "summary.rounds-9.json")
    change(extended / "summary.rounds-9.json", rounds=9)
    assert any("no more than the 4 in rounds.jsonl" in text for text in verify(extended).damage)


def test_the_end_of_a_run_is_its_last_round(finished):
    change(finished / "summary.json", rounds=2)
    assert any("is of 2 rounds" in text for text in verify(finished).damage)


def test_a_missing_end_is_noted(finished):
    (finished / "summary.json").unlink()
    found = verify(finished)
    assert found.damage == []
    assert found.notes == [f"{finished}: all rounds are played, but the summary is missing"]

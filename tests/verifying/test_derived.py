"""The leaderboard and Optuna's journal: behind after a stop, or damaged."""

import json

import pytest
from small_run import small

from evo_grpo.extending import with_plan
from evo_grpo.inputs import compare_inputs, record_changes
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.leaderboard import write_csv
from evo_grpo.record.run_dir import RunDir
from evo_grpo.settings import load, to_yaml
from evo_grpo.training import resume, run
from evo_grpo.verifying.verify import verify


def trials(folder):
    """The lines of the journal, and which of them are trials."""
    lines = (folder / "journal.log").read_bytes().splitlines(keepends=True)
    return lines, [number for number, line in enumerate(lines) if b"user_attrs" in line]


@pytest.mark.parametrize("left", [None, 0, 1, 2, 3])
def test_a_journal_that_a_resume_was_writing_is_noted(stopped, left):
    lines, places = trials(stopped)
    (stopped / "journal.log").unlink()
    if left is not None:
        (stopped / "journal.log").write_bytes(b"".join(lines[: places[left]]) + b'{"op_code": 4, "')
    found = verify(stopped)
    assert found.damage == []
    assert found.notes == [
        f"{stopped / 'journal.log'}: lacks {len(places) - (left or 0)} of {len(places)} trials"
    ]
    resume(stopped)
    assert verify(stopped).damage == verify(stopped).notes == []


def test_a_journal_that_lost_a_trial_in_its_middle_is_damage(stopped):
    lines, places = trials(stopped)
    del lines[places[1]]
    (stopped / "journal.log").write_bytes(b"".join(lines))
    (text,) = verify(stopped).damage
    assert "of its trials are missing or not as recorded, the first of agent" in text
    assert "delete the file" in text


def test_a_trial_that_says_something_else_is_damage(stopped):
    lines, places = trials(stopped)
    entry = json.loads(lines[places[-1]])
    entry["user_attrs"]["member"] += 1
    lines[places[-1]] = json.dumps(entry).encode() + b"\n"
    before = b"".join(lines)
    (stopped / "journal.log").write_bytes(before)
    (text,) = verify(stopped).damage
    assert "1 of its trials are missing or not as recorded, the first of agent 1 in round 2" in text
    assert (stopped / "journal.log").read_bytes() == before


@pytest.mark.parametrize("change", ["cut", "delete"])
def test_the_journal_of_a_finished_run_is_whole(finished, change):
    lines, places = trials(finished)
    (finished / "journal.log").unlink()
    if change == "cut":
        (finished / "journal.log").write_bytes(b"".join(lines[: places[-1]]))
    (text,) = verify(finished).damage
    assert "journal.log" in text


def test_a_leaderboard_of_the_round_before_is_noted_before_the_end(stopped):
    write_csv(read_rounds(stopped)[:1], stopped)
    found = verify(stopped)
    assert found.damage == []
    assert "is not the leaderboard of the recorded rounds" in found.notes[0]
    resume(stopped)
    write_csv(read_rounds(stopped)[:2], stopped)
    assert "is not the leaderboard" in verify(stopped).damage[0]


@pytest.mark.parametrize("change", [lambda text: text.replace("0.", "1.", 1), lambda text: ""])
def test_a_leaderboard_that_says_something_else_is_damage(stopped, change):
    file = stopped / "leaderboard.csv"
    file.write_text(change(file.read_text()))
    assert "is not the leaderboard" in verify(stopped).damage[0]


def test_a_leaderboard_from_before_the_last_round_got_its_plan_is_noted(tmp_path):
    """As a stop leaves it right after the records of an extension are written."""
    changes = {"population__size": 4, "population__sizes": None}
    folder = run(small(population__rounds=1, **changes), out=tmp_path / "run")
    config = load(folder / "population.yaml")
    config = config.replace(population=config.population.replace(rounds=4))
    with RunDir.open(folder) as opened:
        record_changes(opened, compare_inputs(opened, config, rounds=4))
        opened.write_config(to_yaml(config))
        planned = with_plan(config, opened.rounds())
        assert len(planned.members) < len(opened.rounds()[-1].agents)
        opened.reopen(planned)
    found = verify(folder)
    assert found.damage == []
    notes = "\n".join(found.notes)
    assert "is not the leaderboard" in notes
    assert "journal.log: lacks" in notes
    assert "was given more rounds, 4," in notes
    file = folder / "leaderboard.csv"
    file.write_text(file.read_text().replace("0.", "1.", 1))
    assert "is not the leaderboard" in verify(folder).damage[0]

"""Settings, inputs.json and rounds.jsonl: what a stop leaves of them, and what nothing mends."""

import pytest
from small_run import Told, small

from evo_grpo import resume, run
from evo_grpo import settings as configuration
from evo_grpo.after.verifying.verify import verify
from evo_grpo.errors import ConfigError
from evo_grpo.record.files import seal, unseal
from evo_grpo.record.run_dir import RunDir
from evo_grpo.training.inputs.differences import compare_inputs, record_changes


def edit(folder, before, after):
    file = folder / "population.yaml"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def extend_inputs(folder, rounds):
    """As the first step of an extension leaves inputs.json."""
    config = configuration.load(folder / "population.yaml")
    config = config.replace(population=config.population.replace(rounds=rounds))
    with RunDir.open(folder) as opened:
        record_changes(opened, compare_inputs(opened, config, rounds=rounds))


def test_a_run_that_was_stopped_before_it_recorded_its_inputs_goes_on(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(small(population__rounds=1), out=folder, observer=Told(("learn", 0)))
    (folder / "inputs.json").unlink()
    found = verify(folder)
    assert found.damage == []
    assert [text for text in found.notes if "inputs.json: the run was stopped before" in text]
    resume(folder)
    assert verify(folder).notes == []


@pytest.mark.parametrize("which", ["stopped", "finished"])
def test_inputs_that_rounds_were_played_with_are_missing(request, which):
    folder = request.getfixturevalue(which)
    (folder / "inputs.json").unlink()
    (text,) = verify(folder).damage
    assert "inputs.json: expected the record" in text


@pytest.mark.slow
def test_a_setting_that_may_change_is_noted_until_a_resume_records_it(stopped):
    edit(stopped, "checkpoints: last", "checkpoints: best")
    found = verify(stopped)
    assert found.damage == []
    assert any("record.checkpoints differ from inputs.json" in text for text in found.notes)
    resume(stopped)
    assert verify(stopped).damage == verify(stopped).notes == []


def test_no_resume_takes_over_a_setting_of_a_finished_run(finished):
    edit(finished, "checkpoints: last", "checkpoints: best")
    (text,) = verify(finished).damage
    assert "got others for record.checkpoints" in text


def test_a_setting_that_may_not_change_is_damage(stopped):
    edit(stopped, "seed: 1", "seed: 2")
    (text,) = verify(stopped).damage
    assert "got others for seed" in text
    with pytest.raises(ConfigError, match="seed was 1 and is 2"):
        resume(stopped)


def test_settings_that_lost_a_part_are_damage_also_where_it_had_its_default(stopped):
    edit(stopped, "  optuna: true\n", "")
    (text,) = verify(stopped).damage
    assert "got none of record.optuna" in text


def test_a_torn_line_is_mended_before_the_end_alone(stopped, finished):
    for folder in (stopped, finished):
        with (folder / "rounds.jsonl").open("a") as file:
            file.write('{"round": ')
    text = "ends in 10 bytes of an incomplete line"
    assert verify(stopped).damage == verify(finished).notes == []
    assert [one for one in verify(stopped).notes if text in one]
    assert [one for one in verify(finished).damage if text in one]


@pytest.mark.parametrize("first", ["inputs", "both"])
def test_an_extension_that_was_stopped_early_goes_on(finished, first):
    extend_inputs(finished, rounds=4)
    if first == "both":
        edit(finished, "  rounds: 3", "  rounds: 4")
    found = verify(finished)
    assert found.damage == []
    notes = "\n".join(found.notes)
    assert f"{finished}: was extended to 4 rounds, and stopped before the first" in notes
    assert ("population.rounds is 3, and 4 in inputs.json; a resume" in notes) == (first != "both")
    resume(finished)
    assert verify(finished).damage == verify(finished).notes == []


@pytest.mark.parametrize("rounds", [2, 5])
@pytest.mark.parametrize("which", ["stopped", "finished"])
def test_a_number_of_rounds_that_no_extension_recorded_is_damage(request, which, rounds):
    folder = request.getfixturevalue(which)
    edit(folder, "  rounds: 3", f"  rounds: {rounds}")
    (text,) = verify(folder).damage
    assert f"population.rounds is {rounds}, and 3 in inputs.json; restore it" in text


@pytest.mark.parametrize(
    "change",
    [
        {"settings": {}},
        {"settings": {"population.rounds": "two"}},
        {"settings": {"population.rounds": 2, "record.checkpoints": "some"}},
        {"changes": [{}]},
        {"changes": [{"name": "population.rounds", "round": 1, "from": None, "to": "3"}]},
        {"changes": [{"name": "record.checkpoints", "round": "1", "from": "all", "to": "last"}]},
        {"changes": ["record.checkpoints"]},
        {"files": {"env.train": 3}},
        {"format": 7},
        {"id": None},
    ],
)
def test_a_foreign_record_of_what_a_run_was_made_of_is_named(finished, change):
    folder = finished
    file = folder / "inputs.json"
    data = unseal(file.read_bytes())
    if change.get("settings"):
        change = {"settings": {**data["settings"], **change["settings"]}}
    file.write_text(seal({**data, **change}))
    damage = verify(folder).damage
    assert damage
    assert all("inputs.json" in text for text in damage)
    assert any(str(file) in text for text in damage)

"""verify finds each file that is not as it was written, and tells what a stop left from damage."""

import json
import shutil
from dataclasses import asdict

import pytest
from small_run import Told, small

from evo_grpo import resume, run
from evo_grpo import settings as configuration
from evo_grpo.analysis import verify as looking
from evo_grpo.analysis.arms import compare
from evo_grpo.analysis.verify import verify
from evo_grpo.errors import ConfigError, RunNotFoundError
from evo_grpo.record.files import seal, unseal
from evo_grpo.record.names import INPUTS, REPLAYED
from evo_grpo.record.run_dir import RunDir
from evo_grpo.training.recorded_inputs import read_inputs_of
from evo_grpo.training.resume_check import compare_inputs, record_changes

BEST = "checkpoints/best"


def sound(folder):
    found = verify(folder)
    assert (found.damage, found.notes) == ([], [])
    return found


def flip(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


def delete(file):
    file.unlink()


def edit(folder, before, after):
    file = folder / "population.yaml"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def the_damage(folder):
    (text,) = verify(folder).damage
    return text


# --- results and their seals ---------------------------------------------------------------------


@pytest.mark.slow
def test_all_that_was_written_is_found_as_it_was(added, extended):
    assert sound(added).rounds == 3
    assert sound(extended).rounds == 4


#: A number in each file of results.
NUMBERS = {
    "summary.json": lambda data: data["best"].update(mean=0.9),
    "compare/compare.json": lambda data: data["arms"][0]["tokens"].update(training=1),
    "replay/replay.json": lambda data: data["winner"].update(mean=0.9),
}


def change(file, apply):
    data = json.loads(file.read_text())
    apply(data)
    file.write_text(json.dumps(data))


@pytest.mark.parametrize("name", NUMBERS)
def test_a_changed_number_in_a_result_is_found_unless_an_early_version_wrote_it(added, name):
    change(added / name, NUMBERS[name])
    text = the_damage(added)
    assert str(added / name) in text
    assert "its sha256 does not match its contents" in text
    change(added / name, lambda data: data.pop("sha256"))
    sound(added)


@pytest.mark.parametrize(
    "names",
    [
        (
            "compare/guess/completions/round-0000.jsonl",
            "compare/random/checkpoints/round-0000/agent-01/optimizer.safetensors",
            "replay/constant-run/actor/adapter_model.safetensors",
        ),
        (
            "compare/guess/population.yaml",
            "compare/random/summary.json",
            "replay/schedule-run/attributes.json",
        ),
        ("compare/random/inputs.json", "compare/compare.json", "replay/replay.json"),
    ],
)
def test_any_file_of_what_was_added_is_looked_at(added, names):
    for name in names:
        data = (added / name).read_bytes()
        (added / name).write_bytes(data[: len(data) // 2])
    damage = "\n".join(verify(added).damage)
    for name in names:
        assert str(added / name) in damage


def test_a_result_that_was_not_written_is_noted_with_the_command_that_writes_it(added):
    for name in ("compare/compare.json", "replay/replay.json"):
        delete(added / name)
    found = verify(added)
    assert found.damage == []
    assert all("is not finished; go on with: evo-grpo" in text for text in found.notes)
    assert len(found.notes) == 2


def test_a_population_of_a_comparison_is_missing_unless_the_comparison_was_stopped(added):
    shutil.rmtree(added / "compare/random")
    assert f"{added}/compare/random/summary.json: is missing" in the_damage(added)
    (added / "compare/compare.json").unlink()
    (added / "compare/guess/summary.json").unlink()
    found = verify(added)
    assert found.damage == []
    (text,) = found.notes
    assert f"evo-grpo resume {added} --compare" in text
    compare(added)
    sound(added)


def test_what_was_added_to_an_earlier_end_is_looked_at(added):
    resume(added, rounds=4)
    sound(added)
    flip(added / "replay.rounds-3" / REPLAYED[0] / "optimizer.safetensors")
    flip(added / "compare.rounds-3/guess/checkpoints/round-0000/agent-00/optimizer.safetensors")
    change(added / "compare.rounds-3/compare.json", NUMBERS["compare/compare.json"])
    damage = "\n".join(verify(added).damage)
    for name in ("replay.rounds-3", "compare.rounds-3/guess", "compare.rounds-3/compare.json"):
        assert name in damage


# --- the end of a run ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def extended_once(made):
    return resume(shutil.copytree(made / "finished", made / "extended"), rounds=4)


@pytest.fixture
def extended(extended_once, tmp_path):
    return shutil.copytree(extended_once, tmp_path / "run")


def test_the_summary_of_an_earlier_end_says_something_else(extended):
    change(extended / "summary.rounds-3.json", lambda data: data.update(gain=7.0))
    assert "summary.rounds-3.json" in the_damage(extended)


def test_a_line_that_a_finished_run_lost_is_found(finished):
    lines = (finished / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (finished / "rounds.jsonl").write_bytes(b"".join(lines[:-1]))
    assert "summary.json is of 3 rounds, rounds.jsonl has 2" in "\n".join(verify(finished).damage)


def test_lines_that_an_unfinished_run_lost_are_found(stopped):
    lines = (stopped / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (stopped / "rounds.jsonl").write_bytes(lines[0])
    damage = "\n".join(verify(stopped).damage)
    assert "expected the line of round 2, whose checkpoints are there" in damage
    (stopped / "rounds.jsonl").write_text("")
    damage = "\n".join(verify(stopped).damage)
    for name in ("completions/round-0001.jsonl", "metrics/round-0001.jsonl"):
        assert f"{name}: is there, but rounds.jsonl has no line of it" in damage


def test_an_unfinished_run_is_noted_with_the_command_that_goes_on(stopped, finished):
    (finished / "summary.json").unlink()
    for folder, rounds in ((stopped, 2), (finished, 3)):
        found = verify(folder)
        assert found.damage == []
        assert found.notes == [
            f"{folder}: is not finished after {rounds} rounds; unless it trains now, go on with: "
            f"evo-grpo resume {folder}"
        ]


def extend_inputs(folder, rounds):
    """As the first step of an extension leaves inputs.json."""
    config = configuration.load(folder / "population.yaml")
    config = config.replace(population=config.population.replace(rounds=rounds))
    with RunDir.open(folder) as opened:
        record_changes(opened, compare_inputs(opened, config, rounds=rounds))


def test_an_extension_that_was_stopped_early_goes_on(finished):
    extend_inputs(finished, rounds=4)
    assert verify(finished).damage == []
    edit(finished, "  rounds: 3", "  rounds: 4")  # written after inputs.json
    found = verify(finished)
    assert found.damage == []
    (text,) = found.notes
    assert f"{finished}: is not finished after 3 rounds" in text
    resume(finished)
    sound(finished)


# --- completions and checkpoints -----------------------------------------------------------------


@pytest.fixture(scope="session")
def since_all_once(made):
    """A run that kept its last round alone, and was resumed to keep all from then on."""
    folder = shutil.copytree(made / "stopped", made / "since-all")
    edit(folder, "checkpoints: last", "checkpoints: all")
    return resume(folder)


@pytest.fixture
def since_all(since_all_once, tmp_path):
    return shutil.copytree(since_all_once, tmp_path / "run")


def test_what_an_earlier_policy_dropped_need_not_be_there(since_all):
    assert not (since_all / "checkpoints/round-0000").exists()
    sound(since_all)


@pytest.mark.parametrize("kept", [1, 2])
def test_what_no_policy_dropped_has_to_be_there(since_all, kept):
    shutil.rmtree(since_all / f"checkpoints/round-000{kept}/agent-01")
    damage = verify(since_all).damage
    assert damage
    assert all(f"round-000{kept}/agent-01" in text and "is missing" in text for text in damage)


def test_the_parts_that_an_earlier_version_counted_in_overlap_are_no_damage(tmp_path):
    parts = {"engine__shards": 2, "engine__overlap": True}
    folder = run(small(population__rounds=1, **parts), out=tmp_path / "run")
    text = (folder / "population.yaml").read_text()
    earlier = text.replace("  shards: 2\n  overlap: true", "  shards: null\n  overlap: 2")
    assert earlier != text
    (folder / "population.yaml").write_text(earlier)
    inputs = asdict(read_inputs_of(folder))
    inputs["settings"] |= {"engine.shards": None, "engine.overlap": 2}
    (folder / INPUTS).write_text(seal(inputs))
    assert verify(folder).damage == []


def test_a_policy_that_a_later_version_filled_in_dropped_nothing(since_all):
    with RunDir.open(since_all) as opened:
        inputs = read_inputs_of(since_all)
        (entry,) = [one for one in inputs.changes if one["name"] == "record.checkpoints"]
        changes = [{**entry, "from": None, "filled_in": True}]
        opened.write(INPUTS, seal({**asdict(inputs), "changes": changes}))
    assert any("round-0000" in text and "is missing" in text for text in verify(since_all).damage)


def test_the_best_of_a_run_is_there_unless_a_resume_brings_it_back(finished, stopped):
    for folder in (finished, stopped):
        flip(folder / BEST / "optimizer.safetensors")
        assert f"{BEST}/optimizer.safetensors: has changed since" in the_damage(folder)
        shutil.rmtree(folder / BEST)
    assert BEST in "".join(verify(finished).damage)
    assert verify(stopped).damage == []


def test_the_round_that_was_interrupted_is_no_damage(stopped):
    for name in ("completions/round-0002.jsonl", "metrics/.round-0002.jsonl.tmp"):
        (stopped / name).write_text("")
    (stopped / "checkpoints/round-0002").mkdir()
    assert verify(stopped).damage == []


# --- settings and inputs -------------------------------------------------------------------------


def test_a_run_that_was_stopped_before_it_recorded_its_inputs_is_sound(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(small(population__rounds=1), out=folder, observer=Told(("learn", 0)))
    (folder / "inputs.json").unlink()
    assert verify(folder).damage == []


@pytest.mark.parametrize("which", ["stopped", "finished"])
def test_inputs_that_rounds_were_played_with_are_missing(request, which):
    folder = request.getfixturevalue(which)
    (folder / "inputs.json").unlink()
    assert "inputs.json: expected the record" in the_damage(folder)


def test_no_resume_takes_over_a_setting_of_a_finished_run(finished):
    edit(finished, "checkpoints: last", "checkpoints: best")
    assert "got others for record.checkpoints" in the_damage(finished)


def test_a_setting_that_may_not_change_is_damage(stopped):
    edit(stopped, "seed: 1", "seed: 2")
    assert "got others for seed" in the_damage(stopped)
    with pytest.raises(ConfigError, match="seed was 1 and is 2"):
        resume(stopped)


@pytest.mark.parametrize("rounds", [2, 5])
@pytest.mark.parametrize("which", ["stopped", "finished"])
def test_a_number_of_rounds_that_no_extension_recorded_is_damage(request, which, rounds):
    folder = request.getfixturevalue(which)
    edit(folder, "  rounds: 3", f"  rounds: {rounds}")
    assert "got others for population.rounds" in the_damage(folder)


def test_settings_that_lost_a_part_are_damage_also_where_it_had_its_default(stopped):
    edit(stopped, "  optuna: true\n", "")
    assert "got none of record.optuna" in the_damage(stopped)


def test_a_torn_line_is_mended_before_the_end_alone(stopped, finished):
    for folder in (stopped, finished):
        with (folder / "rounds.jsonl").open("a") as file:
            file.write('{"round": ')
    assert verify(stopped).damage == []
    assert "ends in 10 bytes of an incomplete line" in the_damage(finished)


@pytest.mark.parametrize(
    "change",
    [
        {"settings": {}},
        {"settings": {"population.rounds": 2, "record.checkpoints": "some"}},
        {"changes": [{"name": "population.rounds", "round": 1, "from": None, "to": "3"}]},
        {"changes": [{"name": "record.checkpoints", "round": "1", "from": "all", "to": "last"}]},
        {"files": {"env.train": 3}},
        {"format": 7},
        {"id": None},
    ],
)
def test_a_foreign_record_of_what_a_run_was_made_of_is_named(finished, change):
    file = finished / "inputs.json"
    data = unseal(file.read_bytes())
    if change.get("settings"):
        change = {"settings": {**data["settings"], **change["settings"]}}
    file.write_text(seal({**data, **change}))
    damage = verify(finished).damage
    assert damage
    assert all("inputs.json" in text for text in damage)


# --- beside a run, and what is not looked at -----------------------------------------------------


@pytest.fixture
def meanwhile(monkeypatch):
    """Do something between the reading of the records and the look at the files."""
    real, calls = looking._check_checkpoints, []

    def during(do):
        def check(*arguments):
            calls.append(do)
            do(len(calls))
            return real(*arguments)

        monkeypatch.setattr(looking, "_check_checkpoints", check)
        return calls

    return during


def go_on(folder, other):
    """Become another folder, as a run does that plays another round."""
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


def test_a_run_that_went_on_meanwhile_is_looked_at_again(stopped, made, meanwhile):
    calls = meanwhile(lambda number: go_on(stopped, made / "finished") if number == 1 else None)
    assert sound(stopped).rounds == 3
    assert len(calls) == 2


def test_beside_a_run_that_goes_on_damage_is_what_two_looks_find(stopped, made, meanwhile):
    def lost(number):
        go_on(stopped, made / ("finished" if number % 2 else "stopped"))
        (stopped / "completions/round-0000.jsonl").unlink()

    meanwhile(lost)
    assert "completions/round-0000.jsonl: is missing" in the_damage(stopped)


def test_a_file_that_may_not_be_read_is_named(stopped, monkeypatch):
    def refused(folder):
        raise PermissionError(13, "Permission denied", str(folder / "inputs.json"))

    monkeypatch.setattr("evo_grpo.analysis.verify.read_inputs_of", refused)
    assert the_damage(stopped) == f"{stopped / 'inputs.json'}: cannot be read (Permission denied)"


def test_a_link_is_named_and_nothing_behind_it_is_looked_at(stopped, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (stopped / "compare").symlink_to(tmp_path / "elsewhere")
    assert "a link to" in the_damage(stopped)


@pytest.mark.parametrize("change", ["damaged", "deleted"])
def test_what_is_made_from_the_rounds_is_not_looked_at_and_made_anew(
    stopped, finished, made, change
):
    names = ("journal.log", "leaderboard.csv")
    for file in (folder / name for folder in (stopped, finished) for name in names):
        if change == "damaged":
            file.write_bytes(b"{}\n")
        else:
            file.unlink(missing_ok=True)  # a stopped run has no journal
    assert verify(stopped).damage == verify(finished).damage == []
    resume(stopped)
    for name in names:
        lines = (stopped / name).read_bytes().count(b"\n")
        assert lines == (made / "finished" / name).read_bytes().count(b"\n")


def test_no_run_folder_is_refused(tmp_path):
    with pytest.raises(RunNotFoundError):
        verify(tmp_path)

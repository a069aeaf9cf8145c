"""A look beside a run that goes on: it is repeated, and says so where it never gets a clear one."""

import shutil

import pytest

from evo_grpo import resume
from evo_grpo.after.verifying import verify as looking
from evo_grpo.after.verifying.verify import LOOKS, verify
from evo_grpo.errors import RunNotFoundError


@pytest.fixture
def meanwhile(monkeypatch):
    """Do something between the reading of the records and the look at the files."""
    real, calls = looking.check_files, []

    def during(do):
        def check(*arguments):
            calls.append(do)
            do(len(calls))
            return real(*arguments)

        monkeypatch.setattr(looking, "check_files", check)
        return calls

    return during


def go_on(folder, other):
    """Become another folder, as a run does that plays another round."""
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


def test_a_run_that_went_on_meanwhile_is_looked_at_again(stopped, made, meanwhile):
    calls = meanwhile(lambda number: go_on(stopped, made / "finished") if number == 1 else None)
    found = verify(stopped)
    assert len(calls) == 2
    assert found.damage == found.notes == []
    assert found.rounds == 3


def test_a_run_that_rests_is_looked_at_once(stopped, meanwhile):
    (stopped / "completions/round-0000.jsonl").write_text("")
    calls = meanwhile(lambda number: None)
    assert len(verify(stopped).damage) == 1
    assert len(calls) == 1


def test_a_run_that_is_faster_than_every_look_is_told_so(stopped, made, meanwhile):
    (made / "finished/completions/round-0000.jsonl").rename(made / "kept")
    (made / "stopped/completions/round-0000.jsonl").rename(made / "also-kept")
    (stopped / "completions/round-0000.jsonl").unlink()
    try:
        calls = meanwhile(
            lambda number: go_on(stopped, made / ("finished" if number % 2 else "stopped"))
        )
        found = verify(stopped)
    finally:
        (made / "kept").rename(made / "finished/completions/round-0000.jsonl")
        (made / "also-kept").rename(made / "stopped/completions/round-0000.jsonl")
    assert len(calls) == LOOKS
    (text,) = found.damage  # of what changed between two looks, nothing
    assert "completions/round-0000.jsonl: is missing" in text
    assert "during each of 5 checks" in found.notes[-1]


def test_a_file_that_goes_while_it_is_read_raises_nothing(stopped, monkeypatch):
    def gone(file):
        raise FileNotFoundError(2, "No such file or directory", str(file))

    monkeypatch.setattr("evo_grpo.after.verifying.findings.sha256_of", gone)
    damage = verify(stopped).damage
    assert damage
    assert all("is missing" in text for text in damage)


def test_a_file_that_may_not_be_read_is_named(stopped, monkeypatch):
    def refused(folder):
        raise PermissionError(13, "Permission denied", str(folder / "inputs.json"))

    monkeypatch.setattr("evo_grpo.after.verifying.records.read_inputs_of", refused)
    (text,) = verify(stopped).damage
    assert text == f"{stopped / 'inputs.json'}: cannot be read (Permission denied)"


def test_a_link_is_named_and_nothing_behind_it_is_looked_at(stopped, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (stopped / "compare").symlink_to(tmp_path / "elsewhere")
    (text,) = verify(stopped).damage
    assert "a link to" in text


def test_no_run_folder_is_refused(tmp_path):
    with pytest.raises(RunNotFoundError):
        verify(tmp_path)


@pytest.mark.parametrize("name", ["journal.log", "leaderboard.csv"])
@pytest.mark.parametrize("change", ["damaged", "deleted"])
def test_what_is_made_from_the_rounds_is_not_looked_at_and_made_anew(
    stopped, finished, made, name, change
):
    for folder in (stopped, finished):
        if change == "damaged":
            (folder / name).write_bytes(b"{}\n")
        else:
            (folder / name).unlink(missing_ok=True)  # a stopped run has no journal
        found = verify(folder)
        assert found.damage == found.notes == []
    resume(stopped)
    assert (stopped / name).read_bytes().count(b"\n") == (
        (made / "finished" / name).read_bytes().count(b"\n")
    )

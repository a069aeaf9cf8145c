"""The log of a run, read from its start, from any cursor, and while the run goes on."""

import shutil
import threading
import time

import pytest
from small_run import Told, small

from evo_grpo import resume, run
from evo_grpo.errors import CheckpointError, RunNotFoundError
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.history import metric_rows
from evo_grpo.record.log import START, Cursor, RoundDone, RunFinished, RunStarted, StepDone, entries
from evo_grpo.record.summary import read_summary

CONFIG = small(population__steps_per_round=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return run(CONFIG, out=tmp_path_factory.mktemp("log") / "run")


@pytest.fixture
def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copied")


def said(run, after=START):
    return [entry for _, entry in entries(run, after)]


def test_a_finished_run_says_everything_in_order(folder):
    first, *between, last = said(folder)
    assert isinstance(first, RunStarted)
    assert first.config == CONFIG.settled(8)
    assert isinstance(last, RunFinished)
    assert last.summary == read_summary(folder)
    kinds = [type(entry) for entry in between]
    assert kinds == [StepDone, StepDone, RoundDone] * 3
    assert [entry.number for entry in between] == [1, 2, 2, 3, 4, 4, 5, 6, 6]
    assert [e.record for e in between if isinstance(e, RoundDone)] == read_rounds(folder)
    rows = [
        {"round": e.round, "step": e.step, "agent": slot, **values}
        for e in between
        if isinstance(e, StepDone)
        for slot, values in e.agents.items()
    ]
    assert rows == metric_rows(folder)


def test_from_every_cursor_the_rest_follows(folder):
    whole = list(entries(folder))
    for number, (cursor, _) in enumerate(whole, start=1):
        assert list(entries(folder, cursor)) == whole[number:]


def test_a_last_line_that_is_not_whole_is_left_for_later(copied):
    path = copied / "rounds.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:50])
    (copied / "summary.json").unlink()
    found = list(entries(copied))
    assert [type(entry) for _, entry in found[-2:]] == [RoundDone, StepDone]
    path.write_bytes(b"".join(lines))
    assert [type(entry) for entry in said(copied, found[-1][0])] == [StepDone, RoundDone]


def test_a_run_that_goes_on_is_followed_to_its_end(tmp_path):
    out, heard = tmp_path / "run", []

    class Follows(Told):
        """Begins to read when there is a folder."""

        def started(self, *given):
            super().started(*given)
            self.thread = threading.Thread(
                target=lambda: heard.extend(e for _, e in entries(out, follow=True))
            )
            self.thread.start()

    observer = Follows()
    run(CONFIG, out=out, observer=observer)
    observer.thread.join(60)
    assert heard == said(out)


def test_a_step_is_read_while_its_round_goes_on(tmp_path):
    out, found = tmp_path / "run", []

    class Reads(Told):
        """Reads in the second round, once all its steps are taken."""

        def stage(self, round, name, done, total):
            if (name, round) != ("evaluate", 1):
                return
            until = time.monotonic() + 30
            while len(found) < 5 and time.monotonic() < until:  # the writer has its own thread
                found[:] = said(out)

    run(CONFIG, out=out, observer=Reads())
    # The last step is held back until more is written: its lines may not all be there.
    assert [type(e) for e in found] == [RunStarted, StepDone, StepDone, RoundDone, StepDone]
    assert found == said(out)[:5]


def test_steps_that_a_resume_takes_otherwise_are_read_anew(copied):
    (copied / "summary.json").unlink()
    rounds = copied / "rounds.jsonl"
    rounds.write_bytes(b"".join(rounds.read_bytes().splitlines(keepends=True)[:2]))
    cursor, before = list(entries(copied))[-1]
    path = copied / "metrics/round-0002.jsonl"
    path.write_text(path.read_text().replace('"reward": ', '"reward": 1'))
    again, after = list(entries(copied, cursor))[-1]
    assert (before.step, after.step) == (0, 0)
    assert again.steps == cursor.steps + len(after.agents)


@pytest.mark.slow
def test_what_a_stopped_run_plays_again_comes_once_more_and_equal(tmp_path, folder):
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(CONFIG, out=out, observer=Told(("evaluate", 1)))
    before = list(entries(out))
    resume(out)
    after = said(out, before[-1][0])
    whole = [entry for _, entry in before] + after
    assert [type(e) for e in whole] == [type(e) for e in said(out)]


def test_more_rounds_are_read_where_the_end_had_been_read(copied):
    before = list(entries(copied))
    resume(copied, rounds=4)
    after = said(copied, before[-1][0])
    # The last round has a plan now, which it lacked as the last.
    assert [type(e) for e in after] == [RoundDone, StepDone, StepDone, RoundDone, RunFinished]
    assert [e.record.round for e in after if isinstance(e, RoundDone)] == [2, 3]


def test_a_place_past_the_end_reads_what_is_there(copied):
    beyond = Cursor(started=True, rounds=2, place=1 << 30, last="x", steps=1 << 30, notes=1 << 30)
    assert [e.record.round for e in said(copied, beyond) if isinstance(e, RoundDone)] == [1, 2]


def test_a_log_that_lost_its_last_rounds_is_read_on_from_its_end(copied):
    path = copied / "rounds.jsonl"
    whole = path.read_bytes()
    place = whole.rindex(b"\n", 0, -1) + 1
    (copied / "summary.json").unlink()
    path.write_bytes(whole[:place])  # as a power cut leaves it
    read_all = Cursor(started=True, rounds=3, place=place, last="x")
    assert [e.record.round for e in said(copied, read_all) if isinstance(e, RoundDone)] == [1]
    path.write_bytes(whole)
    again = Cursor(started=True, rounds=2)
    assert [e.record.round for e in said(copied, again) if isinstance(e, RoundDone)] == [1, 2]


def test_a_finished_run_without_its_last_round_is_refused(copied):
    path = copied / "rounds.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=r"expected 3 rounds as in summary.json, got 2"):
        said(copied)


def test_no_run_has_no_log(tmp_path):
    with pytest.raises(RunNotFoundError):
        said(tmp_path)


def test_a_note_that_is_none_is_named(copied):
    (copied / "notes.jsonl").write_text('{"time": "now", "text": "paused"}\n')
    with pytest.raises(CheckpointError, match=r"notes.jsonl: expected a note with a time.*remove"):
        said(copied)

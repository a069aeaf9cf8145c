"""Files to which a run appends hold whole lines, also after a refused write or a kill."""

import errno
import json
import os
import time

import pytest
from disk import Disk

from evo_grpo.errors import RunDirError, RunFailedError
from evo_grpo.record.appending import MetricsFile, append_note

STEP = [{"step": 0, "agent": agent, "loss": 0.5} for agent in (0, 1)]


def full(op, path):
    """Refuse a write after half of it, as a full disk does."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if op == "write" else None


def test_a_note_that_a_kill_cut_off_is_replaced_by_the_next(tmp_path):
    path, start = tmp_path / "notes.jsonl", time.time()
    append_note(path, "paused\n")
    with path.open("a") as file:
        file.write('{"time": 1.5, "te')
    append_note(path, "\ud800 goes on")
    first, second = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert [first["text"], second["text"]] == ["paused\n", "? goes on"]
    assert start <= first["time"] <= second["time"] <= time.time()


def test_of_what_a_full_disk_refuses_nothing_is_left(tmp_path):
    metrics, notes = MetricsFile(tmp_path / "metrics/round-0000.jsonl"), tmp_path / "notes.jsonl"
    metrics.append(STEP)
    append_note(notes, "paused")
    before = metrics.path.read_bytes(), notes.read_bytes()
    for write in (lambda: metrics.append(STEP), lambda: append_note(notes, "goes on")):
        with Disk(tmp_path, fault=full), pytest.raises(RunFailedError, match="No space left"):
            write()
    assert (metrics.path.read_bytes(), notes.read_bytes()) == before


def test_a_step_is_one_write(tmp_path):
    metrics = MetricsFile(tmp_path / "round-0000.jsonl")
    with Disk(tmp_path) as disk:
        metrics.append(STEP)
    assert [call.data for call in disk.calls if call.op == "write"] == [metrics.path.read_bytes()]


def test_metrics_that_something_else_changes_are_named(tmp_path):
    metrics = MetricsFile(tmp_path / "round-0000.jsonl")
    metrics.append(STEP)
    metrics.path.write_text("mine")
    with pytest.raises(RunDirError, match=r"0000.jsonl: expected the \d+ bytes .* got 4; .* stop"):
        metrics.append(STEP)


def test_metrics_replace_a_link_and_not_its_target(tmp_path):
    theirs, path = tmp_path / "theirs", tmp_path / "round-0000.jsonl"
    theirs.write_text("theirs")
    path.symlink_to(theirs)
    MetricsFile(path).append(STEP)
    assert theirs.read_text() == "theirs"
    assert not path.is_symlink()

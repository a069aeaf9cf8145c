"""Whole files, checked lines and the lock, one level below the run folder."""

import errno
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from disk import Disk
from hypothesis import given, settings
from hypothesis import strategies as st

from evo_grpo.errors import RunDirError, RunFailedError
from evo_grpo.record.files import (
    FolderLock,
    append,
    atomic_write,
    create_folder,
    reading,
    seal,
    sync_into,
    to_line,
    unseal,
    unsealed_head,
)

PROPERTY = settings(max_examples=60)
# A few letters say it all, and the table of all letters takes ten seconds to build.
TEXT = st.text(st.sampled_from('aä\n\r\u2028"\\\0\U0001f600'), max_size=6)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=8,
)


@pytest.mark.slow
@PROPERTY
@given(st.dictionaries(TEXT, VALUES))
def test_a_sealed_line_is_read_back_as_it_was(data):
    line = seal(data)
    assert line.endswith("\n")
    assert line.encode().count(b"\n") == 1
    assert unseal(line.encode()) == data


@PROPERTY
@given(st.data())
def test_a_changed_byte_is_noticed(data):
    line = seal({"round": 3, "agents": [{"fitness": 0.25, "text": "a line\nof two"}]}).encode()
    at = data.draw(st.integers(0, len(line) - 2))
    other = data.draw(st.integers(32, 126).filter(lambda byte: byte != line[at]))
    changed = line[:at] + bytes([other]) + line[at + 1 :]
    with pytest.raises(ValueError, match=r"sha256|JSON"):
        unseal(changed)


def test_lines_are_strict_json_whatever_is_in_them():
    row = {
        "nan": math.nan,
        "list": [math.inf, 1.5],
        "array": np.array([1.0, np.nan]),
        "number": np.float32(0.5),
        "path": Path("a/b"),
        3: "umlaut ä",
    }
    assert json.loads(to_line(row)) == {
        "nan": None,
        "list": [None, 1.5],
        "array": [1.0, None],
        "number": 0.5,
        "path": "a/b",
        "3": "umlaut ä",
    }


def test_half_a_surrogate_pair_can_be_written_and_checked(tmp_path):
    line = seal({"text": "half \ud83d of a pair"})
    atomic_write(tmp_path / "x", line)
    assert unseal((tmp_path / "x").read_bytes()) == {"text": "half ? of a pair"}


def test_an_atomic_write_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    atomic_write(path, "old")
    atomic_write(path, "new")
    assert path.read_text() == "new"
    assert os.listdir(path.parent) == ["file.txt"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    atomic_write(path, "old")
    message = r"file.txt: cannot be written \(No space left.*resume"
    with Disk(tmp_path, fault=full("fsync")), pytest.raises(RunFailedError, match=message):
        atomic_write(path, "new")
    assert path.read_text() == "old"


LINE = '{"text": "ä"}\n'


def test_a_line_that_a_kill_cut_off_is_replaced_by_the_next(tmp_path):
    path = tmp_path / "deep" / "notes.jsonl"
    append(path, LINE)
    with path.open("a") as file:
        file.write('{"text": "go')
    append(path, '{"text": "\ud800"}\n')
    assert path.read_text(encoding="utf-8") == LINE + '{"text": "?"}\n'


def test_a_whole_last_line_without_its_end_is_kept_and_ended(tmp_path):
    path = tmp_path / "notes.jsonl"
    path.write_text(LINE.strip(), encoding="utf-8")
    append(path, LINE)
    assert path.read_text(encoding="utf-8") == LINE * 2


def full(refused):
    """A disk without room for a call."""

    def fault(op, path):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if op == refused else None

    return fault


@pytest.mark.parametrize("durable", [True, False])
def test_of_lines_that_a_full_disk_refuses_nothing_is_left(tmp_path, durable):
    path = tmp_path / "notes.jsonl"
    append(path, LINE, durable=durable)
    with (
        Disk(tmp_path, fault=full("write")),
        pytest.raises(RunFailedError, match="No space left"),
    ):
        append(path, LINE * 2, durable=durable)
    assert path.read_text(encoding="utf-8") == LINE


def test_lines_are_one_write_so_that_readers_see_all_of_them(tmp_path):
    with Disk(tmp_path) as disk:
        append(tmp_path / "metrics.jsonl", LINE * 3, durable=False)
    assert [call.data.decode() for call in disk.calls if call.op == "write"] == [LINE * 3]


def test_appended_lines_are_synced_and_so_is_the_name_of_a_new_file(tmp_path):
    path = tmp_path / "notes.jsonl"
    assert synced(tmp_path, lambda: append(path, LINE))[0] == ["notes.jsonl", "."]
    assert synced(tmp_path, lambda: append(path, LINE))[0] == ["notes.jsonl"]


def synced(top, act):
    """What was synced below a folder, in order, while something was done."""
    with Disk(top) as disk:
        act()
    places = [call.path.relative_to(top).as_posix() for call in disk.calls if call.op == "fsync"]
    return places, disk.calls


def test_sync_into_syncs_a_folder_without_links_up_to_the_run_folder(tmp_path):
    folder = tmp_path / "run" / "checkpoints" / "round-0000"
    (folder / "agent-00").mkdir(parents=True)
    (folder / "agent-00" / "file").write_text("x")
    (folder / "agent-00" / "link").symlink_to("nowhere")
    (tmp_path / "run" / "checkpoints" / "other").mkdir()
    places, _ = synced(tmp_path, lambda: sync_into(tmp_path / "run", folder))
    one = "run/checkpoints/round-0000"
    assert places == [
        *(f"{one}/agent-00", f"{one}/agent-00/file", one),
        *("run/checkpoints", "run"),
    ]
    assert synced(tmp_path, lambda: sync_into(tmp_path / "run", folder / "missing"))[0] == []


def test_a_new_folder_is_synced_with_those_above_it(tmp_path):
    places, _ = synced(tmp_path, lambda: create_folder(tmp_path / "runs" / "first"))
    assert sorted(places) == [".", "runs"]
    assert synced(tmp_path, lambda: create_folder(tmp_path / "runs" / "first"))[0] == []


def test_an_atomic_write_syncs_the_file_before_its_name_and_the_folder_after(tmp_path):
    file = tmp_path / "folder" / "file"
    _, calls = synced(tmp_path, lambda: atomic_write(file, "x"))
    done = [(call.op, call.path.name) for call in calls if call.op not in ("open", "create")]
    assert done == [
        ("mkdir", "folder"),
        ("fsync", tmp_path.name),
        ("write", ".file.tmp"),
        ("fsync", ".file.tmp"),
        ("rename", ".file.tmp"),
        ("fsync", "folder"),
    ]


@pytest.mark.parametrize("name", ["ftruncate", "pwrite"])
@pytest.mark.parametrize("error", [errno.EROFS, errno.EIO])
def test_a_disk_that_refuses_the_lock_is_named_and_nothing_stays_locked(
    tmp_path, monkeypatch, name, error
):
    def refused(*_):
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, refused)
        message = rf"/.lock: cannot be written \({os.strerror(error)}\); .*resume"
        with pytest.raises(RunFailedError, match=message):
            FolderLock(tmp_path / ".lock")
    lock = FolderLock(tmp_path / ".lock")
    monkeypatch.setattr(os, name, refused)
    if name == "pwrite":
        with pytest.raises(RunFailedError, match=message):
            lock.write_round(1)
    lock.release()


def test_a_disk_that_cannot_be_read_is_named_with_the_way_out(tmp_path):
    file = tmp_path / "inputs.json"
    message = rf"inputs.json: cannot be read \({os.strerror(errno.EIO)}\); mend .*resume RUN"
    with pytest.raises(RunFailedError, match=message), reading(tmp_path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
    # One that says more passes.
    with pytest.raises(RunDirError, match="in use"), reading(tmp_path):
        raise RunDirError("in use")


def test_a_fork_writes_nothing_into_the_folder_of_its_parent(tmp_path):
    lock = FolderLock(tmp_path / ".lock")
    inside, outside = tmp_path / "leaderboard.csv", tmp_path.parent / "elsewhere"
    child = os.fork()
    if child == 0:
        try:
            atomic_write(outside, "mine")
            atomic_write(inside, "two writers")
        except RunDirError as error:
            outside.write_text(str(error))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    lock.release()
    assert f"expected process {os.getpid()} to write it" in outside.read_text()
    assert not inside.exists()


def test_the_head_of_a_line_is_read_once_the_whole_line_is_found_as_it_was_written():
    line = seal({"format": 4, "amends": 17, "members": [{"text": "ä" * 99}]}).encode()
    head = unsealed_head(line)
    assert (head["format"], head["amends"]) == (4, 17)
    with pytest.raises(ValueError, match="sha256 does not match"):
        unsealed_head(line.replace("ä".encode(), b"a ", 1))

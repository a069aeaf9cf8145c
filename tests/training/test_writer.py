"""The writer of rounds: what waits for it is bounded, and nothing follows what failed."""

import errno
import os
from contextlib import suppress
from threading import Event, Thread

import pytest

from evo_grpo.errors import RunFailedError
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.run_dir import RunDir
from evo_grpo.training.writer import WAITING, FolderWriter


def test_training_waits_for_a_disk_that_cannot_keep_up(tmp_path, monkeypatch):
    go_on, written = Event(), []

    def write(self, record, agents, samples):
        go_on.wait(10)
        written.append(record.round)

    monkeypatch.setattr(FolderWriter, "_write_round", write)
    with RunDir.create(tmp_path / "run", "run", "") as folder, FolderWriter(folder) as writer:
        for number in range(WAITING):
            writer.commit(RoundRecord(number, (), {}), [])
        one_more = Thread(target=writer.commit, args=(RoundRecord(WAITING, (), {}), []))
        one_more.start()
        one_more.join(0.2)
        assert one_more.is_alive()
        go_on.set()
        one_more.join(10)
        assert not one_more.is_alive()
    assert written == list(range(WAITING + 1))


def test_nothing_is_written_after_a_round_that_could_not_be(tmp_path, monkeypatch):
    """Not the round that waits behind it, nor one that is handed over later."""
    go_on, real, writes = Event(), RunDir.write, []

    def write(self, name, text):
        go_on.wait(10)
        writes.append(name)
        if name == "completions/round-0001.jsonl":
            raise RunFailedError(f"round 1: {os.strerror(errno.ENOSPC)}")
        return real(self, name, text)

    monkeypatch.setattr(RunDir, "write", write)
    records = [RoundRecord(number, (), {}) for number in range(4)]
    with RunDir.create(tmp_path / "run", "run", "") as folder:
        writer = FolderWriter(folder)
        for record in records[:2]:
            writer.commit(record, [])
        last = Thread(target=lambda: suppressed(lambda: writer.commit(records[2], [])))
        last.start()  # waits for a place in the queue
        go_on.set()
        last.join(10)
        # Also where somebody goes on after the error.
        for again in (
            lambda: writer.step(3, 0, [{}]),
            lambda: writer.commit(records[3], []),
            lambda: writer.amend(records[0]),
            lambda: writer.__exit__(None, None, None),
        ):
            with pytest.raises(RunFailedError, match="round 1"):
                again()
        assert writes == [f"completions/round-000{number}.jsonl" for number in (0, 1)]
        assert [one.round for one in folder.rounds()] == [0]
    left = sorted(path.name for path in (tmp_path / "run" / "completions").iterdir())
    assert left == ["round-0000.jsonl"]


def suppressed(call):
    """Call something that may fail as a round did."""
    with suppress(RunFailedError):
        call()

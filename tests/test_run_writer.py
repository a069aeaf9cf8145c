"""The writer of rounds: what waits for it is bounded."""

from threading import Event, Thread

from evo_grpo.record.records import RoundRecord
from evo_grpo.record.run_dir import RunDir
from evo_grpo.run_writer import WAITING, FolderWriter


def test_training_waits_for_a_disk_that_cannot_keep_up(tmp_path, monkeypatch):
    go_on, written = Event(), []

    def write(self, record, agents, samples, steps):
        go_on.wait(10)
        written.append(record.round)

    monkeypatch.setattr(FolderWriter, "_write_round", write)
    with RunDir.create(tmp_path / "run", "run", "") as folder, FolderWriter(folder, None) as writer:
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

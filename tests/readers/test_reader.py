"""A reader gets every entry at least once, whatever happens to it, and goes on from its cursor."""

import json
import shutil
import threading
import time

import pytest
from small_run import small

from evo_grpo import run
from evo_grpo.errors import CheckpointError, RunDirError
from evo_grpo.readers.reader import feed
from evo_grpo.record.log import entries

CONFIG = small(population__steps_per_round=2)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return run(CONFIG, out=tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


class Keeps:
    """Keeps in memory what was flushed, as a service would."""

    def __init__(self, service, fails_at=None, durable=True):
        self.service, self.fails_at, self.durable = service, fails_at, durable
        self.read_here = []

    def __call__(self, id):
        self.id = id or "run-1"
        return self

    def read(self, entry):
        if len(self.read_here) == self.fails_at:
            raise ConnectionError("gone")
        self.read_here.append(entry)

    def flush(self):
        if self.durable:
            self.service.extend(self.read_here[len(self.read_here) - 1 :])
        return self.durable

    def close(self):
        if not self.durable:
            self.service.extend(self.read_here)


def test_a_reader_gets_all_and_then_nothing(folder):
    service = []
    feed(folder, "mine", Keeps(service))
    assert service == [entry for _, entry in entries(folder)]
    feed(folder, "mine", lambda id: pytest.fail("nothing is left to be read"))
    assert json.loads((folder / "readers/mine.json").read_text())["id"] == "run-1"


@pytest.mark.parametrize("after", [0, 1, 5, 10])
def test_one_that_fails_goes_on_behind_what_it_had_flushed(folder, after):
    service, ids = [], []
    with pytest.raises(ConnectionError):
        feed(folder, "mine", Keeps(service, fails_at=after))
    assert len(service) == after

    def again(id):
        ids.append(id)
        return Keeps(service)(id)

    feed(folder, "mine", again)
    assert service == [entry for _, entry in entries(folder)]
    assert ids == ["run-1"]


def test_what_was_not_durable_comes_again(folder):
    service = []
    with pytest.raises(ConnectionError):
        feed(folder, "mine", Keeps(service, fails_at=5, durable=False))
    feed(folder, "mine", Keeps(service, durable=False))
    assert service == [entry for _, entry in entries(folder)]


def test_two_at_once_feed_everything_once(folder):
    service = []

    class Slow(Keeps):
        def read(self, entry):
            time.sleep(0.01)
            super().read(entry)

    threads = [
        threading.Thread(target=feed, args=(folder, "mine", Slow(service))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert service == [entry for _, entry in entries(folder)]


def test_the_reader_of_a_run_that_was_replaced_writes_no_more(folder):
    class Replaces(Keeps):
        def flush(self):
            shutil.rmtree(folder / "readers")
            return True

    with pytest.raises(RunDirError, match="replaced by another run"):
        feed(folder, "mine", Replaces([]))
    assert not (folder / "readers").exists()


WRONG = ({"rounds": -1}, {"started": 1}, {"last": None})
CURSORS = [json.dumps({"id": "a", "cursor": cursor}) for cursor in WRONG]


@pytest.mark.parametrize("text", ["", "[]", "{}", *CURSORS, "\xff"])
def test_a_damaged_cursor_is_named_with_the_way_out(folder, text):
    (folder / "readers").mkdir()
    (folder / "readers/mine.json").write_text(text, encoding="latin-1")
    with pytest.raises(
        CheckpointError, match=r"mine.json: expected the cursor .*; delete it, .* follow"
    ):
        feed(folder, "mine", Keeps([]))

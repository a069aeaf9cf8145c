"""Who is lost and who is slow, told from signs in a store that all ranks write to."""

import threading
import time

import pytest

from evo_grpo.errors import ConfigError
from evo_grpo.population.ranks.heartbeat import (
    VARIABLE,
    Heartbeat,
    positive_from_environment,
)

LIMIT = 1.0


class Values:
    """A store in this process, which can be made to hang or to be gone."""

    def __init__(self):
        self.values = {}
        self.answers = threading.Event()
        self.answers.set()
        self.gone = False

    def _reach(self):
        self.answers.wait()
        if self.gone:
            raise RuntimeError("Broken pipe")

    def set(self, key, value):
        self._reach()
        self.values[key] = value.encode()

    def multi_get(self, keys):
        self._reach()
        return [self.values[key] for key in keys]


class Muted:
    """The store as a rank sees it whose process can be stopped."""

    def __init__(self, store):
        self.store, self.runs = store, threading.Event()
        self.runs.set()

    def __getattr__(self, name):
        def call(*given):
            self.runs.wait()
            return getattr(self.store, name)(*given)

        return call


@pytest.fixture
def ranks():
    """Return a function that starts the heartbeats of so many ranks; all end with the test."""
    store, doors = Values(), []

    def begin(size):
        doors.extend(Muted(store) for _ in range(size))
        found = [Heartbeat(rank, size, doors[rank], LIMIT) for rank in range(size)]
        for one in found:
            one.start()
        return found, doors, store

    yield begin
    store.gone = True
    for door in doors:
        door.runs.set()
    store.answers.set()


def waits(heartbeat, until=None):
    """Wait as a rank does that nobody answers; return what was found, and after how long."""
    begun = time.monotonic()

    def done(seconds):
        time.sleep(seconds)
        return until is not None and time.monotonic() - begun > until

    return heartbeat.wait(done), time.monotonic() - begun


def all_wait(heartbeats, ranks):
    found = {}
    threads = [
        threading.Thread(target=lambda r=r: found.update({r: waits(heartbeats[r])[0]}))
        for r in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_rank_that_is_silent_is_named_by_all_others(ranks, lost):
    heartbeats, doors, _ = ranks(3)
    time.sleep(LIMIT)
    doors[lost].runs.clear()
    others = {rank for rank in range(3) if rank != lost}
    found = all_wait(heartbeats, others)
    assert found.keys() == others
    for why in found.values():
        assert why.startswith(f"rank {lost} of 3 has given no sign of life for ")


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_that_of_the_first_rank(ranks):
    heartbeats, _, store = ranks(2)
    time.sleep(LIMIT)
    store.answers.clear()
    why, _ = waits(heartbeats[1])
    assert why.startswith("rank 0 of 2 has given no sign of life for ")


@pytest.mark.slow
def test_a_closed_connection_is_that_of_the_rank_that_is_silent_since(ranks):
    heartbeats, doors, _ = ranks(3)
    time.sleep(LIMIT)
    assert heartbeats[2].closed() == ""
    doors[1].runs.clear()
    assert heartbeats[2].closed() == "rank 1 of 3 has ended"


def test_a_store_that_is_gone_has_gone_with_the_first_rank(ranks):
    heartbeats, _, store = ranks(2)
    store.gone = True
    assert heartbeats[1].closed() == "rank 0 of 2 has ended"


def test_the_limit_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert positive_from_environment(VARIABLE, 9.0, "seconds") == 9.0
    monkeypatch.setenv(VARIABLE, "2.5")
    assert positive_from_environment(VARIABLE, 9.0, "seconds") == 2.5
    for text in ("soon", "0", "-1", "nan", "inf", ""):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(ConfigError, match=f"{VARIABLE}: expected seconds, a positive number"):
            positive_from_environment(VARIABLE, 9.0, "seconds")

"""Who is lost, told from signs in a store that all ranks write to."""

import time

import pytest

from evo_grpo.errors import ConfigError
from evo_grpo.population.ranks.heartbeat import (
    VARIABLE,
    Heartbeat,
    positive_from_environment,
)


class Store(dict):
    """A store in this process, which can be gone."""

    gone = False

    def set(self, key, value):
        if self.gone:
            raise RuntimeError("Broken pipe")
        self[key] = value.encode()

    def multi_get(self, keys):
        return [self[key] for key in keys]


@pytest.fixture
def store():
    """All heartbeats of a test end with it."""
    made = Store()
    yield made
    made.gone = True


def beats(store, size, starting):
    """The heartbeats of so many ranks, of which some go on after their first sign."""
    made = [Heartbeat(rank, size, store, limit=0.5) for rank in range(size)]
    for rank in starting:
        made[rank].start()
    return made


def sleeps(seconds):
    time.sleep(seconds)
    return False


@pytest.mark.parametrize("lost", [0, 2])
def test_a_rank_that_is_silent_is_named_by_all_others(store, lost):
    others = [rank for rank in range(3) if rank != lost]
    heartbeats = beats(store, 3, others)
    for rank in others:
        why = heartbeats[rank].wait(sleeps)
        assert why.startswith(f"rank {lost} of 3 has given no sign of life for ")


def test_a_rank_that_is_slow_is_waited_for(store):
    until = time.monotonic() + 1.0
    slow = beats(store, 2, [0, 1])[0]
    assert slow.wait(lambda seconds: time.sleep(seconds) or time.monotonic() > until) == ""


def test_a_closed_connection_is_that_of_the_rank_that_is_silent_since(store):
    assert beats(store, 3, [0, 2])[2].closed() == "rank 1 of 3 has ended"


def test_a_store_that_is_gone_has_gone_with_the_first_rank(store):
    heartbeats = beats(store, 2, [0, 1])
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

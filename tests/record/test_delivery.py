"""The thread that delivers: a database that is gone, slow or broken, and the end of a run."""

import time
import warnings
from threading import Event

import pytest

from evo_grpo.record import delivery as module
from evo_grpo.record.database import Unreachable
from evo_grpo.record.delivery import Delivery

COMMAND = "evo-grpo deliver runs/one-1"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in {
        "_FIRST_WAIT": 0.02,
        "_LONGEST_WAIT": 0.08,
        "SECONDS_TO_STOP": 0.3,
        "SECONDS_WITHOUT_TRIAL": 0.3,
        "SECONDS_TO_FINISH": 5.0,
    }.items():
        monkeypatch.setattr(module, name, seconds)


class Fake:
    """A sender of which the test says what happens.

    Args:
        answers: Of each call of `send`, what it does; the last one is repeated.
    """

    url = "postgresql+psycopg://evo@h/evo"

    def __init__(self, *answers):
        self.answers = list(answers)
        self.sent, self.attempts, self.closed = [], [], 0
        self.added = 0
        self.notes = []

    def send(self, end, *, go_on):
        self.attempts.append(time.monotonic())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        whole = answer(self, go_on) is not False
        self.sent.append(end)
        return whole

    def close(self):
        self.closed += 1


def fine(sender, go_on):
    sender.added += 1


def gone(sender, go_on):
    raise Unreachable("connection refused")


def wait_for(condition, seconds=10):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def told(delivery):
    """What `tell` warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        delivery.tell()
    return [str(one.message) for one in caught]


def test_what_is_there_at_the_start_is_sent_at_once_and_the_rest_when_it_is_told():
    sender = Fake(fine)
    with Delivery(sender, 10, COMMAND) as delivery:
        wait_for(lambda: sender.sent == [10])
        delivery.wake(20)
        wait_for(lambda: sender.sent == [10, 20])
        assert told(delivery) == []
    # The end is sent too: a summary may be there since.
    assert sender.sent == [10, 20, 20]
    assert sender.closed == 1


def test_what_comes_in_the_middle_of_a_send_is_sent_after_it():
    started, go_on = Event(), Event()

    def slow(sender, _):
        started.set()
        assert go_on.wait(10)

    sender = Fake(slow, fine)
    with Delivery(sender, 10, COMMAND) as delivery:
        assert started.wait(10)
        delivery.wake(20)
        go_on.set()
        wait_for(lambda: sender.sent == [10, 20])


def test_a_database_that_is_gone_is_told_once_and_asked_again_more_and_more_rarely():
    sender = Fake(*[gone] * 5, fine)
    with Delivery(sender, 10, COMMAND) as delivery:
        wait_for(lambda: sender.sent == [10])
        (text,) = told(delivery)
        assert "evo@h/evo cannot be reached (connection refused); the run goes on" in text
    assert sender.closed == 5 + 1  # it looks anew each time
    waits = [b - a for a, b in zip(sender.attempts, sender.attempts[1:6], strict=False)]
    for least, wait in zip((0.02, 0.04, 0.08, 0.08, 0.08), waits, strict=True):
        assert wait >= least


def test_a_round_does_not_have_it_asked_sooner(monkeypatch):
    monkeypatch.setattr(module, "_FIRST_WAIT", 0.2)
    sender = Fake(gone, fine)
    with Delivery(sender, 10, COMMAND) as delivery:
        wait_for(lambda: sender.attempts)
        for end in range(11, 20):
            delivery.wake(end)
            time.sleep(0.005)
        assert len(sender.attempts) == 1
        wait_for(lambda: sender.sent == [19])
        told(delivery)


def test_it_is_told_again_where_it_goes_a_second_time():
    sender = Fake(gone, fine, gone, fine)
    with Delivery(sender, 10, COMMAND) as delivery:
        wait_for(lambda: sender.sent == [10])
        assert len(told(delivery)) == 1
        delivery.wake(20)
        wait_for(lambda: sender.sent == [10, 20])
        assert len(told(delivery)) == 1


def test_the_end_of_a_run_waits_while_trials_arrive():
    def slowly(sender, _):
        for _ in range(8):  # longer than is waited for one of them
            time.sleep(0.1)
            sender.added += 1

    sender = Fake(slowly)
    with Delivery(sender, 10, COMMAND):
        pass
    assert sender.sent[-1] == 10
    assert sender.added >= 8


def test_the_end_of_a_run_waits_no_longer_than_for_the_next_trial():
    sender = Fake(gone)
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Delivery(sender, 10, COMMAND) as delivery:
            wait_for(lambda: delivery._notes)
    assert time.monotonic() - start < 3
    texts = [str(one.message) for one in caught]
    assert "cannot be reached" in texts[0]
    assert (
        "not all trials are in postgresql+psycopg://evo@h/evo yet (connection refused)" in texts[1]
    )
    assert texts[1].endswith(f"deliver the rest with: {COMMAND}")


def test_a_database_that_goes_at_the_end_is_told_once_and_with_the_remedy_last(monkeypatch):
    monkeypatch.setattr(module, "SECONDS_TO_STOP", 20.0)
    begun = Event()

    def goes(sender, _):
        begun.set()
        time.sleep(0.4)  # an attempt that outlasts the wait for the next trial
        raise Unreachable("connection refused")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Delivery(Fake(goes), 10, COMMAND):
            assert begun.wait(10)
    (text,) = [str(one.message) for one in caught]
    assert "not all trials" in text
    assert text.endswith(f"(connection refused); deliver the rest with: {COMMAND}")


def test_what_arrives_while_the_thread_is_stopped_is_not_told_to_be_left(monkeypatch):
    monkeypatch.setattr(module, "SECONDS_TO_STOP", 20.0)

    def late(sender, _):
        time.sleep(0.4)
        sender.added += 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Delivery(Fake(fine, late), 10, COMMAND) as delivery:
            wait_for(lambda: delivery._done == 1)


def test_the_end_of_a_run_has_a_bound_even_where_trials_arrive(monkeypatch):
    monkeypatch.setattr(module, "SECONDS_TO_FINISH", 0.5)

    def endlessly(sender, go_on):
        while go_on():
            time.sleep(0.02)
            sender.added += 1
        return False

    expected = pytest.warns(UserWarning, match="not all trials are in")
    with expected, Delivery(Fake(endlessly), 10, COMMAND):
        pass


def test_the_end_does_not_wait_out_a_long_pause(monkeypatch):
    """The server came back while nobody asked: it is asked once more."""
    monkeypatch.setattr(module, "_FIRST_WAIT", 60.0)
    sender = Fake(gone, fine)
    with Delivery(sender, 10, COMMAND) as delivery:
        wait_for(lambda: delivery._notes)
        monkeypatch.setattr(module, "_FIRST_WAIT", 0.02)
        told(delivery)
    assert sender.sent == [10]


@pytest.mark.parametrize("hangs", [False, True])
def test_an_interrupted_run_waits_for_nothing(hangs):
    go_on = Event()

    def stuck(sender, _):
        go_on.wait(20)

    sender = Fake(stuck if hangs else gone)
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        delivery = Delivery(sender, 10, COMMAND)
        wait_for(lambda: sender.attempts)
        with pytest.raises(KeyboardInterrupt), delivery:
            raise KeyboardInterrupt
    assert time.monotonic() - start < 2
    go_on.set()


def test_a_mistake_of_ours_ends_the_delivery_and_not_the_run(caplog):
    def broken(sender, _):
        raise TypeError("no such thing")

    sender = Fake(broken)
    with Delivery(sender, 10, COMMAND) as delivery:
        wait_for(lambda: delivery._broken)
        (text,) = told(delivery)
        assert "no more trials are delivered" in text
        assert "TypeError: no such thing" in text
        assert COMMAND in text
        delivery.wake(20)
    assert len(sender.attempts) == 1
    assert "Traceback" in caplog.text


def test_what_the_sender_has_to_say_is_told():
    def left(sender, _):
        sender.notes.append("study small-2 from now on")

    with Delivery(Fake(left, fine), 10, COMMAND) as delivery:
        wait_for(lambda: delivery._notes)
        assert told(delivery) == ["study small-2 from now on"]

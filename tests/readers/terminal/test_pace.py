"""How fast a run goes, and how long it takes still."""

from dataclasses import replace

import pytest
from shown_run import two_rounds

from evo_grpo.readers.terminal.plain import BESIDE_LEARNING, RECENT, Pace, clock


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time():
    return Clock()


def record(number):
    return replace(two_rounds()[0], round=number, evaluation_tokens=1000)


def test_nothing_is_foreseen_before_anything_was_learned(time):
    pace = Pace(time)
    pace.start(10, 0)
    assert pace.left() is None
    assert pace.tokens_per_second is None
    pace.stage("evaluate", 1, 2)
    assert pace.left() is None
    time.now += 5
    pace.step_done({0: {"tokens": 40.0}, 1: {"tokens": 60.0}})
    assert pace.tokens_per_second == 20


def test_the_first_round_is_judged_by_its_steps(time):
    pace = Pace(time)
    pace.start(10, 0)
    time.now += 5
    pace.stage("learn", 1, 4)
    # A step took five seconds: a round takes four and what follows them.
    each = 20 * BESIDE_LEARNING
    assert pace.left() == pytest.approx(10 * each - 5)


def test_a_stage_may_cover_the_whole_run(time):
    pace = Pace(time, whole=True)
    pace.start(10, 0)
    time.now += 5
    pace.stage("learn", 100, 400)
    assert pace.left() == 15
    time.now += 4  # between two steps
    assert pace.left() == 11
    time.now += 11
    pace.stage("learn", 200, 400)
    assert pace.left() == 20


def test_later_rounds_by_those_before_and_the_time_runs(time):
    pace = Pace(time)
    pace.start(10, 4)
    time.now += 12
    pace.round_done(record(4))
    assert pace.tokens_per_second == 1000  # 2,000 trained and 1,000 evaluated, in three seconds
    assert pace.left() == 5 * 12
    time.now += 10
    assert pace.left() == 5 * 12 - 10
    time.now += 100  # it takes longer than the others did
    assert pace.left() == 4 * 12


def test_old_rounds_are_forgotten_and_nothing_is_left_at_the_end(time):
    pace = Pace(time)
    pace.start(9, 0)
    for number, seconds in enumerate([1000.0, *[10.0] * RECENT]):
        time.now += seconds
        pace.round_done(record(number))
    assert pace.left() == (9 - 1 - RECENT) * 10
    pace.round_done(record(8))
    assert pace.left() == 0


def test_a_clock():
    assert (clock(0), clock(65.4), clock(97_200)) == ("0:00:00", "0:01:05", "27:00:00")

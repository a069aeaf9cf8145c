"""How fast a run goes, and how long it takes still."""

from dataclasses import replace

import pytest
from shown_run import small_config, two_rounds

from evo_grpo.readers.terminal.formatting import clock
from evo_grpo.readers.terminal.pace import BESIDE_LEARNING, RECENT, Completions, Pace
from evo_grpo.settings import PopulationConfig


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


def test_the_first_round_is_judged_by_its_steps(time):
    pace = Pace(time)
    pace.start(10, 0)
    time.now += 5
    pace.stage("learn", 1, 4)
    # A step took five seconds: a round takes four and what follows them.
    each = 20 * BESIDE_LEARNING
    assert pace.left() == pytest.approx(10 * each - 5)


def test_the_first_step_tells_the_time_of_the_run_within_a_factor_of_two(time):
    """A run is played by the clock, at several prices of a completion that is only sampled."""
    config = small_config().replace(
        population=PopulationConfig(size=8, rounds=4, steps_per_round=3),
    )
    work = Completions.of(config.population, config.algorithm, config.evolve)
    assert work.evaluations == (8 * 64, 4 * 64, 2 * 64, 2 * 64)
    step = work.round // 3
    for sampled in (0.3, 0.6, 1.0):
        pace, begun, estimates = Pace(time), time.now, []
        pace.start(4, 0, work)
        for number in range(4):
            for _ in range(3):
                time.now += step
                pace.step_done({0: {"rows": step / 2, "tokens": 5.0 * step}, 1: {"rows": step / 2}})
                estimates.append((time.now, pace.left()))
                assert pace.tokens_per_second is not None
            evaluated = sampled * work.evaluations[number]
            time.now += evaluated
            done = replace(record(number), seconds={"learn": 3.0 * step, "evaluate": evaluated})
            pace.round_done(done)
            estimates.append((time.now, pace.left()))
        time.now += sampled * work.end
        assert pace.left() == pytest.approx(0, abs=1e-6)
        assert begun < estimates[0][0]
        for when, left in estimates:
            assert 0.5 < left / (time.now - when) < 2


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

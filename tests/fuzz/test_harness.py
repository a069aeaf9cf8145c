"""The harness itself: it finds, counts and keeps what breaks a property."""

import fuzzing
from fuzzing import fuzz
from hypothesis import example
from hypothesis import strategies as st


def run(property_test):
    """What a test reported, and what it raised."""
    reported = {}
    try:
        property_test(reported.__setitem__, None)
    except BaseException as error:
        return reported, error
    return reported, None


def test_a_property_that_holds_is_tried_as_often_as_asked(monkeypatch):
    monkeypatch.setattr(fuzzing, "SECONDS", 0)  # also where the others are given a time
    seen = []

    @fuzz(quick=30, number=st.integers())
    @example(number=-(7**77))
    def holds(number):
        seen.append(number)

    reported, error = run(holds)
    assert error is None
    assert reported == {"tried": len(seen), "failures": 0}
    assert seen[0] == -(7**77), "kept inputs come first"
    assert len(seen) == 31
    again, seen[:] = list(seen), []
    run(holds)
    assert seen == again, "without a time they are the same"


def test_a_property_that_breaks_is_counted_and_shown():
    @fuzz(number=st.integers())
    def breaks(number):
        assert number < 1000

    reported, error = run(breaks)
    assert isinstance(error, AssertionError)
    assert reported["failures"] == 1
    assert reported["tried"] > 1
    assert "number=1000" in "".join(error.__notes__)


def test_an_input_that_takes_too_long_breaks_any_property(monkeypatch):
    monkeypatch.setattr(fuzzing, "INPUT_SECONDS", -1.0)
    reported, error = run(fuzz(number=st.integers())(lambda number: None))
    assert isinstance(error, AssertionError)
    assert reported["failures"] == 1


def test_with_a_time_inputs_are_tried_until_it_is_over(monkeypatch):
    monkeypatch.setattr(fuzzing, "SECONDS", 0.3)
    monkeypatch.delenv("EVO_GRPO_TORTURE_TABLE", raising=False)  # it is no property of the package
    reported, error = run(fuzz(quick=5, number=st.integers())(lambda number: None))
    assert error is None
    assert reported["tried"] >= 5 + fuzzing.BATCH

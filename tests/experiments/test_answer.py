"""The table of seconds to an answer: medians and ratios of runs, some of which never have it."""

import argparse
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "bench"


@pytest.fixture
def answer(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    import answer

    return answer


def run_of(side, seed, *best, seconds=10.0, **more):
    """Return a run whose imports take 5 seconds, and each round `seconds`."""
    ends = [5.0 + seconds * (number + 1) for number in range(len(best))]
    rounds = [
        {"best": value, "seconds": end + 1, "cpu_seconds": end, **more}
        for value, end in zip(best, ends, strict=True)
    ]
    imported = {"seconds": 6.0, "cpu_seconds": 5.0}
    return {"task": "sums", "side": side, "seed": seed, "imported": imported, "rounds": rounds}


def rows(answer, runs, level):
    options = argparse.Namespace(quick=False, out=None)
    table = answer.tables(options, runs).rows[f"sums, until {level} on validation"]
    return {row["side"]: row for row in table}


def test_seconds_count_from_the_end_of_the_imports_and_from_the_start(answer):
    row = rows(answer, [run_of("new", 0, 0.5, 0.8, 0.9)], "0.80")["new"]
    assert (row["cpu_seconds"], row["wall_seconds"]) == ("20.0", "20.0")
    assert (row["with_imports"], row["wall_seconds_with_imports"]) == ("25.0", "26.0")


def test_a_run_without_the_level_counts_as_all_of_its_seconds_and_more(answer):
    ours = [run_of("new", seed, 0.8) for seed in range(3)]
    theirs = [
        run_of("trl", 0, 0.85, seconds=5.0),
        run_of("trl", 1, 0.4, 0.5),
        run_of("trl", 2, 0.4, 0.7, 0.8),
    ]
    row = rows(answer, ours + theirs, "0.80")["trl"]
    assert (row["seeds"], row["reached"]) == (3, 2)
    # The second run may have needed any time above its own, and so may the median.
    assert row["cpu_seconds"] == "> 20.0"
    assert row["over_new"] == "> 2.0 (0.5 to > 3.0)"


def test_a_median_below_all_runs_without_the_level_is_exact(answer):
    ours = [run_of("new", seed, 0.8) for seed in range(3)]
    theirs = [run_of("trl", 0, 0.8), run_of("trl", 1, 0.1, 0.8), run_of("trl", 2, 0.1, 0.1, 0.1)]
    assert rows(answer, ours + theirs, "0.80")["trl"]["over_new"] == "2.0 (1.0 to > 3.0)"


def test_collections_of_garbage_are_told_apart(answer):
    runs = [run_of("new", 0, 0.8), run_of("agilerl", 0, 0.8, seconds=95.0, gc_seconds=50.5)]
    found = rows(answer, runs, "0.80")
    assert found["agilerl"]["cpu_seconds"] == "95.0"
    # Half of the 101 seconds on the wall, and so half of the processor's 100.
    assert found["agilerl without gc.collect()"]["with_imports"] == "50.0"

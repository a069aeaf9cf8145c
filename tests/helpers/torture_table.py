"""What torture has tried, as lines of a file from which `make torture` prints its table."""

import json
import os
import random
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import pytest


def shares(number, cases):
    """Return the parameters of a test in parts: a sample, then shares of equally many cases.

    A part is a function of all cases, given as a range, that returns its own.
    """
    sample = pytest.param(lambda all: random.Random(0).sample(all, cases), marks=pytest.mark.slow)
    torture = [pytest.mark.torture, pytest.mark.timeout(3600)]
    parts = [lambda all, n=n: all[n::number] for n in range(number)]
    ids = ["sample", *(f"share {n + 1}" for n in range(number))]
    return pytest.mark.parametrize(
        "part", [sample, *(pytest.param(part, marks=torture) for part in parts)], ids=ids
    )


def count(name, otherwise):
    """Return how often to try, from a variable of the environment."""
    return int(os.environ.get(name, otherwise))


def tried(how, what, times):
    """Note that something was tried so many times, and held each time."""
    file = os.environ.get("EVO_GRPO_TORTURE_TABLE")
    if file is None:
        return
    line = {"how": how, "what": what, "times": times, "date": datetime.now(UTC).date().isoformat()}
    with Path(file).open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(line) + "\n")


def main():
    """Print the table."""
    text = Path(os.environ["EVO_GRPO_TORTURE_TABLE"]).read_text(encoding="utf-8")
    times = defaultdict(int)
    for line in map(json.loads, text.splitlines()):
        times[line["how"], line["what"], line["date"]] += line["times"]
    print("| tried | with | times | failed | date |\n|---|---|---:|---:|---|")
    for (how, what, date), number in sorted(times.items()):
        print(f"| {how} | {what} | {number:,} | 0 | {date} |")


if __name__ == "__main__":
    main()

"""What trackers and the report cost a run: the default run with them and without, in turns.

    python experiments/bench/trackers.py [--quick] [--rounds N] [--kinds tensorboard wandb trackio]

The readers work in a process beside the run. The time until summary.json is written is what they
could slow down; how long the run waits for them after that is measured apart. So is the processor
time of the thread that trains, which changes less than the speed of the machine.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from common import ROOT, Report, interval, parser, quiet

quiet()

from evo_grpo import settings as configuration  # noqa: E402 -- threads first
from evo_grpo.readers.reader import ReaderFile  # noqa: E402
from evo_grpo.record.names import REPORT_READER, SUMMARY  # noqa: E402
from evo_grpo.settings.trackers import KINDS  # noqa: E402
from evo_grpo.training import followers  # noqa: E402
from evo_grpo.training.run import run  # noqa: E402

DEFAULT = ROOT / "evo_grpo" / "settings" / "templates" / "sums" / "population.yaml"
TARGET = 1.02
TABLE = "The default run (seconds)"


def play(kinds: Sequence[str], overrides: Sequence[str], *, report: bool) -> dict[str, float]:
    """Play one run; returns its seconds."""
    trackers = f"record.trackers=[{', '.join(kinds)}]"
    config = configuration.load(DEFAULT, [*overrides, trackers])
    with tempfile.TemporaryDirectory(prefix="bench-trackers-") as folder:
        # The wall clock, since a file has its time by it.
        begin, begin_processor = time.time(), time.thread_time()
        done = run(config, out=Path(folder) / "run", report=report)
        whole, processor = time.time() - begin, time.thread_time() - begin_processor
        trained = (done / SUMMARY).stat().st_mtime - begin
        for process in followers._unfinished_processes:
            process.wait()  # else it would slow down the next turn
        for name in [*kinds, *([REPORT_READER] if report else [])]:
            with closing(ReaderFile(done, name)) as place:
                if not place.cursor.summary:
                    raise RuntimeError(f"{name} has not read all of the run")
    return {"until summary.json": trained, "wait after": whole - trained, "processor": processor}


def main() -> int:
    """Measure both in turns."""
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=["tensorboard", "wandb", "trackio"]
    )
    arguments.add_argument("--rounds", type=int, default=12, help="of the default run")
    given = arguments.parse_args()
    small = ["population.rounds=2", "population.size=2", "population.steps_per_round=2"]
    overrides = (
        small if given.quick else [f"population.rounds={given.rounds}", "population.sizes=constant"]
    )
    repeats = given.repeats or (1 if given.quick else 10)
    report = Report("trackers", given)
    sides = {"without": [], "with": given.kinds}
    samples: dict[str, dict[str, list[float]]] = {}
    for turn in range(repeats + 1):
        # The first side changes, so that a machine that slows down favours neither.
        for side in list(sides) if turn % 2 else list(sides)[::-1]:
            seconds = play(sides[side], overrides, report=side == "with")
            if turn == 0:
                continue  # the first of each side warms up
            report.add(TABLE, side=side, turn=turn, **seconds)
            for name, value in seconds.items():
                samples.setdefault(name, {}).setdefault(side, []).append(value)
    what = ", ".join([*given.kinds, "report"])
    for name in ("until summary.json", "processor"):
        value, low, high = interval(samples[name]["without"], samples[name]["with"])
        without = statistics.median(samples[name]["without"])
        note = f"{low:.3f} to {high:.3f}; {without:.1f} s without"
        report.at_most(f"{name}, with {what} over without", value, TARGET, note)
    waits = samples["wait after"]
    note = f"{statistics.median(waits['without']):.2f} s without"
    limit = followers.SECONDS_TO_FINISH
    report.at_most("seconds waited after it", statistics.median(waits["with"]), limit, note)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

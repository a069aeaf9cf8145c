"""What trackers cost a run: the default run with some on, and with none, in turns.

    python experiments/bench/trackers.py [--quick] [--rounds N] [--kinds tensorboard wandb trackio]

The rounds alone, which is what trackers could slow down, and the whole run with its end, at which a
run waits for them. A machine whose speed changes between two runs hides what little that is, so the
whole is also taken apart: the processor time of the thread that trains, and what it waits beside
that (for its observer, its disk, or a free core), which no machine's speed changes.
"""

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import ROOT, Report, interval, parser, quiet

quiet()

from evo_grpo import settings as configuration  # noqa: E402 -- threads first
from evo_grpo.record.folder import read_rounds  # noqa: E402
from evo_grpo.record.observer import Observer  # noqa: E402
from evo_grpo.settings.trackers import MODULES, TrackerConfig  # noqa: E402
from evo_grpo.trackers.tracker import Trackers  # noqa: E402
from evo_grpo.training import run  # noqa: E402

DEFAULT = ROOT / "evo_grpo" / "settings" / "population.yaml"
TARGET = 1.02
TABLE = "The default run (seconds)"


class Timed(Observer):
    """Measures how long the training thread waits for an observer.

    Args:
        observer: It.
    """

    def __init__(self, observer: Observer) -> None:
        """Start at zero."""
        self.observer = observer
        self.seconds = 0.0
        self.steps = 0

    def started(
        self, run_dir: Path | None, rounds: int, first_round: int, settings: object
    ) -> None:
        """Pass it on."""
        self.observer.started(run_dir, rounds, first_round, settings)

    def step_done(self, round: int, step: int, metrics: Mapping[Any, Mapping[str, float]]) -> None:
        """Pass it on, timed."""
        begin = time.perf_counter()
        self.observer.step_done(round, step, metrics)
        self.seconds += time.perf_counter() - begin
        self.steps += 1

    def round_done(self, record: Any) -> None:  # noqa: ANN401 -- a RoundRecord
        """Pass it on, timed."""
        begin = time.perf_counter()
        self.observer.round_done(record)
        self.seconds += time.perf_counter() - begin

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Pass it on; what a tracker takes to end is in the time of the whole run."""
        self.observer.finished(summary)


def play(kinds: Sequence[str], overrides: Sequence[str]) -> dict[str, float]:
    """Play one run; returns its seconds."""
    config = configuration.load(DEFAULT, overrides)
    observer = Timed(Trackers([TrackerConfig(kind=kind) for kind in kinds]))
    with tempfile.TemporaryDirectory(prefix="bench-trackers-") as folder:
        begin, begin_processor = time.perf_counter(), time.thread_time()
        done = run(config, out=Path(folder) / "run", observer=observer)
        whole, processor = time.perf_counter() - begin, time.thread_time() - begin_processor
        for thread in threading.enumerate():
            if thread.name.startswith("tracker-"):
                thread.join()  # its process, done with the run, must not slow down the next turn
        rounds = sum((r.ended or 0.0) - (r.started or 0.0) for r in read_rounds(done))
    return {
        "rounds": rounds,
        "whole": whole,
        "processor": processor,
        "waits": whole - processor,
        "observer, a step": observer.seconds / observer.steps,
    }


def main() -> int:
    """Measure both in turns."""
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument(
        "--kinds", nargs="+", choices=MODULES, default=["tensorboard", "wandb", "trackio"]
    )
    arguments.add_argument("--rounds", type=int, default=12, help="of the default run")
    given = arguments.parse_args()
    small = ["population.rounds=2", "population.size=2", "population.steps_per_round=2"]
    overrides = (
        small if given.quick else [f"population.rounds={given.rounds}", "population.sizes=constant"]
    )
    repeats = given.repeats or (1 if given.quick else 5)
    report = Report("trackers", given)
    sides = {"without": [], "with": given.kinds}
    samples: dict[str, dict[str, list[float]]] = {}
    for turn in range(repeats + 1):
        # The one that goes first changes, so that a machine that slows down is no side's fault.
        for side in list(sides) if turn % 2 else list(sides)[::-1]:
            seconds = play(sides[side], overrides)
            if turn == 0:
                continue  # the first of each side warms up
            report.add(TABLE, side=side, turn=turn, **seconds)
            for name, value in seconds.items():
                samples.setdefault(name, {}).setdefault(side, []).append(value)
    what = ", ".join(given.kinds)
    middle = {name: statistics.median(one["without"]) for name, one in samples.items()}
    for name in ("rounds", "whole", "processor"):
        value, low, high = interval(samples[name]["without"], samples[name]["with"])
        note = f"{low:.3f} to {high:.3f}; {middle[name]:.1f} s without"
        report.at_most(f"{name}, with {what} over without", value, TARGET, note)
    pairs = zip(samples["waits"]["with"], samples["waits"]["without"], strict=True)
    more = statistics.median(a - b for a, b in pairs)
    note = f"{more:.2f} s more than the {middle['waits']:.2f} s without"
    report.at_most("waits more, share of the whole", more / middle["whole"], TARGET - 1, note)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

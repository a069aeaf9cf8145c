"""Compare ways to spend the same rows: one command, which goes on where it was stopped.

    python experiments/evolution/run.py --task sums
    python experiments/evolution/run.py --task foods --arms random new --seeds 0-7 --jobs 2
    python experiments/evolution/run.py --quick
    python experiments/evolution/report.py

Every finished run is a line of results/<task>.jsonl; a run that has its line is not run again.
Without --seeds, all sixteen. README.md says what the arms are and what came out.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# One thread per process: the embedded models gain nothing from more. Before numpy and torch.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from arms import ARMS, GROUPS, QUICK_ARMS, TASKS, Task, chosen, overrides
from lines import Line, append, circumstances, commit, finished, read
from report import deviations, number, terminal, unplanned
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

HERE = Path(__file__).resolve().parent
#: A window as long as an evening: runs of different arms take different times.
SPEED_WINDOW = 6 * 3600.0


def seeds(text: str) -> list[int]:
    """Read seeds: "0-15", "3", or "0,2,8-15"."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        found += range(int(first), int(last if dash else first) + 1)
    return found


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", nargs="+", choices=list(TASKS), default=["sums"])
    parser.add_argument(
        "--arms", nargs="+", metavar="ARM",
        help=f"arms, or groups of them ({', '.join(GROUPS)}); default: those of the task",
    )  # fmt: skip
    parser.add_argument("--seeds", type=seeds, help="such as 0-15, the default, or 0,2,5-7")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=1, help="processes at once")
    parser.add_argument("--out", type=Path, help="folder of the results; default: results/")
    parser.add_argument(
        "--quick", action="store_true",
        help="two seeds of three arms for two rounds, into runs/evolution-quick",
    )  # fmt: skip
    return parser.parse_args(given)


def jobs_left(
    task: Task, names: Sequence[str], wanted: Sequence[int], lines: Sequence[Line]
) -> list[tuple[str, int]]:
    """Return the (arm, seed) pairs without a line, all arms of a seed before the next seed.

    A line that was made with other settings than the arm has now does not count.
    """

    def settings(name: str, seed: int) -> dict[str, Any] | None:
        arm = ARMS.get(name)
        return None if arm is None else overrides(task, arm, seed)

    done = finished(lines, settings)
    return [(name, seed) for seed in wanted for name in names if (name, seed) not in done]


def play(
    task: str,
    jobs: Sequence[tuple[str, int]],
    out: Path,
    *,
    processes: int,
    quick: bool,
    console: Console,
) -> None:
    """Run what is left of a task and append a line as each run finishes."""
    shared = circumstances(processes)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with (
        Progress(*columns, console=console, speed_estimate_period=SPEED_WINDOW) as progress,
        ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool,
    ):
        bar = progress.add_task(task, total=len(jobs))
        futures = [pool.submit(_measure, task, arm, seed, quick) for arm, seed in jobs]
        try:
            for future in as_completed(futures):
                line = {**future.result(), **shared}
                append(out / f"{task}.jsonl", line)
                progress.update(bar, advance=1)
                console.print(_told(line), highlight=False)
        except BaseException:
            # What runs is finished and lost; what waits is left to the next call.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _measure(task: str, arm: str, seed: int, quick: bool) -> dict[str, Any]:
    """Measure in a process of its own, which alone loads torch."""
    import one_run

    one_run.quiet()
    return one_run.measure(task, arm, seed, quick)


def _told(line: dict[str, Any]) -> str:
    test = number(line["test"]["mean"]) if line["state"] == "ok" else "failed"
    return f"{line['arm']}, seed {line['seed']}: {test}, {line['wall_seconds']:.1f} s"


def main(given: Sequence[str] | None = None) -> int:
    """Run what has no line yet, print the tables, and hold the rows of all arms together."""
    options = arguments(given)
    console = Console(width=None if sys.stdout.isatty() else 120)
    out = options.out or (Path("runs/evolution-quick") if options.quick else HERE / "results")
    wanted = options.seeds or list(range(2 if options.quick else 16))
    good = True
    for task in options.task:
        named = options.arms or (QUICK_ARMS if options.quick else TASKS[task].arms)
        try:
            names = [arm.name for arm in chosen(list(named))]
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        lines = read(out / f"{task}.jsonl")
        size = TASKS[task].quick() if options.quick else TASKS[task]
        jobs = jobs_left(size, names, wanted, lines)
        here = len(names) * len(wanted)
        console.print(f"{task}: {here - len(jobs)} of {here} runs are there, {len(jobs)} to go")
        if others := {line["commit"] for line in lines} - {commit()}:
            console.print(
                f"some were measured at {', '.join(sorted(c[:7] for c in others))}; delete their "
                f"lines from {task}.jsonl to measure them again",
                highlight=False,
            )
        if jobs:
            play(
                task, jobs, out, processes=options.jobs, quick=options.quick, console=console
            )  # fmt: skip
        lines = [line for line in read(out / f"{task}.jsonl") if line["arm"] in ARMS]
        terminal(lines, console)
        good &= _hold(task, lines)
    return 0 if good or options.quick else 1


def _hold(task: str, lines: Sequence[Line]) -> bool:
    """Say which arms are off the budget, and whether all sampled the rows of their plans."""
    off = unplanned(lines)
    for arm, more in off.items():
        print(f"{task}, {arm}: {more:+.1%} rows than planned; mend arms.py", file=sys.stderr)
    for arm, more in deviations(lines).items():
        remedy = f"; arms.RATIOS could make it {1 / (1 + more):.3f} of the rows"
        print(f"{task}, {arm}: {more:+.1%} tokens{remedy}", file=sys.stderr)
    return not off


if __name__ == "__main__":
    sys.exit(main())

"""A run of 256 agents over 200 rounds: the seconds of all that is not training, and how they grow.

    python experiments/bench/many.py [--quick] [--agents N] [--rounds N] [--out FILE]

A process really plays the run, with short rounds of the embedded model and a population of constant
size, in front of a terminal, and times the functions below round by round. A function that is
linear in the run takes as long in the last fifth of the rounds as in the first. Then each command
reads the run in a process of its own.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import ROOT, Report, child, memory, parser, quiet, tell

SCRIPT = Path(__file__)
AGENTS, ROUNDS = 256, 200
SMALL = (16, 10)
TARGETS = {"report": 10.0, "leaderboard": 1.0, "resume": 5.0}
#: What is timed: module, function or class.method, and what the table calls it.
WATCHED = (
    ("evo_grpo.population.round", "plan_round", "plan: selection, mutation, reasons"),
    ("evo_grpo.population.round", "carry_out", "copies of agents and hyperparameters"),
    ("evo_grpo.population.round", "save", "checkpoints: copies and digests"),
    ("evo_grpo.population.checkpoints.write", "Snapshot.write", "checkpoints: files (writer)"),
    ("evo_grpo.record.run_dir", "RunDir.append_step", "metrics of steps (writer)"),
    ("evo_grpo.record.run_dir", "RunDir.append_round", "line of rounds.jsonl (writer)"),
    ("evo_grpo.record.study", "write_study", "Optuna's trials, at the end"),
    ("evo_grpo.record.leaderboard", "write_csv", "leaderboard.csv (writer)"),
    ("evo_grpo.record.run_dir", "RunDir.keep_best", "copy of the best agent (writer)"),
    ("evo_grpo.record.run_dir", "RunDir.drop_checkpoints", "old checkpoints (writer)"),
    ("evo_grpo.readers.terminal.progress", "RunProgress.step_done", "terminal: a step"),
    ("evo_grpo.readers.terminal.live", "LiveTable.round_done", "terminal: a round"),
    ("rich.live", "Live.refresh", "terminal: the display, 8 times a second"),
)
Seconds = dict[str, list[tuple[int, float, float]]]
"""Round, wall and processor seconds of each call, by name."""


def settings(agents: int, rounds: int) -> dict[str, Any]:
    """Return a run of many agents with rounds as short as they get and 64 validation prompts."""
    return {
        "name": "many",
        "model": {"name": "tiny-sums", "lora": {"r": 2}},
        "env": {"kind": "sums"},
        "population": {
            "size": agents, "rounds": rounds, "steps_per_round": 1, "sizes": "constant",
        },
        "algorithm": {"group_size": 2, "prompts_per_step": 1, "lr": 1e-4},
        "evolve": {
            "hyperparameters": {"lr": {"min": 1e-5, "max": 1e-2}, "beta": {"min": 0, "max": 0.1}},
            "fitness": {"prompts": 64, "test_prompts": 64, "final_samples": 0},
            "dead_steps": None,
        },
        "engine": {"device": "cpu", "threads": 1},
        "record": {"checkpoints": "last"},
    }  # fmt: skip


@contextmanager
def timing(
    module: str, name: str, calls: list[tuple[int, float, float]], now: list[int]
) -> Generator[None]:
    """Time each call of a function of the package."""
    from importlib import import_module

    owner: Any = import_module(module)
    *classes, last = name.split(".")
    for one in classes:
        owner = getattr(owner, one)
    function = getattr(owner, last)

    def timed(*arguments: object, **named: object) -> object:
        wall, processor = time.perf_counter(), time.thread_time()
        try:
            return function(*arguments, **named)
        finally:
            spent = time.perf_counter() - wall, time.thread_time() - processor
            calls.append((now[0], *spent))

    with mock.patch.object(owner, last, timed):
        yield


def play(job: Mapping[str, Any]) -> dict[str, Any]:
    """Child: play the run in front of a terminal, and tell the seconds of each call."""
    quiet()
    from rich.console import Console

    from evo_grpo import run
    from evo_grpo.readers.terminal.live import LiveTable
    from evo_grpo.record.observer import Observer, ObserverList

    now = [0]

    class Count(Observer):
        """Counts the rounds, and stops the run after the last, as Ctrl-C does."""

        def round_done(self, record: Any) -> None:  # noqa: ANN401
            """Begin the next round."""
            now[0] = record.round + 1
            if now[0] == job["rounds"]:
                raise KeyboardInterrupt

    found: Seconds = {label: [] for *_, label in WATCHED}
    start = time.perf_counter()
    with ExitStack() as stack:
        nowhere = stack.enter_context(open(os.devnull, "w"))
        screen = Console(
            file=nowhere, force_terminal=True, force_interactive=True, color_system="truecolor",
            width=160, height=50,
        )  # fmt: skip
        for module, name, label in WATCHED:
            stack.enter_context(timing(module, name, found[label], now))
        progress = stack.enter_context(LiveTable(screen))
        # One round more than is played: a finished run is not resumed.
        config = settings(job["agents"], job["rounds"] + 1)
        with suppress(KeyboardInterrupt):
            run(config, out=Path(job["folder"]), observer=ObserverList((progress, Count())))
    return {"calls": found, "whole": time.perf_counter() - start, "peak_mib": memory("VmHWM")}


def per_round(calls: Sequence[Sequence[float]], rounds: Sequence[int], what: int) -> float:
    """Return the median seconds of some rounds."""
    sums = dict.fromkeys(rounds, 0.0)
    for call in calls:
        if call[0] in sums:
            sums[int(call[0])] += call[what]
    return statistics.median(sums.values())


def show_calls(report: Report, told: Mapping[str, Any], agents: int, rounds: int) -> None:
    """Show the seconds of each function, early and late in the run."""
    part = max(1, rounds // 5)
    early, late = range(1, 1 + part), range(rounds - part, rounds)
    title = f"{agents} agents, {rounds} rounds: milliseconds a round"
    for label, calls in told["calls"].items():
        report.add(
            title, what=label,
            first_fifth=1000 * per_round(calls, early, 1),
            last_fifth=1000 * per_round(calls, late, 1),
            processor_last_fifth=1000 * per_round(calls, late, 2),
            whole_run_seconds=sum(call[1] for call in calls),
        )  # fmt: skip
    report.add(title, what="everything, with training", whole_run_seconds=told["whole"])
    report.add("Peak memory (MiB)", whole_run=told["peak_mib"])


def command(*arguments: str) -> float:
    """Return the seconds of a command of evo-grpo."""
    import subprocess

    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "evo_grpo", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"many: evo-grpo {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return time.perf_counter() - start


def read(report: Report, folder: Path, small: Path, repeats: int) -> None:
    """Time the commands that read the run, and the same over a run of one round."""
    for name in ("leaderboard", "report"):
        over = [(command(name, str(folder)), command(name, str(small))) for _ in range(repeats)]
        whole, start = (statistics.median(each) for each in zip(*over, strict=True))
        report.add("Commands (seconds)", command=name, whole=whole, of_a_run_of_one_round=start)
        report.at_most(f"{name}, beyond a run of one round", whole - start, TARGETS[name])
    longrun = SCRIPT.with_name("longrun.py")
    lines = [child(longrun, {"kind": "resume", "folder": str(folder)}) for _ in range(repeats)]
    parts = {name: statistics.median(line[name] for line in lines) for name in lines[0]}
    report.add("Resume up to the next round (seconds)", **parts)
    beyond = parts["rounds.jsonl"] + parts["the rest"]
    report.at_most("resume, beyond libraries, base and agents", beyond, TARGETS["resume"])


def arguments() -> argparse.Namespace:
    """Read the command line."""
    given = parser(__doc__.partition("\n")[0])
    given.add_argument("--agents", type=int)
    given.add_argument("--rounds", type=int)
    given.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    return given.parse_args()


def main() -> int:
    """Play the run, then read it."""
    given = arguments()
    if given.child is not None:
        tell(play(given.child))
        return 0
    del given.child
    report = Report("many", given)
    agents, rounds = SMALL if given.quick else (AGENTS, ROUNDS)
    agents, rounds = given.agents or agents, given.rounds or rounds
    with tempfile.TemporaryDirectory(prefix="bench-many-") as name:
        folder, small = Path(name) / "run", Path(name) / "small"
        job = {"agents": agents, "rounds": rounds, "folder": str(folder)}
        show_calls(report, child(SCRIPT, job), agents, rounds)
        child(SCRIPT, {"agents": 4, "rounds": 1, "folder": str(small)})
        read(report, folder, small, given.repeats or (1 if given.quick else 3))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

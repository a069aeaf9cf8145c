"""One run in one process and in two: the rounds alone, and the whole command with its start.

    python experiments/bench/processes.py [--quick] [--cases default 135M turns] [--repeats N]

Two shards each, one thread for each process: the same result, so the same work. The sides alternate
and the first one changes. Then one run of each side with marks says where the seconds go.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import ROOT, Report, interval, parser, quiet

TEMPLATES = ROOT / "evo_grpo" / "settings" / "templates"
SIDES = {"one process": 1, "two processes": 2}
TARGET = 1.6  # of the whole command of the default run
MARKS, BEGIN = "BENCH_MARKS", "BENCH_BEGIN"
MARKED = "--marked"
#: Calls of a run that are timed, by what they are.
CALLS = {
    "find_team": "meeting the other rank",
    "check_same_run": "comparison of inputs",
    "prepare": "model, agents and comparison of the base",
    "play_and_judge": "rounds and test",
}


@dataclass(frozen=True)
class Case:
    """A run that is timed.

    Attributes:
        file: Its YAML.
        settings: What is changed.
    """

    file: Path
    settings: tuple[str, ...] = ()

    def command(self, processes: int, out: Path) -> list[str]:
        """Return the arguments of `evo-grpo`."""
        changed = (part for one in ("engine.shards=2", *self.settings) for part in ("--set", one))
        nproc = ["--nproc", str(processes)] if processes > 1 else []
        return ["run", str(self.file), "--out", str(out), "--quiet", *nproc, *changed]


def cases(names: Sequence[str], folder: Path, *, small: bool) -> dict[str, Case]:
    """Return the runs that are asked for."""
    found: dict[str, Case] = {}
    few = () if not small else (
        "population.size=2", "population.rounds=2", "population.steps_per_round=1",
        "evolve.fitness.prompts=8", "evolve.fitness.test_prompts=8",
    )  # fmt: skip
    default = TEMPLATES / "sums" / "population.yaml"
    if "default" in names:
        found["default"] = Case(default, few)
    if "135M" in names:
        quiet()
        from jobs import load_base  # loads torch

        shape = "1M" if small else "135M"
        load_base(shape).save(folder / shape)
        own = (
            f"model.name={folder / shape}", "population.size=4", "population.rounds=2",
            "population.steps_per_round=2", "algorithm.max_output_tokens=16",
            "evolve.fitness.prompts=8", "evolve.fitness.test_prompts=8",
        )  # fmt: skip
        found[shape] = Case(default, own)
    if "turns" in names:
        found["turns"] = Case(TEMPLATES / "multi_turn" / "population.yaml", few)
    return found


def play(case: Case, processes: int, marks: Path | None = None) -> dict[str, float]:
    """Run a case; return the seconds of its rounds and of the whole command."""
    run = [str(Path(__file__)), MARKED] if marks else ["-m", "evo_grpo"]
    with tempfile.TemporaryDirectory(prefix="bench-processes-") as folder:
        out = Path(folder) / "run"
        begin = time.time()
        done = subprocess.run(
            [sys.executable, *run, *case.command(processes, out)],
            env={**os.environ, MARKS: str(marks), BEGIN: repr(begin)},
            capture_output=True, text=True, check=False, cwd=ROOT,
        )  # fmt: skip
        whole = time.time() - begin
        if done.returncode:
            raise SystemExit(f"processes: {case.file} failed:\n{done.stderr[-2000:]}")
        lines = (out / "rounds.jsonl").read_text().splitlines()
    rounds = json.loads(lines[-1])["ended"] - json.loads(lines[0])["started"]
    return {"rounds": rounds, "whole": whole, "rest": whole - rounds}


def compare(report: Report, name: str, case: Case, repeats: int) -> None:
    """Time both sides in turns."""
    samples: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for turn in range(repeats):
        for side in list(SIDES) if turn % 2 else list(SIDES)[::-1]:
            samples[side].append(play(case, SIDES[side]))
    for side, found in samples.items():
        report.add(
            f"Two shards, {name} (seconds, medians of {repeats})", side=side,
            **{part: statistics.median(one[part] for one in found) for part in found[0]},
        )  # fmt: skip
    for part in ("rounds", "whole"):
        one, two = ([each[part] for each in samples[side]] for side in SIDES)
        value, low, high = interval(two, one)
        what = f"{name}: one process over two, {part}"
        target = TARGET if (name, part) == ("default", "whole") else 1.0
        report.at_least(what, value, target, f"{low:.2f} to {high:.2f}")


def dissect(report: Report, name: str, case: Case) -> None:
    """Run both sides once with marks, and report the seconds of each part."""
    for side, processes in SIDES.items():
        with tempfile.TemporaryDirectory(prefix="bench-processes-") as folder:
            play(case, processes, Path(folder))
            for place in sorted(Path(folder).iterdir()):
                for what, seconds, processor in json.loads(place.read_text()):
                    report.add(f"Where the seconds go, {name}", side=side, of=place.stem,
                               part=what, seconds=seconds, processor=processor)  # fmt: skip


def marked(arguments: Sequence[str]) -> None:
    """Run `evo-grpo` with marks, in this process and in the ranks that it starts."""
    import atexit

    found: list[tuple[str, float, float]] = []
    last = [float(os.environ[BEGIN]), 0.0]

    def mark(what: str) -> None:
        now = [time.time(), time.process_time()]
        found.append((what, now[0] - last[0], now[1] - last[1]))
        last[:] = now

    def write() -> None:
        mark("leaving")
        rank = os.environ.get("RANK")
        name = "a launcher" if rank is None and "--nproc" in arguments else f"rank {rank or 0}"
        (Path(os.environ[MARKS]) / f"{name}.json").write_text(json.dumps(found))

    from evo_grpo.cli import main, showing
    from evo_grpo.cli.commands import train as launching

    start, load = launching._run_ranks, showing.import_module
    atexit.register(write)
    mark("Python")

    def started(ranks: int, command: list[str]) -> None:
        mark("command line and settings")
        os.environ[BEGIN] = repr(time.time())
        start(ranks, [command[0], str(Path(__file__)), MARKED, *command[4:]])

    def loaded(name: str) -> Any:  # noqa: ANN401 -- a module
        mark("command line and settings")
        for package in ("torch", "transformers", "bitsandbytes", "peft", name):
            try:
                module = load(package)
            except ImportError:
                continue
            mark(f"import of {package}")
        for call, what in CALLS.items():
            setattr(module, call, watched(getattr(module, call), what))
        return module

    def watched(call: Callable[..., Any], what: str) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:  # noqa: ANN401
            mark("between")
            done = call(*given, **named)
            mark(what)
            return done

        return timed

    launching._run_ranks = started  # pyright: ignore[reportAttributeAccessIssue]
    showing.import_module = loaded
    sys.argv = ["evo-grpo", *arguments]
    main()


def arguments() -> argparse.Namespace:
    """Read the command line."""
    given = parser(str(__doc__).partition("\n")[0])
    names = ("default", "135M", "turns")
    given.add_argument("--cases", nargs="+", choices=names, default=list(names))
    return given.parse_args()


def main() -> int:
    """Time the cases that are asked for."""
    given = arguments()
    report = Report("processes", given)
    with tempfile.TemporaryDirectory(prefix="bench-processes-") as folder:
        for name, case in cases(given.cases, Path(folder), small=given.quick).items():
            compare(report, name, case, given.repeats or (1 if given.quick else 5))
            dissect(report, name, case)
    return report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == [MARKED]:
        marked(sys.argv[2:])
    else:
        sys.exit(main())

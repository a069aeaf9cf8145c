"""What every benchmark shares: arguments, interleaved samples, facts of the machine, the report.

Samples are taken in turns (A B A B ...), so that a machine that slows down or is disturbed slows
all sides alike, and a ratio is the median of the ratios of neighbouring samples. Import this before
torch: the thread count has to be in the environment by then.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGES = ("evo-grpo", "torch", "transformers", "peft", "numpy")
# What a child process of a benchmark writes before a line of JSON.
MARK = "RESULT "
#: Start of the benchmark; child processes have it by the environment.
BEGAN = float(os.environ.setdefault("BENCH_BEGAN", str(time.time())))

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
os.environ.setdefault("MKL_NUM_THREADS", os.environ["OMP_NUM_THREADS"])
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# An installed package is compiled; with this variable set, ours would be compiled at every start of
# a child process.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

Samples = dict[str, list[float]]
"""Seconds by name, one per repeat; the i-th samples of all names were taken side by side."""


def parser(description: str) -> argparse.ArgumentParser:
    """Return the arguments that every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="smallest sizes, to see that it works")
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file")
    parser.add_argument("--repeats", type=int, help="samples of each side")
    return parser


def quiet() -> int:
    """Fix torch's threads, silence what third parties say, and return the threads.

    Child processes inherit the count by OMP_NUM_THREADS.
    """
    import torch  # startup.py measures what happens without it
    from transformers.utils import logging

    from evo_grpo.cli.host_memory import keep_freed_memory

    keep_freed_memory()  # as the command line does
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return torch.get_num_threads()


def timed(call: Callable[[], object]) -> float:
    """Return the wall seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleaved(
    sides: Mapping[str, Callable[[], object]], repeats: int, *, warmup: int = 1
) -> Samples:
    """Time every side in turns.

    Args:
        sides: What to run, by name. One that returns a float is asked for its own seconds
            (a peer in another process); else the call is timed.
        repeats: Samples of each side.
        warmup: Calls of each side before the first sample.

    Returns:
        Seconds.
    """
    samples: Samples = {name: [] for name in sides}
    for turn in range(warmup + repeats):
        for name, call in sides.items():
            start = time.perf_counter()
            told = call()
            seconds = told if isinstance(told, float) else time.perf_counter() - start
            if turn >= warmup:
                samples[name].append(seconds)
    return samples


def ratio(samples: Samples, above: str, below: str) -> float:
    """Return the median ratio of neighbouring samples."""
    pairs = zip(samples[above], samples[below], strict=True)
    return statistics.median(a / b for a, b in pairs)


def interval(below: Sequence[float], above: Sequence[float]) -> tuple[float, float, float]:
    """Return the median ratio of pairs, and a bootstrap interval of 95% around it."""
    import numpy as np  # startup.py measures what happens without it

    ratios = np.log(np.divide(above, below))
    draws = np.random.default_rng(0).integers(0, len(ratios), (4000, len(ratios)))
    medians = np.median(ratios[draws], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(np.exp(np.median(ratios))), float(np.exp(low)), float(np.exp(high))


def median(samples: Samples, name: str) -> float:
    """Return the median of one side's samples."""
    return statistics.median(samples[name])


class Collections:
    """Counts the seconds in gc.collect()."""

    def __init__(self) -> None:
        """Take the place of gc.collect."""
        self.seconds = 0.0
        self._collect = gc.collect
        gc.collect = self  # type: ignore[assignment]

    def __call__(self, *generation: int) -> int:
        """Collect, timed."""
        start = time.perf_counter()
        found = self._collect(*generation)
        self.seconds += time.perf_counter() - start
        return found


@dataclass
class Check:
    """One line of the issue's table.

    Attributes:
        what: What is measured.
        value: The measured number, None when it was not measured.
        target: The number it is held against.
        at_most: True where the value must not exceed the target, False where it must reach it.
        note: Unit, or why it was not measured.
        judged: False for the small sizes of --quick, which the target is not about.
    """

    what: str
    value: float | None
    target: float
    at_most: bool
    note: str = ""
    judged: bool = True

    @property
    def bound(self) -> str:
        """The target with its sign."""
        return f"{'≤' if self.at_most else '≥'} {self.target:g}"

    @property
    def verdict(self) -> str:
        """PASS, FAIL or not measured."""
        if self.value is None:
            return "not measured"
        if not self.judged:
            return "not judged"
        good = self.value <= self.target if self.at_most else self.value >= self.target
        return "PASS" if good else "FAIL"


@dataclass
class Report:
    """What a benchmark found; printed as tables and written as JSON.

    Attributes:
        name: Name of the benchmark.
        arguments: Its command line.
        rows: Numbers by table, one mapping per line.
        checks: Lines held against a target.
        runs: What the numbers come from, where a benchmark keeps it; not printed.
    """

    name: str
    arguments: argparse.Namespace
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)

    def add(self, table: str, **values: Any) -> None:
        """Add a line to a table."""
        self.rows.setdefault(table, []).append(values)

    def hold(self, check: Check) -> None:
        """Add a number that is held against a target."""
        self.checks.append(check)

    def at_most(self, what: str, value: float | None, target: float, note: str = "") -> None:
        """Hold a number against an upper bound."""
        self.hold(Check(what, value, target, True, note, not self.arguments.quick))

    def at_least(self, what: str, value: float | None, target: float, note: str = "") -> None:
        """Hold a number against a lower bound."""
        self.hold(Check(what, value, target, False, note, not self.arguments.quick))

    def take(self, told: Mapping[str, Any]) -> None:
        """Add what a `Live` report of a child process told."""
        if "check" in told:
            self.hold(Check(**told["check"]))
        else:
            self.add(told["table"], **told["values"])

    def finish(self) -> int:
        """Print tables and verdicts, write the JSON file, and return the exit code, which is 0.

        A missed target is a finding, not an error.
        """
        self._print()
        self.write()
        return 0

    def write(self) -> None:
        """Write the JSON file, if one is asked for."""
        if self.arguments.out is not None:
            self.arguments.out.parent.mkdir(parents=True, exist_ok=True)
            self.arguments.out.write_text(json.dumps(self.as_json(), indent=1) + "\n")

    def as_json(self) -> dict[str, Any]:
        """Return everything, ready to be written."""
        given = {k: v for k, v in vars(self.arguments).items() if not isinstance(v, Path)}
        return {
            "bench": self.name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "arguments": given,
            "machine": machine(),
            "threads": int(os.environ["OMP_NUM_THREADS"]),
            "versions": versions(),
            "rows": self.rows,
            "checks": [{**asdict(c), "verdict": c.verdict} for c in self.checks],
            **({"runs": self.runs} if self.runs else {}),
        }

    def _print(self) -> None:
        from rich.console import Console
        from rich.table import Table

        console = Console(width=None if sys.stdout.isatty() else 160)
        for title, lines in self.rows.items():
            table = Table(title=title, title_justify="left")
            names = list(dict.fromkeys(name for line in lines for name in line))
            for name in names:
                table.add_column(name)
            for line in lines:
                table.add_row(*(_shown(line.get(name)) for name in names))
            console.print(table)
        if not self.checks:
            return
        table = Table("what", "value", "target", "", "", title="Targets", title_justify="left")
        for check in self.checks:
            table.add_row(check.what, _shown(check.value), check.bound, check.verdict, check.note)
        console.print(table)


def say(what: str, /, **values: object) -> None:
    """Print a measurement at once: a later one may not fit into the time."""
    shown = "  ".join(f"{name} {_shown(value)}" for name, value in values.items())
    print(f"[{time.time() - BEGAN:4.0f} s] {what}: {shown}", flush=True)


@dataclass
class Live(Report):
    """A report that prints each number at once.

    Attributes:
        tells: Whether it also tells the numbers to the parent process, see `Report.take`.
    """

    tells: bool = False

    def add(self, table: str, **values: Any) -> None:
        """Add a line to a table."""
        super().add(table, **values)
        say(table, **values)
        if self.tells:
            tell({"table": table, "values": values})

    def hold(self, check: Check) -> None:
        """Add a number that is held against a target."""
        super().hold(check)
        say(f"  {check.verdict}, {check.what}", **{_shown(check.value): check.bound})
        if self.tells:
            tell({"check": asdict(check)})


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"
    return "" if value is None else str(value)


def machine() -> dict[str, Any]:
    """Return what the numbers depend on: processor, cores, memory, load when the report is made."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [n for n in cpuinfo.read_text().splitlines() if n.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "load_1_minute": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Return the versions of what is measured."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def memory(kind: str) -> float:
    """Return this process's memory in MiB: VmRSS (now) or VmHWM (peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"memory: expected a line {kind} in /proc/self/status, which Linux has")


def reset_peak() -> None:
    """Give freed memory back to the system, and set VmHWM back to VmRSS."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


class ChildError(SystemExit):
    """A child process that failed or was ended; it ends the benchmark unless it is caught."""


def told(
    script: Path, job: Mapping[str, Any], *, limit: float | None = None, echo: bool = False
) -> Generator[dict[str, Any]]:
    """Run a benchmark's own script in a fresh process with `--child JOB`; yield what it tells.

    Args:
        script: The script.
        job: Its argument.
        limit: Seconds after which it is ended, with the processes that it started; None for none.
        echo: Whether its other lines are printed, as they come.

    Raises:
        ChildError: It failed, or was ended. What it told before has been yielded.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, str(script), "--child", json.dumps(job)],
            stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
        )  # fmt: skip

        def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(threading.TIMEOUT_MAX if limit is None else limit, end)
        timer.daemon = True
        timer.start()
        started = time.monotonic()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(MARK):
                    yield json.loads(line[len(MARK) :])
                elif echo:
                    print(line, end="", flush=True)
            process.wait()
        finally:
            timer.cancel()
            end()
            process.wait()
        if limit is not None and time.monotonic() - started >= limit:
            raise ChildError(f"ended after {limit:.0f} s")
        if process.returncode:
            errors.seek(0)
            raise ChildError(f"{script.name} --child failed:\n{errors.read()[-2000:]}")


def child(script: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Run a benchmark's own script in a fresh process with `--child JOB`; return what it tells."""
    answers = list(told(script, job))
    if not answers:
        raise ChildError(f"{script.name} --child told nothing")
    return answers[-1]


def tell(values: Mapping[str, Any]) -> None:
    """Answer the parent process."""
    print(MARK + json.dumps(values), flush=True)


def elapsed(started: float) -> dict[str, float]:
    """Return wall seconds since a time.time(), and processor seconds of this process."""
    return {"seconds": time.time() - started, "cpu_seconds": time.process_time()}


def share(values: Sequence[float]) -> list[float]:
    """Return every value over their sum."""
    total = sum(values)
    return [value / total for value in values]

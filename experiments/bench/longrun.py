"""Long runs: what grows with the rounds of a run, and how long a resume takes.

    python experiments/bench/longrun.py [--quick] [--rounds N] [--out FILE]

A process plays short rounds of the embedded model and is looked at after each, once the writer has
caught up: memory, open descriptors, threads, attributes.json, processor seconds of all threads.
What grows is Theil and Sen's slope, the median over all pairs of rounds after the warm-up, which a
few disturbed samples do not move. Then the run is resumed after its fifth and after its last round,
each time in a fresh process and up to where the next round would begin.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

from common import Report, child, memory, parser, quiet, tell

from evo_grpo.record.observer import Observer
from evo_grpo.record.records import RoundRecord

SCRIPT = Path(__file__)
AGENTS = 2
ROUNDS, QUICK_ROUNDS = 500, 25
EARLY = 5  # the round after which a resume is the measure of a later one
WARM_UP = 100  # rounds until the histories of agents are full
PATIENCE_SECONDS = 120
SHOWN = 10  # lines of the table that follows a run
Sample = dict[str, float]


def settings(rounds: int, checkpoints: str) -> dict[str, Any]:
    """Return a run of rounds as short as they get; all that a round does is in them."""
    return {
        "name": "longrun",
        "model": {"name": "tiny-sums", "lora": {"r": 2}},
        "env": {"kind": "sums"},
        "population": {"size": AGENTS, "rounds": rounds, "steps_per_round": 1, "sizes": "constant"},
        "algorithm": {"group_size": 4, "prompts_per_step": 1, "lr": 1e-4},
        "evolve": {
            "hyperparameters": {"lr": {"min": 1e-5, "max": 1e-3}},
            "fitness": {"prompts": 8},
            # No difference counts, and survivors stay who they are: agents get as old as the run.
            "significance": 1e-9,
            "exploration": {"kind": "on_copy"},
            "dead_steps": None,
        },
        "engine": {"device": "cpu", "threads": 1},
        "record": {"checkpoints": checkpoints},
    }


class Gauges(Observer):
    """Looks at the process after every round, and ends the run after the last.

    Args:
        folder: The run folder.
        rounds: Rounds after which the run is stopped, as by Ctrl-C.
        patient: Look once the writer has caught up: what waits for it is no part of what a run
            keeps.
    """

    def __init__(self, folder: Path, rounds: int, *, patient: bool) -> None:
        """Begin before the first round."""
        self.folder = folder
        self.rounds = rounds
        self.patient = patient
        self.samples: list[Sample] = []
        self._recorded = self._offset = 0
        self._attributes = 0.0
        # The writer may lag behind, and deletes what is older than the last round.
        self._written: deque[Path] = deque(maxlen=20 * AGENTS)
        self._before, self._cpu = time.perf_counter(), time.process_time()

    def started(
        self, run_dir: Path | None, rounds: int, first_round: int, settings: object
    ) -> None:
        """The first round begins."""
        self._before, self._cpu = time.perf_counter(), time.process_time()

    def round_done(self, record: RoundRecord) -> None:
        """Take a sample."""
        seconds = time.perf_counter() - self._before
        self._written.extend(self.folder / str(agent.checkpoint) for agent in record.agents)
        waiting = record.round + 1 - self._count()
        until = time.monotonic() + PATIENCE_SECONDS
        while self.patient and self._count() <= record.round:
            if time.monotonic() > until:
                raise SystemExit(f"round {record.round} is not written after {PATIENCE_SECONDS} s")
            time.sleep(0.005)
        self.samples.append(
            {
                "round": record.round + 1,
                "rss": memory("VmRSS"),
                "descriptors": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
                "attributes": self._largest(),
                "waiting": waiting,
                "seconds": seconds,
                "cpu": time.process_time() - self._cpu,
            }
        )
        if len(self.samples) == self.rounds:
            raise KeyboardInterrupt
        self._before, self._cpu = time.perf_counter(), time.process_time()

    def _largest(self) -> float:
        """Return the KiB of the largest attributes.json of the latest round that has any."""
        for newest in range(len(self._written), 0, -AGENTS):
            sizes: list[int] = []
            for path in list(self._written)[newest - AGENTS : newest]:
                with suppress(FileNotFoundError):
                    sizes.append((path / "attributes.json").stat().st_size)
            if sizes:
                self._attributes = max(sizes) / 1024
                break
        return self._attributes

    def _count(self) -> int:
        """Return how many rounds are on disk."""
        with (self.folder / "rounds.jsonl").open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        self._recorded += new.count(b"\n")
        return self._recorded


def play(job: Mapping[str, Any]) -> dict[str, Any]:
    """Child: play rounds into a folder, and tell the samples and the bytes on disk per round."""
    quiet()
    from evo_grpo import run

    folder, rounds = Path(job["folder"]), int(job["rounds"])
    gauges = Gauges(folder, rounds, patient=job["patient"])
    # One round more than are played: a finished run is not resumed.
    config = settings(rounds + 1, job["checkpoints"])
    with suppress(KeyboardInterrupt):
        run(config, out=folder, observer=gauges)
    sizes = {
        "rounds.jsonl (KiB per round)": (folder / "rounds.jsonl").stat().st_size / 1024 / rounds
    }
    return {"samples": gauges.samples, "sizes": sizes}


class UpToTheNextRound(Observer):
    """Stops a resume where the next round would begin."""

    def started(
        self, run_dir: Path | None, rounds: int, first_round: int, settings: object
    ) -> None:
        """All is loaded."""
        raise KeyboardInterrupt


@contextmanager
def watched(owner: Any, name: str, seconds: dict[str, float]) -> Generator[None]:  # noqa: ANN401
    """Add up the seconds that a function of a module takes, under its name."""
    function = getattr(owner, name)

    def timed(*arguments: object, **named: object) -> object:
        start = time.perf_counter()
        result = function(*arguments, **named)
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
        return result

    with mock.patch.object(owner, name, timed):
        yield


def resume(job: Mapping[str, Any]) -> dict[str, float]:
    """Child: resume a run up to its next round, and tell where the seconds went."""
    quiet()
    start = time.perf_counter()
    # Both load late in a run, and would otherwise count as part of what follows the loading.
    import optuna  # noqa: F401
    import pandas as pd  # noqa: F401

    from evo_grpo.record import folder
    from evo_grpo.training import run as training

    libraries = time.perf_counter() - start
    told: dict[str, float] = {}
    with watched(training, "prepare", told), watched(folder, "parse_rounds", told):
        start = time.perf_counter()
        with suppress(KeyboardInterrupt):
            training.resume(job["folder"], observer=UpToTheNextRound())
        whole = time.perf_counter() - start
    base, records = told["prepare"], told["parse_rounds"]
    return {
        "libraries": libraries,
        "base and agents": base,
        "rounds.jsonl": records,
        "the rest": whole - base - records,
    }


def settled(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return the samples after the warm-up, which is at most two fifths of them."""
    return samples[min(WARM_UP, 2 * len(samples) // 5) :]


def slope(samples: Sequence[Sample], name: str) -> float:
    """Return Theil and Sen's slope of a column per 100 rounds, after the warm-up."""
    pairs = combinations(settled(samples), 2)
    return 100 * statistics.median(
        (b[name] - a[name]) / (b["round"] - a["round"]) for a, b in pairs
    )


def middle(samples: Sequence[Sample], name: str) -> float:
    """Return the median of a column."""
    return statistics.median(sample[name] for sample in samples)


def played(folder: Path, rounds: int, checkpoints: str, *, patient: bool) -> dict[str, Any]:
    """Play a run in a process of its own."""
    job = {"kind": "play", "folder": str(folder), "rounds": rounds, "checkpoints": checkpoints}
    return child(SCRIPT, {**job, "patient": patient})


def long_run(report: Report, folder: Path, rounds: int, checkpoints: str) -> None:
    """Play a run, show its course, and hold what grows against the targets."""
    told = played(folder, rounds, checkpoints, patient=True)
    samples: list[Sample] = told["samples"]
    what = f"{rounds} rounds of {AGENTS} agents, checkpoints: {checkpoints}"
    part = max(1, rounds // SHOWN)
    for end in range(part, rounds + 1, part):
        window = samples[end - part : end]
        last = window[-1]
        report.add(
            what,
            rounds=end, rss_mib=last["rss"], descriptors=last["descriptors"],
            threads=last["threads"], attributes_kib=last["attributes"],
            cpu_ms_per_round=1000 * middle(window, "cpu"),
        )  # fmt: skip
    report.add(
        "What grows, per 100 rounds",
        run=f"{rounds} rounds, checkpoints: {checkpoints}",
        rss_mib=slope(samples, "rss"), descriptors=slope(samples, "descriptors"),
        threads=slope(samples, "threads"), attributes_kib=slope(samples, "attributes"),
        cpu_ms_per_round=1000 * slope(samples, "cpu"), **told["sizes"],
    )  # fmt: skip
    part = max(1, rounds // 5)
    early, late = settled(samples)[:part], samples[-part:]
    report.at_most(f"memory slope, MiB per 100 rounds; {what}", slope(samples, "rss"), 1.0)
    for name in ("descriptors", "threads"):
        # The least of many samples: the writer has files of its own open at any moment.
        more = min(s[name] for s in late) - min(s[name] for s in early)
        report.at_most(f"{name}: more at the end than after the warm-up; {what}", more, 0)
    for name in ("attributes", "cpu"):
        over = middle(late, name) / middle(early, name)
        report.at_most(f"{name}: at the end over after the warm-up; {what}", over, 1.1)


def backlog(report: Report, folder: Path, rounds: int) -> None:
    """Show how many rounds wait for the writer where nobody waits for it."""
    samples = played(folder, rounds, "last", patient=False)["samples"]
    waiting = [sample["waiting"] for sample in samples]
    report.add(
        "Rounds that wait for the writer, of a run that plays as fast as it can",
        rounds=rounds, median=statistics.median(waiting), most=max(waiting), last=waiting[-1],
        ms_per_round=1000 * middle(samples, "seconds"),
    )  # fmt: skip


def resumes(report: Report, folders: Mapping[int, Path], repeats: int) -> None:
    """Time resumes after few and after many rounds, in turns."""
    told: dict[int, list[dict[str, float]]] = {rounds: [] for rounds in folders}
    for _ in range(repeats):
        for rounds, folder in folders.items():
            told[rounds].append(child(SCRIPT, {"kind": "resume", "folder": str(folder)}))
    few, many = folders
    for rounds, lines in told.items():
        parts = {name: statistics.median(line[name] for line in lines) for name in lines[0]}
        report.add("Resume up to the next round (seconds)", after=rounds, **parts)
    pairs = list(zip(told[few], told[many], strict=True))
    over = statistics.median(b["the rest"] / a["the rest"] for a, b in pairs)
    what = f"resume after round {many} over round {few}, without loading"
    report.at_most(what, over, 2.0, "loading: libraries, base, agents and rounds.jsonl")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    given = parser(__doc__.partition("\n")[0])
    given.add_argument("--rounds", type=int, help=f"rounds of the long run, above {EARLY}")
    given.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    return given.parse_args()


def main() -> int:
    """Play the runs and resume them, in processes of their own."""
    given = arguments()
    if given.child is not None:
        tell(play(given.child) if given.child["kind"] == "play" else resume(given.child))
        return 0
    del given.child
    report = Report("longrun", given)
    rounds = given.rounds or (QUICK_ROUNDS if given.quick else ROUNDS)
    with tempfile.TemporaryDirectory(prefix="bench-longrun-") as name:
        folder = Path(name)
        folders = {EARLY: folder / "early", rounds: folder / "last"}
        played(folders[EARLY], EARLY, "last", patient=True)
        long_run(report, folders[rounds], rounds, "last")
        long_run(report, folder / "all", max(rounds // 2, EARLY), "all")
        backlog(report, folder / "fast", max(rounds // 5, EARLY))
        resumes(report, folders, given.repeats or (1 if given.quick else 5))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

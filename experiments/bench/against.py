"""An older checkout against this one: the same work in turns, and intervals of the ratios.

    git worktree add ../old 52ce22f
    python experiments/bench/against.py ../old [--parts small large evolve start rounds]

Each tree runs its own benchmark code, in a process of its own that stays, so that the ratio of a
pair is of two samples seconds apart. A line has got slower where its interval lies above 1.03.
"""

import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CHILD = "--child"
SLOWER = 1.03
RAGGED = (4, 4, 6, 6, 8, 8, 12, 16)
SHAPES = {
    "embedded": ("embedded", 8, (4, 8, 32)),
    "ragged": ("embedded", 8, (4, RAGGED, 32)),
    "one agent": ("embedded", 1, (32, 8, 32)),
    "135M": ("135M", 4, (1, 4, 16)),
}
PHASES = ("generate", "learn")
PARTS = {
    "small": ([f"{n} {p}" for n in ("embedded", "ragged", "one agent") for p in PHASES], 30),
    "large": ([f"135M {phase}" for phase in PHASES], 16),
    "evolve": (["evolve", "save", "load"], 12),
    "start": (["embedded start", "135M start"], 16),
}
#: A fresh interpreter up to four agents over a model folder; it says how much processor time it
#: took, which others on the machine move less than the clock.
START = """
import sys, time
from evo_grpo import GRPO
loaded = time.process_time()
GRPO.population(size=4, model=sys.argv[1], device="cpu", dtype="float32")
print("RESULT", time.process_time(), time.process_time() - loaded)
"""
ROUNDS = 12
#: So that both trees have the same work: nothing is selected, and nothing learned that would change
#: how long completions are.
SETTINGS = (
    "population.size=8", "population.steps_per_round=8", "algorithm.lr=1e-9",
    "algorithm.group_size=8", "algorithm.prompts_per_step=4", "evolve.hyperparameters={}",
    "evolve.fitness.prompts=64", "evolve.fitness.test_prompts=64",
)  # fmt: skip


class Tree:
    """One checkout at work, in a process of its own.

    Args:
        root: The checkout.
    """

    def __init__(self, root: Path) -> None:
        """Start it."""
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- as long as the process
        self.process = subprocess.Popen(
            # -P: its own `common` and `jobs`, not those beside this file.
            [sys.executable, "-P", str(HERE / "against.py"), CHILD],
            cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            env={**os.environ, "PYTHONPATH": f"{root}:{root / 'experiments/bench'}"},
        )  # fmt: skip

    def ask(self, what: str) -> Any:  # noqa: ANN401 -- seconds, or what a round took
        """Return what it measured: seconds, or a line per round."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{what}\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            raise SystemExit(f"{what}: the process ended\n{self.errors.read()[-2000:]}")
        return json.loads(line)


def serve() -> None:
    """Answer what the other process asks for, until it asks no more."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import common

    common.quiet()
    jobs: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        what = line.strip()
        if what == "rounds":
            answer: Any = _rounds()
        elif what in PARTS["start"][0]:
            answer = _start(what.removesuffix(" start"))
        else:
            if what not in jobs:
                jobs.update(_evolving() if what in PARTS["evolve"][0] else _job(what))
            answer = common.timed(jobs[what])
        print(json.dumps(answer), file=out, flush=True)


def _job(what: str) -> dict[str, Callable[[], object]]:
    from jobs import Job, Work, load_base, population

    name = what.rpartition(" ")[0]
    shape, size, work = SHAPES[name]
    cohort, slots = population(load_base(shape), size, Work(*work))
    job = Job(cohort, slots, Work(*work))
    return {f"{name} generate": job.generate, f"{name} learn": job.learn}


def _evolving() -> dict[str, Callable[[], object]]:
    import evolve
    from jobs import Job, Work, load_base, population

    work = Work(1, 4, 2)
    cohort, slots = population(load_base("135M"), evolve.AGENTS, work)
    Job(cohort, slots, work).learn()
    folder = Path(tempfile.mkdtemp(prefix="bench-against-"))

    def save() -> None:
        for slot in slots:
            evolve.save_agent(cohort, slot, folder / f"agent-{slot}")

    def load() -> None:
        for slot in slots:
            evolve.load_agent(cohort, slot, folder / f"agent-{slot}", load_optimizer=True)

    return {"evolve": evolve.Evolution(cohort, slots), "save": save, "load": load}


@functools.cache
def _folder(shape: str) -> str:
    """Return the folder of a model, written where it is not the one in the package."""
    from jobs import load_base
    from shapes import EMBEDDED

    if shape == "embedded":
        return str(EMBEDDED)
    folder = Path(tempfile.mkdtemp(prefix="bench-start-"))
    load_base(shape).save(folder)
    return str(folder)


def _start(shape: str) -> float:
    """Return the processor seconds of a fresh interpreter up to four agents."""
    done = subprocess.run(
        [sys.executable, "-c", START, _folder(shape)], capture_output=True, text=True, check=False
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not told:
        raise SystemExit(f"{shape} start failed:\n{done.stderr[-2000:]}")
    print(f"{shape} start:", *told[-1].split()[1:], file=sys.stderr)
    return float(told[-1].split()[1])


def _rounds() -> list[dict[str, float]]:
    import rounds

    load = rounds.configuration.load
    # Older trees take no settings here.
    rounds.configuration.load = lambda path, given: load(path, [*given, *SETTINGS])
    try:
        with tempfile.TemporaryDirectory(prefix="bench-against-") as folder:
            return rounds.play(Path(folder), rounds=2)
    finally:
        rounds.configuration.load = load


def in_turns(old: Tree, new: Tree, names: list[str], pairs: int) -> dict[str, tuple[Any, Any]]:
    """Return what both measured of each name, (old, new), after one turn to warm up."""
    found: dict[str, tuple[list[Any], list[Any]]] = {name: ([], []) for name in names}
    for turn in range(pairs + 1):
        for name in names:
            order = ((0, old), (1, new)) if turn % 2 else ((1, new), (0, old))
            for side, tree in order:
                value = tree.ask(name)
                if turn:
                    found[name][side].append(value)
    return found


def main() -> int:
    """Measure the parts asked for."""
    from common import Report, interval, parser

    arguments = parser(str(__doc__).partition("\n")[0])
    arguments.add_argument("old", type=Path, help="the other checkout")
    arguments.add_argument("--parts", nargs="+", choices=[*PARTS, "rounds"],
                           default=[*PARTS, "rounds"])  # fmt: skip
    given = arguments.parse_args()
    report = Report("against", given)
    old, new = Tree(given.old.resolve()), Tree(HERE.parents[1])

    def line(name: str, before: list[float], after: list[float]) -> None:
        middle, low, high = interval(before, after)
        report.add(
            "This checkout over the other (seconds)", line=name, pairs=len(before),
            old=statistics.median(before), new=statistics.median(after),
            ratio=middle, low=low, high=high,
        )  # fmt: skip
        report.at_most(f"{name}: lower end of the ratio's interval", low, SLOWER)

    for part in given.parts:
        if part == "rounds":
            pairs = given.repeats or (1 if given.quick else ROUNDS)
            before, after = in_turns(old, new, ["rounds"], pairs)["rounds"]
            sums = [[_phases(one) for one in side] for side in (before, after)]
            for phase in sums[0][0].keys() & sums[1][0].keys():
                line(f"a round: {phase}", *([one[phase] for one in side] for side in sums))
            waits = [one["checkpoint"] / one["whole"] for one in sums[1]]
            report.at_most("checkpoint wait, share of a round", statistics.median(waits), 0.05)
            continue
        names, pairs = PARTS[part]
        pairs = given.repeats or (1 if given.quick else pairs)
        for name, (before, after) in in_turns(old, new, names, pairs).items():
            line(name, before, after)
    return report.finish()


def _phases(lines: list[dict[str, float]]) -> dict[str, float]:
    """Return the seconds of some rounds by phase, those of phases that take none left out."""
    totals = {name: sum(one[name] for one in lines) for name in lines[0] if name != "round"}
    return {name: seconds for name, seconds in totals.items() if seconds > 0}


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        serve()
    else:
        sys.exit(main())

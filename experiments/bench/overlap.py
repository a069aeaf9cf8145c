"""A step with slow rewards: all agents at once, which wait for them, over parts that do not.

    OMP_NUM_THREADS=1 python experiments/bench/overlap.py [--shapes embedded 10M] [--parts 2 4]

The default task with 8 agents at equal work. A reward takes r seconds a call in which it computes
nothing, as one that asks a judge. With C the seconds of a step of all agents at once with instant
rewards, and k parts, no step can take less than max(C, C / k + r): the device computes for C
seconds, and a part for C / k of them before and after its own rewards. Parts compute for longer
than all at once, as batches are smaller: what that costs without rewards stands beside it, and the
bound with those seconds in place of C. The end of a round is included: there the last part's
rewards are waited for.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from common import Report, parser, quiet

THREADS = quiet()

from jobs import load_base  # noqa: E402 -- after the threads are fixed, as what follows
from rounds import DEFAULT  # noqa: E402

from evo_grpo import settings as configuration  # noqa: E402
from evo_grpo.population.steps import RunWriter, Training, train  # noqa: E402
from evo_grpo.record.observer import Observer  # noqa: E402
from evo_grpo.training.assemble import prepare  # noqa: E402

STEPS = 8
SHARES = (0.5, 1.0, 2.0)
AIM = 1.1
#: So that every step has the same work: nothing is learned that would change completions.
SETTINGS = (
    "population.size=8", f"population.steps_per_round={STEPS}", "algorithm.lr=1e-9",
    "algorithm.group_size=8", "algorithm.prompts_per_step=4", "evolve.hyperparameters={}",
    "engine.device=cpu",
)  # fmt: skip


class Population:
    """The agents of a run, whose rewards take a while.

    Args:
        overrides: Settings beside those of all.
    """

    def __init__(self, *overrides: str) -> None:
        """Prepare the run."""
        config = configuration.load(DEFAULT, [*SETTINGS, *overrides])
        self.steps = config.population.steps_per_round
        self.run = prepare(config)
        self.seconds = 0.0
        self.rounds = 0
        judge = self.run.env.judge

        def slow(groups: object) -> object:
            time.sleep(self.seconds)
            return judge(groups)

        self.run.env.judge = slow

    def step(self, seconds: float) -> float:
        """Return the seconds of a step, of the steps of a round, with rewards of so many."""
        self.seconds = seconds
        start = time.perf_counter()
        train(
            Training(
                self.run.cohort,
                self.run.env,
                self.run.round_settings,
                self.run.slots,
                self.rounds,
                RunWriter(),
                Observer(),
            )
        )
        self.rounds += 1
        return (time.perf_counter() - start) / self.steps


def measure(report: Report, shape: str, parts: Sequence[int], repeats: int) -> None:
    """Measure each share of the reward in a step, for each number of parts."""
    with TemporaryDirectory(prefix="bench-overlap-") as folder:
        own: list[str] = []
        if shape != "embedded":
            load_base(shape).save(Path(folder))
            own = [f"model.name={folder}"]
        whole = Population(*own)
        dealt = {k: Population(*own, f"engine.shards={k}", "engine.overlap=true") for k in parts}
    everyone = {1: whole, **dealt}
    for one in everyone.values():
        one.step(0.0)
    turns = [{k: one.step(0.0) for k, one in everyone.items()} for _ in range(repeats)]
    instant = {k: statistics.median(turn[k] for turn in turns) for k in everyone}
    for share in SHARES:
        r = share * instant[1]
        turns = [{k: one.step(r) for k, one in everyone.items()} for _ in range(repeats)]
        found = {k: statistics.median(turn[k] for turn in turns) for k in everyone}
        for k in parts:
            bound, of_parts = (max(c, c / k + r) for c in (instant[1], instant[k]))
            report.add(
                f"Seconds of a step, 8 agents, {shape}", reward=r, share=share, parts=k,
                instant=instant[1], instant_in_parts=instant[k], waiting=found[1],
                overlapping=found[k], saved=found[1] / found[k],
                over_bound=found[k] / bound, over_own_bound=found[k] / of_parts,
            )  # fmt: skip
            report.at_most(f"{shape}, {k} parts, rewards of {share:g} steps: over the bound",
                           found[k] / bound, AIM)  # fmt: skip


def main() -> int:
    """Measure the shapes that are asked for."""
    arguments = parser(str(__doc__).partition("\n")[0])
    arguments.add_argument("--shapes", nargs="+", default=["embedded", "10M"], help="models")
    arguments.add_argument("--parts", nargs="+", type=int, default=[2, 4], help="values of k")
    given = arguments.parse_args()
    report = Report("overlap", given)
    for shape in given.shapes:
        measure(report, shape, given.parts, given.repeats or (1 if given.quick else 5))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

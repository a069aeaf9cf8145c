"""Seconds until a population first has an answer: .80, and .90, on 64 validation prompts of sums.

    python experiments/bench/answer.py --seeds 0-7 --out experiments/bench/results/answer.json

new       evo-grpo's default population of eight: it shrinks
guesses   the same eight agents as the peers', all at once, without selection and mutation
agilerl   AgileRL's population of eight, with its tournament and its mutations
trl       TRL's GRPOTrainer with one of the eight learning rates after another
pbt       Ray Tune's PopulationBasedTraining over eight of these trainers, on one CPU

The four below `new` begin with the same eight learning rates, drawn log-uniformly, and all sides
get the same prompts. No side samples more completions than eight agents do in six rounds of eight
steps with an evaluation each. A side is stopped when it has the last level. Each run is a process
of its own; a run that the file of --out has is not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import HERE, Report, child, elapsed, parser, tell
from peers import Peer, PeerError

sys.path.insert(0, str(HERE.parent / "evolution"))

from arms import ARMS, RANGES, REFERENCE, TASKS, Arm, nested, overrides, plan
from lines import circumstances
from run import seeds

LEVELS = (0.8, 0.9)
TARGET = 20.0
"""AgileRL's seconds to the first level over ours: the median over the seeds is held against it."""
TASK = TASKS["sums"]
#: Evaluated each round, as the others are; the arm of experiments/evolution is, at the end alone.
GUESSES = replace(ARMS["random"], once=False)
OURS: dict[str, Arm] = {"new": ARMS["new"], "guesses": GUESSES}
#: Side -> environment, script, evaluations of the whole budget.
PEERS: dict[str, tuple[str, str, int]] = {
    "agilerl": ("agilerl", "answer_agilerl.py", TASK.rounds),
    "trl": ("trl", "answer_trl.py", TASK.size * TASK.rounds),
    "pbt": ("trl", "answer_ray.py", TASK.size * TASK.rounds),
}
SIDES = (*OURS, *PEERS)

Run = dict[str, Any]


def ours(job: Mapping[str, Any]) -> None:
    """Run evo-grpo on an arm, and tell when each round had its best score; in a process alone."""
    import one_run  # imports torch, transformers and peft
    from outcome import best_fitness, played

    from evo_grpo.record.observer import Observer

    imported, stood, rounds = elapsed(job["started"]), dict[str, float](), list[dict[str, float]]()

    class Watch(Observer):
        def started(self, *given: object) -> None:
            stood.update(elapsed(job["started"]))

        def round_done(self, record: Any) -> None:  # noqa: ANN401 -- its type would be imported
            rounds.append({**elapsed(job["started"]), "best": best_fitness(record)})

    one_run.quiet()
    settings = overrides(TASK, OURS[job["side"]], job["seed"])
    with tempfile.TemporaryDirectory(prefix="answer-") as folder:
        played(settings, Path(folder) / "run", observer=Watch())
    tell({"imported": imported, "standing": stood, "rounds": rounds})


def peer_job(seed: int) -> dict[str, Any]:
    """Return what the peers do with a seed: what the reference arm of our experiments does."""
    from evo_grpo import settings as configuration
    from evo_grpo.training.assemble import prepare

    arm = ARMS[REFERENCE]
    made = plan(TASK, arm)
    config = configuration.from_dict(nested(overrides(TASK, arm, seed)))
    with prepare(config) as prepared:

        def rows(prompts: Sequence[Any]) -> list[tuple[str, str]]:
            return [(prompt.text, prompt.columns["answer"]) for prompt in prompts]

        return {
            "seed": seed,
            "lrs": [prepared.cohort.agents[slot].hparams.lr for slot in prepared.slots],
            "range": RANGES["lr"],
            "prompts": made.prompts,
            "group": TASK.group,
            "tokens": prepared.cohort.max_output_tokens,
            "epochs": config.algorithm.update_epochs,
            "steps": made.steps,
            "train": [
                rows(prepared.env.batch(n, made.prompts)) for n in range(made.rounds * made.steps)
            ],
            "validation": rows(prepared.env.prompts("validation", made.validation)),
        }


def play(side: str, seed: int) -> Run:
    """Run a side with a seed until it has the last level or has spent the budget.

    Raises:
        PeerError: A peer cannot be installed, or it stopped.
    """
    about = {"side": side, "seed": seed, **circumstances(1)}
    if side in OURS:
        return about | child(Path(__file__), {**about, "started": time.time()})
    environment, script, evaluations = PEERS[side]
    job = {**peer_job(seed), "started": time.time()}
    rounds: list[dict[str, Any]] = []
    with Peer(environment, job, script=script) as peer:
        while len(rounds) < evaluations and best_of(rounds) < LEVELS[-1]:
            rounds.append(peer.ask("round"))
    versions = about["versions"] | peer.facts["versions"]
    run = {**about, **peer.facts, "versions": versions, "rounds": rounds}
    if side == "pbt":
        # Its trials import in processes of their own.
        run["imported"]["seconds"] = min(each["trainer_stands"] for each in rounds)
    return run


def best_of(rounds: Sequence[Mapping[str, Any]]) -> float:
    """Return the best score so far."""
    return max((each["best"] for each in rounds), default=0.0)


def reached(
    run: Run, level: float, clock: str = "seconds", *, imports: bool = False
) -> tuple[float, bool]:
    """Return the seconds until a run has a level, and whether it has; else those of all of it.

    Args:
        run: Of a side.
        level: Score of the best agent.
        clock: seconds or cpu_seconds.
        imports: From the start of the process; else from the end of its imports.
    """
    start = 0.0 if imports else run["imported"][clock]
    for each in run["rounds"]:
        if each["best"] >= level:
            return each[clock] - start, True
    return run["rounds"][-1][clock] - start, False


def middle(values: Sequence[tuple[float, bool]]) -> tuple[float, bool]:
    """Return the median, and whether it is one; else a lower bound of it."""
    ordered = sorted(values)
    known = all(known for _, known in ordered[: len(ordered) // 2 + 1])
    return statistics.median(value for value, _ in ordered), known


def ratios(
    runs: Sequence[Run], mine: Mapping[int, Run], level: float, *, imports: bool
) -> list[tuple[float, bool]]:
    """Return the seconds of runs over ours with the same seed, where ours has the level."""
    found: list[tuple[float, bool]] = []
    for run in runs:
        seconds, has = reached(mine[run["seed"]], level, imports=imports)
        theirs, known = reached(run, level, imports=imports)
        if has:
            found.append((theirs / seconds, known))
    return found


def shown(value: tuple[float, bool]) -> str:
    """Return a number, with a > where it is a lower bound."""
    return f"{'' if value[1] else '> '}{value[0]:.1f}"


def spread(values: Sequence[tuple[float, bool]]) -> str:
    """Return a median with the range."""
    if not values:
        return ""
    high = max(value for value, _ in values), all(known for _, known in values)
    return f"{shown(middle(values))} ({shown(min(values))} to {shown(high)})"


def without_collections(run: Run) -> Run:
    """Return a run of AgileRL as if its calls of gc.collect() took no time."""
    clocks = ("seconds", "cpu_seconds")
    rounds = [
        each | {clock: each[clock] - each["gc_seconds"] for clock in clocks}
        for each in run["rounds"]
    ]
    return {**run, "rounds": rounds}


def tables(options: argparse.Namespace, runs: list[Run]) -> Report:
    """Return the report of runs."""
    report = Report("answer", options, runs=runs)
    mine = {run["seed"]: run for run in runs if run["side"] == "new"}
    sides = {
        side: [run for run in runs if run["side"] == side and run["seed"] in mine] for side in SIDES
    }
    sides["agilerl without gc.collect()"] = [*map(without_collections, sides["agilerl"])]
    for level in LEVELS:
        for side, theirs in sides.items():
            if theirs:
                report.add(
                    f"Until {level:.2f} on validation",
                    side=side,
                    seeds=len(theirs),
                    reached=sum(reached(run, level)[1] for run in theirs),
                    seconds=shown(middle([reached(run, level) for run in theirs])),
                    over_new=spread(ratios(theirs, mine, level, imports=False)),
                    with_imports=shown(
                        middle([reached(run, level, imports=True) for run in theirs])
                    ),
                    over_new_with_imports=spread(ratios(theirs, mine, level, imports=True)),
                    cpu_seconds_with_imports=shown(
                        middle([reached(run, level, "cpu_seconds", imports=True) for run in theirs])
                    ),
                )
    found = ratios(sides["agilerl"], mine, LEVELS[0], imports=False)
    value = middle(found)[0] if found else None
    report.at_least(f"agilerl over new until {LEVELS[0]:.2f}", value, TARGET)
    return report


def main() -> int:
    """Run what has no run yet, and make the tables."""
    given = parser(__doc__.partition("\n")[0])
    given.add_argument("--seeds", type=seeds, default=seeds("0-7"), help="such as 0-7 or 0,2")
    given.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    given.add_argument("--child", type=json.loads)
    options = given.parse_args()
    if options.child:
        ours(options.child)
        return 0
    out: Path | None = options.out
    runs: list[Run] = json.loads(out.read_text())["runs"] if out and out.is_file() else []
    done = {(run["side"], run["seed"]) for run in runs}
    for seed in options.seeds:
        for side in options.sides:
            if (side, seed) in done:
                continue
            try:
                run = play(side, seed)
            except PeerError as error:
                print(error, file=sys.stderr, flush=True)
                continue
            runs.append(run)
            times = ", ".join(f"{level}: {shown(reached(run, level))} s" for level in LEVELS)
            print(f"{side}, seed {seed}: {times}", file=sys.stderr, flush=True)
            tables(options, runs).write()
    return tables(options, runs).finish()


if __name__ == "__main__":
    sys.exit(main())

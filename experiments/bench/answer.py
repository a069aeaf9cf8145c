"""Seconds until a population first has an answer: .80, and .90, on 64 validation prompts of sums.

    python experiments/bench/answer.py --seeds 0-7 --out experiments/bench/results/answer.json
    python experiments/bench/answer.py --task smollm2 --seeds 0 --sides new guesses --out FILE

new       evo-grpo's default population of eight: it shrinks
guesses   the same eight agents as the peers', all at once, without selection and mutation
agilerl   AgileRL's population of eight, with its tournament and its mutations
trl       TRL's GRPOTrainer with one of the eight learning rates after another
pbt       Ray Tune's PopulationBasedTraining over eight of these trainers, on one CPU

The four below `new` begin with the same eight learning rates, drawn log-uniformly, and all sides
get the same prompts. No side samples more completions than eight agents do in six rounds of eight
steps with an evaluation each. A run is stopped when it has the last level. Each run is a process
of its own; a run that the file of --out has is not repeated. Ratios are those of processor seconds:
all sides have one thread, and nothing waits but for the processor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import HERE, Report, child, elapsed, parser, tell
from peers import Peer, PeerError

sys.path.insert(0, str(HERE.parent / "evolution"))

from arms import ARMS, RANGES, REFERENCE, TASKS, Arm, Task, nested, overrides, plan
from lines import circumstances
from run import seeds

#: Task -> scores that are timed. A run is stopped at the last.
LEVELS = {"sums": (0.8, 0.9), "smollm2": (0.5,)}
TARGET = 20.0
"""AgileRL's seconds to the first level over ours: the median over the seeds is held against it."""
#: Evaluated each round, as the others are; the arm of experiments/evolution is, at the end alone.
GUESSES = replace(ARMS["random"], once=False)
OURS: dict[str, Arm] = {"new": ARMS["new"], "guesses": GUESSES}
#: Side -> environment, script, and whether an answer is one agent's round, not all agents'.
PEERS: dict[str, tuple[str, str, bool]] = {
    "agilerl": ("agilerl", "answer_agilerl.py", False),
    "trl": ("trl", "answer_trl.py", True),
    "pbt": ("trl", "answer_ray.py", True),
}
SIDES = (*OURS, *PEERS)

Run = dict[str, Any]


class HasAnswerError(Exception):
    """Ends a run of ours that has the last level."""


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
            if rounds[-1]["best"] >= LEVELS[task.name][-1]:
                raise HasAnswerError

    one_run.quiet()
    task = TASKS[job["task"]]
    settings = overrides(task, OURS[job["side"]], job["seed"])
    with tempfile.TemporaryDirectory(prefix="answer-") as folder, suppress(HasAnswerError):
        played(settings, Path(folder) / "run", observer=Watch())
    tell({"imported": imported, "standing": stood, "rounds": rounds})


def peer_job(task: Task, seed: int, folder: Path) -> dict[str, Any]:
    """Return what the peers do with a seed: what the reference arm of our experiments does.

    Args:
        task: The task.
        seed: The seed.
        folder: Where the model is saved for them.
    """
    from evo_grpo import settings as configuration
    from evo_grpo.model.exporting import tokenizer_files, write_base
    from evo_grpo.sources import resolve
    from evo_grpo.training.assemble import prepare

    arm = ARMS[REFERENCE]
    made = plan(task, arm)
    config = configuration.from_dict(nested(overrides(task, arm, seed)))
    source = resolve(config.model.name)
    write_base(source, "float32", None, folder)
    for name, content in tokenizer_files(source, None, None).items():
        (folder / name).write_bytes(content)
    with prepare(config) as prepared:

        def rows(prompts: Sequence[Any]) -> list[tuple[str, str]]:
            return [(prompt.text, prompt.columns["answer"]) for prompt in prompts]

        return {
            "seed": seed,
            "task": task.name,
            "model": str(folder),
            "lrs": [prepared.cohort.agents[slot].hparams.lr for slot in prepared.slots],
            "range": RANGES["lr"],
            "prompts": made.prompts,
            "group": task.group,
            "tokens": prepared.cohort.max_output_tokens,
            "epochs": config.algorithm.update_epochs,
            "steps": made.steps,
            "train": [
                rows(prepared.env.batch(n, made.prompts)) for n in range(made.rounds * made.steps)
            ],
            "validation": rows(prepared.env.prompts("validation", made.validation)),
        }


def play(task: Task, side: str, seed: int) -> Run:
    """Run a side with a seed until it has the last level or has spent the budget.

    Raises:
        PeerError: A peer cannot be installed, or it stopped.
    """
    about = {"task": task.name, "side": side, "seed": seed, **circumstances(1)}
    if side in OURS:
        return about | child(Path(__file__), {**about, "started": time.time()})
    environment, script, alone = PEERS[side]
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="answer-") as folder:
        job = {**peer_job(task, seed, Path(folder)), "started": time.time()}
        with Peer(environment, job, script=script) as peer:
            evaluations = task.rounds * (task.size if alone else 1)
            while len(rounds) < evaluations and best_of(rounds) < LEVELS[task.name][-1]:
                rounds.append(peer.ask("round"))
    run = {**about, **peer.facts, "rounds": rounds}
    if side == "pbt":
        # Its trials import in processes of their own, all at once. A process that trains a second
        # trial says more than its imports then.
        imports = {each["process"]: each["imports"] for each in reversed(rounds)}
        run["imported"]["cpu_seconds"] += sum(imports.values())
        run["imported"]["seconds"] = min(each["trainer_stands"] for each in rounds)
    return run


def best_of(rounds: Sequence[Mapping[str, Any]]) -> float:
    """Return the best score so far."""
    return max((each["best"] for each in rounds), default=0.0)


def reached(
    run: Run, level: float, clock: str = "cpu_seconds", *, imports: bool = False
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
    # A run that has not the level could have it at any later time.
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
    """Return a run of AgileRL as if its calls of gc.collect() took no time.

    They are timed by the wall; of the processor's seconds, they have the same share.
    """
    rounds = [
        each
        | {
            clock: each[clock] * (1 - each["gc_seconds"] / each["seconds"])
            for clock in ("seconds", "cpu_seconds")
        }
        for each in run["rounds"]
    ]
    return {**run, "rounds": rounds}


def tables(options: argparse.Namespace, runs: list[Run]) -> Report:
    """Return the report of runs."""
    report = Report("answer", options, runs=runs)
    for task, levels in LEVELS.items():
        mine = {run["seed"]: run for run in runs if (run["task"], run["side"]) == (task, "new")}
        shared = [run for run in runs if run["task"] == task and run["seed"] in mine]
        sides = {side: [run for run in shared if run["side"] == side] for side in SIDES}
        sides["agilerl without gc.collect()"] = [*map(without_collections, sides["agilerl"])]
        for level in levels:
            for side, theirs in sides.items():
                if theirs:
                    line = compared(theirs, mine, level)
                    report.add(f"{task}, until {level:.2f} on validation", side=side, **line)
        if found := ratios(sides["agilerl"], mine, levels[0], imports=False):
            what = f"{task}: agilerl over new until {levels[0]:.2f}"
            report.at_least(what, middle(found)[0], TARGET)
    return report


def compared(theirs: Sequence[Run], mine: Mapping[int, Run], level: float) -> dict[str, Any]:
    """Return what a table says of a side's runs."""

    def median(clock: str, *, imports: bool) -> str:
        return shown(middle([reached(run, level, clock, imports=imports) for run in theirs]))

    return {
        "seeds": len(theirs),
        "reached": sum(reached(run, level)[1] for run in theirs),
        "cpu_seconds": median("cpu_seconds", imports=False),
        "over_new": spread(ratios(theirs, mine, level, imports=False)),
        "with_imports": median("cpu_seconds", imports=True),
        "over_new_with_imports": spread(ratios(theirs, mine, level, imports=True)),
        "wall_seconds": median("seconds", imports=False),
        "wall_seconds_with_imports": median("seconds", imports=True),
    }


def main() -> int:
    """Run what has no run yet, and make the tables."""
    given = parser(__doc__.partition("\n")[0])
    given.add_argument("--task", choices=LEVELS, default="sums")
    given.add_argument("--seeds", type=seeds, default=seeds("0-7"), help="such as 0-7 or 0,2")
    given.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    given.add_argument("--child", type=json.loads)
    options = given.parse_args()
    if options.child:
        ours(options.child)
        return 0
    out: Path | None = options.out
    runs: list[Run] = json.loads(out.read_text())["runs"] if out and out.is_file() else []
    done = {(run["task"], run["side"], run["seed"]) for run in runs}
    for seed in options.seeds:
        for side in options.sides:
            if (options.task, side, seed) in done:
                continue
            try:
                run = play(TASKS[options.task], side, seed)
            except PeerError as error:
                print(error, file=sys.stderr, flush=True)
                continue
            runs.append(run)
            times = ", ".join(
                f"{level}: {shown(reached(run, level))} s" for level in LEVELS[options.task]
            )
            print(f"{side}, seed {seed}: {times}", file=sys.stderr, flush=True)
            tables(options, runs).write()
    return tables(options, runs).finish()


if __name__ == "__main__":
    sys.exit(main())

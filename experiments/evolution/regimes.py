"""Eight regimes of learning, and ways to spend the same tokens in each; see README.md.

    python experiments/evolution/regimes.py --seeds 301-308 --jobs 2
    python experiments/evolution/regimes.py --report

A run that has a line in results/regimes.jsonl with the same settings is not repeated. The report
prints the table of README.md: means over seeds, worst seeds, paired differences, and losses.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from lines import Line, append, circumstances, read
from stats import paired

if TYPE_CHECKING:
    from outcome import Outcome

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Regime:
    """A task and a shape of a run.

    Attributes:
        name: Of the regime.
        note: What it is, for the table.
        rounds: Rounds of the evolved run.
        steps: GRPO steps of a round.
        lr: lr of the first guess.
        low: Least lr of the range.
        high: Greatest lr.
        known: The best lr of a grid, with other seeds.
        size: Agents.
        prompts: Prompts of a step of each of `size` agents.
        validation: Validation prompts behind a fitness.
        settings: What differs otherwise, by dotted path.
        init: Where agents begin.
    """

    name: str
    note: str
    rounds: int
    steps: int
    lr: float
    low: float
    high: float
    known: float
    size: int = 8
    prompts: int = 4
    validation: int = 64
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    init: str = "latin_hypercube"

    @property
    def step(self) -> int:
        """Rows of a step of all agents."""
        return self.size * self.prompts * GROUP

    @property
    def rows(self) -> int:
        """Rows that each arm samples, in training and in evaluations: those with an archive.

        It evaluates all agents at four decisions, the archive and the best agent at three of them,
        and three finalists twice; all agents once more where they begin alike.
        """
        agents = 16 if self.size == 8 else 12  # 8, 4, 2, 2 or 4, 4, 2, 2
        measured = agents + 3 * 2 + 3 * 2 + (self.size if self.init == "same" else 0)
        return self.rounds * self.steps * self.step + measured * self.validation


GROUP = 8
_NOISY = {"algorithm.temperature": 1.6, "evolve.fitness.temperature": 1.6}
REGIMES = {
    one.name: one
    for one in (
        Regime("fast", "as shipped", 6, 8, 1e-5, 1e-5, 1e-2, 1e-3),
        Regime("slow", "a round moves fitness by .02", 24, 2, 1e-4, 5e-5, 4e-4, 4e-4),
        Regime("medium", "a first guess far too low", 16, 3, 3e-5, 3e-5, 2e-3, 1e-3),
        Regime("many", "rounds of one step", 40, 1, 1e-5, 1e-5, 1e-2, 1e-3),
        Regime(
            "noisy", "16 validation prompts, a base that solves .1", 6, 8, 1e-5, 1e-5, 1e-2, 2e-3,
            validation=16, settings=_NOISY,
        ),
        Regime("collapse", "most of the range collapses", 12, 4, 1e-2, 2e-4, 5e-2, 1e-3),
        Regime("same", "all agents from one guess", 6, 8, 1e-5, 1e-5, 1e-2, 1e-3, init="same"),
        Regime("four", "four agents", 6, 8, 1e-5, 1e-5, 1e-2, 2e-3, size=4),
    )
}  # fmt: skip

#: Tasks that no choice saw.
UNSEEN = {
    one.name: one
    for one in (
        Regime(
            "foods", "other rewards, a narrow range", 24, 1, 1e-4, 5e-5, 4e-4, 4e-4,
            prompts=2,
            settings={
                "model.name": "tiny-foods", "env.kind": "foods",
                "env.args": {"validation_size": 512}, "evolve.fitness.test_prompts": 256,
            },
        ),
        Regime(
            "smollm2", "a real model, easy sums", 12, 2, 1e-4, 1e-5, 1e-2, 1e-3, prompts=2,
            validation=32,
            settings={
                "model.name": "smollm2", "env.kind": "reasoning_gym:chain_sum",
                "env.args": {
                    "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2,
                    "test_size": 480,
                },
                "env.prompt": "{question}", "algorithm.update_epochs": 1,
                "algorithm.max_output_tokens": 6, "evolve.fitness.test_prompts": 256,
                "evolve.fitness.test_samples": 1,
            },
        ),
    )
}  # fmt: skip
ALL = {**REGIMES, **UNSEEN}

_COMMON: dict[str, Any] = {
    "model.name": "tiny-sums",
    "model.lora.r": 8,
    "env.kind": "sums",
    "algorithm.update_epochs": 2,
    "algorithm.group_size": GROUP,
    "evolve.fitness.test_samples": 4,
    "evolve.fitness.test_prompts": 500,
    "engine.device": "cpu",
    "engine.threads": 1,
    "record.completions": 0,
    "record.checkpoints": "last",
    "record.optuna": False,
}
_STILL: dict[str, Any] = {
    "evolve.selection": "none",
    "evolve.exploration": "none",
    "evolve.significance": None,
    "evolve.archive": False,
    "evolve.dead_steps": None,
    "evolve.fitness.final_samples": 0,
    "population.sizes": "constant",
}


@dataclass(frozen=True)
class Arm:
    """A way to spend the rows.

    Attributes:
        note: What it is.
        settings: By dotted path.
        once: One round, evaluated at its end, with as many steps as the rows allow.
        alone: One agent with all rows, at the known lr.
    """

    note: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    once: bool = False
    alone: bool = False


ARMS: dict[str, Arm] = {
    "guess": Arm("all agents at the first guess", _STILL, once=True),
    "random": Arm("random guesses within the range", _STILL, once=True),
    "known": Arm("one agent at the best lr", _STILL, once=True, alone=True),
    "halving": Arm(
        "halving alone",
        {"evolve.selection": "halving", "evolve.exploration": "none"},
    ),
    "evolved": Arm("the defaults"),
    "no-copies": Arm("the defaults without copies", {"evolve.selection": "halving"}),
    "no-mutation": Arm("the defaults without mutation", {"evolve.exploration": "none"}),
    "archive": Arm("the defaults with an archive", {"evolve.archive": True}),
    # Not a way to spend rows: all agents to the end, and what each round says of them.
    "watch": Arm(
        "no selection, evaluated after each share of the run",
        {**_STILL, "evolve.fitness.samples": 4, "record.checkpoints": "last"},
    ),
}
MAIN = ("evolved", "random", "known", "halving", "guess", "no-copies", "no-mutation", "archive")


def overrides(regime: Regime, name: str, seed: int) -> dict[str, Any]:
    """Return all settings of a run, by dotted path."""
    from evo_grpo.seeding import generator

    arm = ARMS[name]
    settings = {
        **_COMMON,
        **regime.settings,
        "name": f"{regime.name}-{name}",
        "seed": seed,
        "population.size": regime.size,
        "population.rounds": regime.rounds,
        "population.steps_per_round": regime.steps,
        "population.init": regime.init,
        "algorithm.lr": regime.lr,
        "algorithm.prompts_per_step": regime.prompts,
        "evolve.fitness.prompts": regime.validation,
        "evolve.hyperparameters": {"lr": {"min": regime.low, "max": regime.high}},
    }
    if arm.once:
        agents = 1 if arm.alone else regime.size
        steps = (regime.rows - agents * regime.validation) // regime.step
        settings |= {"population.rounds": 1, "population.steps_per_round": steps}
    if arm.alone:
        settings |= {
            "population.size": 1,
            "algorithm.prompts_per_step": regime.size * regime.prompts,
            "algorithm.lr": regime.known,
            "evolve.hyperparameters": {},
        }
    if name in ("guess", "known"):
        settings["population.init"] = "same"
    if name == "random":
        import math

        drawn = generator(seed, "regimes", "random").uniform(
            math.log(regime.low), math.log(regime.high), regime.size
        )
        settings["population.init"] = [{"lr": math.exp(one)} for one in drawn.tolist()]
    if name == "watch":
        settings["population.init"] = "latin_hypercube"
    return {**settings, **arm.settings}


def measure(regime: str, name: str, seed: int, more: Mapping[str, Any]) -> Line:
    """Run an arm once and return its line."""
    import tempfile
    import time

    import one_run
    from outcome import played

    from evo_grpo.errors import RunFailedError

    one_run.quiet()
    settings = {**overrides(ALL[regime], name, seed), **more}
    line: Line = {"regime": regime, "arm": name, "seed": seed, "overrides": settings, "state": "ok"}
    start = time.perf_counter()
    shm = Path("/dev/shm")
    where = str(shm) if shm.is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="regimes-", dir=where) as folder,
        one_run.metered() as meter,
    ):
        try:
            outcome = played(settings, Path(folder) / "run", progress=False)
        except RunFailedError as error:
            line |= {"state": "failed", "reason": str(error), "test": 0.0}
        else:
            line |= _found(outcome, whole=name == "watch")
    line["training"] = {"rows": meter.training.rows, "tokens": meter.training.tokens}
    line["evaluation"] = {"rows": meter.evaluation.rows, "tokens": meter.evaluation.tokens}
    return {**line, "wall_seconds": round(time.perf_counter() - start, 2)}


def _found(outcome: Outcome, *, whole: bool) -> Line:
    """Return what a line says of a finished run; `whole` keeps the rewards of prompts and steps."""
    best = outcome.summary["best"]
    rounds = [
        [
            {
                "agent": agent.agent,
                "lr": agent.hparams.lr,
                "fitness": agent.score and agent.score.mean,
                "n": agent.score and agent.score.n,
                **(
                    {
                        "per_prompt": agent.score and agent.score.per_prompt,
                        "rewards": agent.step_rewards,
                    }
                    if whole
                    else {}
                ),
            }
            for agent in record.agents
        ]
        for record in outcome.rounds
    ]
    return {
        "test": best["mean"],
        "base": outcome.summary["base"]["mean"],
        "kind": best["kind"],
        "rounds": rounds,
        "decisions": [[one.kind for one in record.decisions] for record in outcome.rounds],
    }


def seeds(text: str) -> list[int]:
    """Read seeds: "301-308", "3", or "0,2,8-15"."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        found += range(int(first), int(last if dash else first) + 1)
    return found


def run(jobs: Sequence[tuple[str, str, int]], out: Path, processes: int, label: str) -> None:
    """Measure what has no line yet, and append a line as each run finishes."""
    done = {(line["regime"], line["arm"], line["seed"]) for line in read(out)}
    left = [job for job in jobs if (job[0], label or job[1], job[2]) not in done]
    print(f"{len(jobs) - len(left)} of {len(jobs)} runs are there, {len(left)} to go", flush=True)
    shared = circumstances(processes)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(measure, *job, {}): job for job in left}
        for number, future in enumerate(as_completed(futures), start=1):
            line = {**future.result(), **shared}
            line["arm"] = label or line["arm"]
            append(out, line)
            print(
                f"{number} of {len(left)}: {line['regime']}, {line['arm']}, seed {line['seed']}: "
                f"{line['test']:.3f}, {line['wall_seconds']} s",
                flush=True,
            )


def main(given: Sequence[str] | None = None) -> int:
    """Measure, or print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--regimes", nargs="+", choices=list(ALL), default=list(REGIMES))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(MAIN))
    parser.add_argument("--seeds", type=seeds, default=seeds("301-308"))
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=2, help="processes at once")
    parser.add_argument("--label", default="", help="another name of the arm in the results")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "regimes.jsonl")
    parser.add_argument("--report", action="store_true", help="print the tables of what is there")
    options = parser.parse_args(given)
    if not options.report:
        jobs = [(r, a, s) for s in options.seeds for a in options.arms for r in options.regimes]
        run(jobs, options.out, options.jobs, options.label)
    print(tables([one for one in read(options.out) if one["seed"] in options.seeds]))
    return 0


def tables(lines: Sequence[Line]) -> str:
    """Return the results as tables in Markdown."""
    scores: dict[tuple[str, str], dict[int, float]] = {}
    bases: dict[str, list[float]] = {}
    tokens: dict[str, list[float]] = {}
    for line in lines:
        regime, arm = line["regime"], line["arm"]
        scores.setdefault((regime, arm), {})[line["seed"]] = line["test"]
        if "base" in line:
            bases.setdefault(regime, []).append(line["base"])
        spent = (line[name]["tokens"] / 1000 for name in ("training", "evaluation"))
        tokens.setdefault(f"{regime} {arm}", []).append(sum(spent))
    regimes = [name for name in ALL if any(name == regime for regime, _ in scores)]
    arms = [arm for arm in dict.fromkeys(arm for _, arm in scores) if arm != "watch"]
    rows = [["arm", *regimes]]
    for arm in arms:
        cells = [arm]
        for regime in regimes:
            own = scores.get((regime, arm))
            cells.append(
                ""
                if own is None
                else f"{statistics.mean(own.values()):.3f} ({min(own.values()):.2f}), "
                f"{statistics.mean(tokens[f'{regime} {arm}']):.0f}k"
            )
        rows.append(cells)
    base = ["base", *(f"{statistics.mean(bases[r]):.3f}" if r in bases else "" for r in regimes)]
    rows.insert(1, base)
    losses = [["arm", *regimes, "largest"]]
    apart = [["evolved −", *regimes]]
    for arm in arms:
        cells, found = [arm], list[float]()
        for regime in regimes:
            own, known = scores.get((regime, arm)), scores.get((regime, "known"))
            if own is None or known is None:
                cells.append("")
                continue
            best, low = statistics.mean(known.values()), statistics.mean(bases[regime])
            found.append((best - statistics.mean(own.values())) / (best - low))
            cells.append(f"{found[-1]:.2f}")
        losses.append([*cells, f"{max(found):.2f}" if found else ""])
        if arm != "evolved":
            pairs = [
                paired(scores.get((r, "evolved"), {}), scores.get((r, arm), {})) for r in regimes
            ]
            apart.append(
                [
                    arm,
                    *(
                        "" if one is None else f"{one.mean:+.3f} [{one.low:+.3f}, {one.high:+.3f}]"
                        for one in pairs
                    ),
                ]
            )
    ranks = _ranks([line for line in lines if line["arm"] == "watch"], regimes)
    return "\n\n".join(
        f"**{title}**\n\n{_markdown(table)}"
        for title, table in (
            ("Mean test (worst seed), tokens", rows),
            ("Loss: (known − arm) / (known − base)", losses),
            ("Evolved minus the arm, paired by seed, 95%", apart),
            ("Rank correlation of the fitness after a share of the run with the last", ranks),
        )
    )


def _ranks(lines: Sequence[Line], regimes: Sequence[str]) -> list[list[str]]:
    """Return by regime how the agents of `watch` rank after each quarter but the last."""
    table = [["after", *regimes]]
    for share in (0.25, 0.5, 0.75):
        cells = [f"{share:g}"]
        for regime in regimes:
            found = list[float]()
            for line in (one for one in lines if one["regime"] == regime):
                rounds = line["rounds"]
                now, last = rounds[round(share * len(rounds)) - 1], rounds[-1]
                ranked = [_order([agent["fitness"] for agent in one]) for one in (now, last)]
                found.append(statistics.correlation(*ranked))
            cells.append(f"{statistics.mean(found):.2f} ({min(found):.2f})" if found else "")
        table.append(cells)
    return table


def _order(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share the mean of theirs."""
    return [
        sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values
    ]


def _markdown(table: Sequence[Sequence[str]]) -> str:
    header, *rows = table
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())

"""One run of one arm with one seed, in a folder that is deleted afterwards, and its line."""

from __future__ import annotations

import math
import tempfile
import time
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from arms import ARMS, SEARCHED, TASKS, Arm, Task, overrides, plan
from outcome import Outcome, played
from transformers.utils import logging as transformers_logging

from evo_grpo.envs.protocol import Ask
from evo_grpo.errors import RunFailedError
from evo_grpo.population.cohort.sampler import PopulationSampler
from evo_grpo.record.records import RoundRecord
from evo_grpo.types import CompletionGroup

LEVEL = 1.645
"""One-sided 5% of a normal distribution."""


@dataclass
class Spent:
    """Completions that were sampled for one purpose.

    Attributes:
        rows: How many.
        tokens: Their tokens, end tokens too.
    """

    rows: int = 0
    tokens: int = 0


@dataclass
class Meter:
    """What a run samples. Whatever is neither training nor the test at the end is evaluation."""

    training: Spent = field(default_factory=Spent)
    evaluation: Spent = field(default_factory=Spent)
    test: Spent = field(default_factory=Spent)

    def count(self, stream: str, groups: Sequence[Sequence[CompletionGroup]]) -> None:
        """Add what one generation call sampled."""
        spent = {"sample": self.training, "test": self.test}.get(stream, self.evaluation)
        for completion in (c for mine in groups for group in mine for c in group.completions):
            spent.rows += 1
            spent.tokens += len(completion.token_ids)


@contextmanager
def metered() -> Generator[Meter]:
    """Count every completion at the one place where all are sampled."""
    meter = Meter()
    names: dict[int, str] = {}
    made: list[PopulationSampler] = []  # kept alive, so that no id is given twice
    plain = {name: getattr(PopulationSampler, name) for name in ("in_training", "compared")}
    sample = PopulationSampler.sample

    def naming(kind: str) -> staticmethod[..., PopulationSampler]:
        def make(*args: Any, stream: Sequence[str | int], **settings: Any) -> PopulationSampler:
            sampler = plain[kind](*args, stream=stream, **settings)
            names[id(sampler)] = str(stream[0])
            made.append(sampler)
            return sampler

        return staticmethod(make)

    def counting(self: PopulationSampler, ask: Ask) -> list[list[CompletionGroup]]:
        groups = sample(self, ask)
        meter.count(names[id(self)], groups)
        return groups

    patches = {"sample": counting, **{kind: naming(kind) for kind in plain}}
    with mock.patch.multiple(PopulationSampler, **patches):
        yield meter


def quiet() -> None:
    """Set a process up: one thread, no progress bars of third parties."""
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # peft 0.21 asks a transformers 5 model by the older name.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)


def measure(task_name: str, arm_name: str, seed: int, quick: bool = False) -> dict[str, Any]:
    """Run an arm once.

    Args:
        task_name: Key of `TASKS`.
        arm_name: Key of `ARMS`.
        seed: Of the run.
        quick: At the small size that shows nothing but that it works.

    Returns:
        The line of the results file, but for what all lines of a call share. A run in which no
        agent stayed finite is a result too: `state` is failed, and its test score 0.
    """
    arm, task = ARMS[arm_name], TASKS[task_name]
    task = task.quick() if quick else task
    made, settings = plan(task, arm), overrides(task, arm, seed)
    line: dict[str, Any] = {
        "task": task.name,
        "arm": arm.name,
        "seed": seed,
        "state": "ok",
        "overrides": settings,
        "planned": {"training": made.training, "evaluation": made.evaluation},
    }
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="evolution-") as folder, metered() as meter:
        try:
            outcome = _drive(task, arm, settings, Path(folder))
        except RunFailedError as error:
            failed = {"state": "failed", "reason": str(error), "test": {"mean": 0.0, "se": 0.0}}
            line |= {**failed, "collapsed": 1.0, "curve": [], "schedule": []}
        else:
            line |= found(outcome, task.settings["evolve.fitness.samples"])
    for name in ("training", "evaluation"):
        spent: Spent = getattr(meter, name)
        line[name] = {"rows": spent.rows, "tokens": spent.tokens}
    return {**line, "wall_seconds": round(time.perf_counter() - start, 2)}


def _drive(task: Task, arm: Arm, settings: dict[str, Any], folder: Path) -> Outcome:
    if arm.driver == "tpe":
        from tpe import search  # imported here: optuna takes its time, and one arm needs it

        return search(task, arm, settings, folder)
    return played(settings, folder / "run")


def found(outcome: Outcome, samples: int) -> dict[str, Any]:
    """Return what a line says of a finished run.

    Args:
        outcome: The run.
        samples: Completions per validation prompt.
    """
    rounds, summary = outcome.rounds, outcome.summary
    base, best = summary["base"], summary["best"]
    last = rounds[-1]
    return {
        "test": {name: best[name] for name in ("mean", "se", "n")},
        "base": {name: base[name] for name in ("mean", "se", "n")},
        "fitness": best["fitness"],
        "candidates": summary.get("candidates"),
        "curve": list(outcome.curve),
        "survivors_lr": [[agent.hparams.lr for agent in record.agents] for record in rounds],
        "collapsed": collapsed(last, base["mean"], base["se"], samples),
        "schedule": schedule(rounds, best["member"]),
        "seconds_per_round": [round(sum(record.seconds.values()), 3) for record in rounds],
    }


def collapsed(last: RoundRecord, base: float, base_se: float, samples: int) -> float:
    """Return the share of the agents that are left after the last round and worse than the base.

    Failed ones are; of the others those whose fitness is significantly below the base's score
    (one-sided, 5%). The error of a fitness is that of coin throws with the base's probability: an
    agent that always fails shows no spread of its own.

    Args:
        last: The last round.
        base: Score of the base on the test split.
        base_se: Its standard error.
        samples: Completions per validation prompt.
    """
    bad = 0
    there = {member.agent for member in last.members}
    agents = [agent for agent in last.agents if agent.agent in there]
    for agent in agents:
        if agent.score is None:
            bad += 1
            continue
        variance = max(0.0, base * (1 - base)) / (agent.score.n * samples)
        bad += agent.score.mean < base - LEVEL * math.sqrt(variance + base_se**2)
    return bad / len(agents)


def schedule(rounds: Sequence[RoundRecord], winner: int) -> list[dict[str, float]]:
    """Follow the winner backwards: round -> what its line trained with.

    Args:
        rounds: All of them.
        winner: Member id of the winner.

    Returns:
        One entry per round in which a member of the line trained, first to last. A round in which
        the line lay in the archive has none.
    """
    records = {(a.round, a.member): a for record in rounds for a in record.agents}
    members = {m.id: m for record in rounds for m in record.members}
    current: int | None = winner
    line: list[dict[str, float]] = []
    for number in reversed(range(len(rounds))):
        while current in members and members[current].born > number:
            current = members[current].parent
        agent = None if current is None else records.get((number, current))
        if agent is not None:
            values = {name: agent.hparams.get(name) for name in SEARCHED}
            line.append({"round": number, **{k: v for k, v in values.items() if v is not None}})
    return line[::-1]

"""Optuna's TPE with median pruning: independent trials of one agent, at the rows of the others.

A trial is a run of the package with one agent, and a rung is a round of it. Unpruned, there are as
many trials as the reference arm has agents, each with the rows of one of them; a pruned trial
leaves its rows to more trials. The last one may find fewer rungs left. The trial with the best last
fitness is judged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
from arms import RANGES, Arm, Task
from outcome import Outcome, best_fitness, played

from evo_grpo.errors import RunFailedError
from evo_grpo.record.observer import Observer
from evo_grpo.record.records import RoundRecord
from evo_grpo.seeding import derive

FIRST_TRIALS = 4
"""Trials before TPE proposes and the median prunes; Optuna's own 10 and 5 would leave nothing of
either in a budget of eight whole trials."""


class Rungs(Observer):
    """Reports every round to Optuna and ends a trial that it prunes.

    Args:
        trial: Optuna's.
        values: Gets every fitness.
        prune: Whether trials are pruned at all: not in their last rung.
    """

    def __init__(self, trial: optuna.Trial, values: list[float], last: int) -> None:
        """Begin at the first rung."""
        self._trial = trial
        self._values = values
        self._last = last

    def round_done(self, record: RoundRecord) -> None:
        """Report the rung; see `Observer`."""
        value = best_fitness(record)
        self._values.append(value)
        self._trial.report(value, record.round)
        if record.round < self._last and self._trial.should_prune():
            raise optuna.TrialPruned


def search(task: Task, arm: Arm, settings: dict[str, Any], folder: Path) -> Outcome:
    """Spend the rows of a task on trials.

    Args:
        task: What is learnt.
        arm: Unused; all drivers are called alike.
        settings: Of a trial of one agent, by dotted path; its lr is proposed here.
        folder: Gets one run folder per trial.

    Raises:
        RunFailedError: No trial came to its end.
    """
    del arm
    rungs = task.size * task.rounds
    sampler = optuna.samplers.TPESampler(
        seed=derive(settings["seed"], "tpe") % 2**32, n_startup_trials=FIRST_TRIALS
    )
    pruner = optuna.pruners.MedianPruner(n_startup_trials=FIRST_TRIALS)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
    values: list[float] = []
    best: Outcome | None = None
    while len(values) < rungs:
        trial = study.ask()
        lr = trial.suggest_float("lr", RANGES["lr"]["min"], RANGES["lr"]["max"], log=True)
        rounds = min(task.rounds, rungs - len(values))
        changed = {**settings, "algorithm.lr": lr, "population.rounds": rounds}
        before = len(values)
        try:
            outcome = played(
                changed,
                folder / f"trial-{trial.number}",
                observer=Rungs(trial, values, rounds - 1),
            )
        except optuna.TrialPruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            continue
        except RunFailedError:
            values.append(0.0)  # the rung was paid for, and no round of it was recorded
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        study.tell(trial, outcome.curve[-1])
        assert len(values) == before + rounds
        if best is None or outcome.curve[-1] > best.curve[-1]:
            best = outcome
    if best is None:
        raise RunFailedError(f"tpe: none of {len(study.trials)} trials came to its end")
    shares = [max(values[: (share + 1) * task.size]) for share in range(task.rounds)]
    return Outcome(best.rounds, best.summary, shares)

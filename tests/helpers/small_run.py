"""Runs of a second or less: few agents, prompts and steps on the embedded model."""

import json
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import yaml

from evo_grpo import resume, run
from evo_grpo import settings as configuration
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.leaderboard import leaderboard
from evo_grpo.record.observer import Observer
from evo_grpo.record.summary import read_summary

#: Three agents, two of which differ in group size, with everything on that a run can have.
SETTINGS = {
    "name": "small",
    "seed": 3,
    "model": {"name": "tiny-sums", "lora": {"r": 2, "target_modules": ["q_proj", "v_proj"]}},
    "env": {"kind": "sums", "args": {"high": 20}},
    "population": {"size": 3, "rounds": 3, "steps_per_round": 1, "sizes": "constant"},
    "algorithm": {"group_size": 4, "prompts_per_step": 2, "update_epochs": 2, "lr": 1e-3},
    "evolve": {
        "hyperparameters": {
            "lr": {"min": 1e-4, "max": 1e-2},
            "beta": {"min": 0.0, "max": 0.1},
            "clip_coef": {"min": 0.1, "max": 0.3},
            "group_size": {"min": 3, "max": 6},
        },
        # Every plan is carried out as it is; the tests of what else decides switch it on.
        "significance": None,
        "archive": False,
        "dead_steps": None,
        "fitness": {"prompts": 6, "test_prompts": 6, "test_samples": 2, "final_samples": 0},
    },
    "engine": {"device": "cpu"},
}


def small(**changes):
    """The small run's config with whole keys (`a__b=...`) set."""
    return configuration.from_dict(_with(json.loads(json.dumps(SETTINGS)), changes))


def edited(folder, **changes):
    """Set keys (`a__b=...`) in the population.yaml of a run, as a person would; its settings."""
    file = folder / "population.yaml"
    data = _with(yaml.safe_load(file.read_text()), changes)
    file.write_text(yaml.safe_dump(data))
    return data


def _with(data, changes):
    for path, value in changes.items():
        place = data
        *parents, last = path.split("__")
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value
    return data


class Told(Observer):
    """Notes the calls that it gets, and stops the run when asked to.

    Args:
        stop: (what, round) to raise KeyboardInterrupt at: a stage's name, or "done".
    """

    def __init__(self, stop=None):
        self.stop = stop
        self.calls = []

    def _note(self, what, round):
        self.calls.append((what, round))
        if (what, round) == self.stop:
            raise KeyboardInterrupt

    def started(self, run_dir, rounds, first_round, settings):
        self._note("started", first_round)

    def stage(self, round, name, done, total):
        assert 0 <= done <= total
        self._note(name, round)

    def round_done(self, record):
        self._note("done", record.round)

    def finished(self, summary):
        self._note("finished", summary["rounds"])


@contextmanager
def broken_step(monkeypatch, agents, round, step=0):
    """Put a NaN into the advantages of some agents at one step, as an overflow would."""
    learn = Cohort.learn

    def poisoned(self, batches, *, stream):
        if tuple(stream) == ("learn", round, step):
            for batch in batches:
                if batch.agent in agents:
                    batch.rows[:] = [replace(row, advantage=float("nan")) for row in batch.rows]
        return learn(self, batches, stream=stream)

    with monkeypatch.context() as patch:
        patch.setattr(Cohort, "learn", poisoned)
        yield


def stopped_and_resumed(config, folder, stop):
    """Stop a run where told, go on with it, and return the folder."""
    try:
        run(config, out=folder, observer=Told(stop))
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError(f"the run never came to {stop}")
    return resume(folder)


def study_of(folder):
    """The study in the journal of a run folder."""
    import optuna  # here, for ranks import this module and need none
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    storage = JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    return optuna.load_study(study_name=None, storage=storage)


def outcome(folder):
    """All that must be equal between equal runs: everything but seconds."""
    summary = read_summary(folder)
    summary.pop("wall_seconds")
    rounds = []
    for record in read_rounds(folder):
        agents = tuple(
            replace(a, wall_seconds=0.0, metrics=_known(a.metrics)) for a in record.agents
        )
        # As text, in which NaN is equal to itself.
        decisions = str(record.decisions)
        timeless = replace(record, seconds={}, started=None, ended=None)
        rounds.append((replace(timeless, agents=agents, decisions=()), decisions))
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    completions = {p.name: p.read_text() for p in sorted((folder / "completions").iterdir())}
    return {
        "leaderboard": leaderboard(folder).drop(columns="wall_seconds").to_dict("records"),
        "summary": summary,
        "rounds": rounds,
        "files": files,
        "completions": completions,
    }


def _known(metrics):
    """NaN is not equal to itself."""
    return {k: None if np.isnan(v) else v for k, v in metrics.items()}

"""Single rounds of a prepared run, and a writer that remembers them."""

from dataclasses import replace
from hashlib import sha256

import torch

from evo_grpo.population.round import Round, play_round
from evo_grpo.population.steps import RunWriter, Training, train
from evo_grpo.record.observer import Observer


class Memory(RunWriter):
    """A writer that remembers what it is given, and what the cohort was like just then."""

    def __init__(self):
        self.steps = []
        self.checkpoints = []
        self.saved = {}
        self.commits = []
        self.slots_at_commit = []

    def checkpoint(self, cohort, round, slot):
        self.checkpoints.append((round, slot))
        self.cohort = cohort
        # Digests of what the agent is now, not of its name: a swapped or late one shows.
        self.saved[f"at/{slot}"] = digest(adapters(cohort)[slot])
        return f"at/{slot}"

    def step(self, round, step, rows):
        self.steps.append((round, step, [row["agent"] for row in rows]))

    def commit(self, record, completions):
        self.commits.append((record, list(completions)))
        self.slots_at_commit.append(adapters(self.cohort))


def adapters(cohort):
    return {
        slot: [p.detach().clone() for p in cohort.slots.parameters(state.adapter)]
        for slot, state in cohort.agents.items()
    }


def digest(tensors):
    return sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def settings_of(made, window=None, sizes=None, **changes):
    """The settings of a run without a share of rows, with others in the places of these."""
    if sizes is not None:
        changes["population"] = made.population.replace(sizes=sizes)
    if window is not None:
        fitness = made.evolve.fitness.replace(window=window)
        changes["evolve"] = made.evolve.replace(fitness=fitness)
    return replace(made, **{"rows_per_step": None, **changes})


def play(prepared, number=0, writer=None, past=(), **changes):
    settings = settings_of(prepared.round_settings, **changes)
    parts = prepared.cohort, prepared.env, settings, prepared.slots, number
    return play_round(Round(*parts, writer or Memory(), Observer(), past=past))


def train_round(prepared, observer=None):
    """Take the steps of the first round; returns the tallies and the starts used."""
    parts = prepared.cohort, prepared.env, prepared.round_settings, prepared.slots
    return train(Training(*parts, 0, RunWriter(), observer or Observer()))

"""Slots that play no rounds: copies of agents, and the archive of the best agent so far."""

from __future__ import annotations

from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.types import Score, Slot


def add_spare_like(cohort: Cohort, slot: int) -> Slot:
    """Add a slot that plays no rounds, as a copy of an agent; return the slot."""
    state = cohort.agents[slot]
    spare = cohort.add_spare(state.member, state.hparams, state.rank)
    cohort.copy(slot, spare.slot)
    spare.hparams = state.hparams
    return spare.slot


def put_into_archive(cohort: Cohort, slot: int, score: Score) -> None:
    """Copy an agent, with its fitness, into the slot of the best agent so far."""
    state = cohort.agents[slot]
    if cohort.archive is None:
        cohort.archive = cohort.add_spare(state.member, state.hparams, state.rank)
    cohort.move({cohort.archive.slot: state.rank}, weights=False)
    cohort.copy(slot, cohort.archive.slot)
    cohort.archive.member = state.member
    cohort.archive.hparams = state.hparams
    cohort.archive.history = [score]

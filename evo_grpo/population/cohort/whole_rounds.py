"""Keeps the state of agents between two rounds, to restore it after an interrupted round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self, final

from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.cohort.state import AgentState, Packed, packed, unpack
from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Slot


@dataclass(frozen=True)
class _KeptAgent:
    """An agent between two rounds: its state, and its tensors on the CPU."""

    state: AgentState
    hparams: Hparams
    tensors: Packed


@dataclass(frozen=True)
class WholeRound:
    """The agents of a population between two rounds, in a cohort of one process.

    The tensors are copies on the CPU: 12 bytes per parameter of an adapter, 16 with a reference of
    its own.

    Attributes:
        slots: Slots of the population, without the archive.
        rounds: Number of finished rounds.
    """

    slots: tuple[Slot, ...]
    rounds: int
    _cohort: Cohort
    _agents: tuple[_KeptAgent, ...]
    _archive: Slot | None
    _known: frozenset[int]

    @classmethod
    def of(cls, cohort: Cohort, slots: Sequence[Slot], rounds: int) -> Self:
        """Copy the state of these agents and of the archive."""
        archive = None if cohort.archive is None else cohort.archive.slot
        everyone = [*slots, *(() if archive is None else (archive,))]
        kept = tuple(_kept(cohort, cohort.agents[slot]) for slot in everyone)
        return cls(tuple(slots), rounds, cohort, kept, archive, frozenset(cohort.agents))

    def put_back(self) -> None:
        """Restore the agents, and remove the slots that were added since.

        Slots and member ids that were used since are not used again.
        """
        cohort = self._cohort
        # Stacked weights may hold gradients of an unfinished step.
        cohort.slots.derived.clear()
        for kept in self._agents:
            _restore(cohort, kept)
        cohort.archive = None if self._archive is None else cohort.agents[self._archive]
        for slot in sorted(set(cohort.agents) - self._known):
            cohort.remove(slot)


def _kept(cohort: Cohort, state: AgentState) -> _KeptAgent:
    copy = replace(state, history=list(state.history))
    return _KeptAgent(copy, state.hparams, packed(cohort.slots, state, moments=True))


def _restore(cohort: Cohort, kept: _KeptAgent) -> None:
    slots, before = cohort.slots, kept.state
    if before.adapter not in slots.names:  # the agent has left
        slots.add(before.adapter)
    if before.has_reference and before.reference not in slots.names:
        cohort.references.add(before)
    elif not before.has_reference and before.reference in slots.names:
        slots.remove(before.reference)
    state = replace(before, history=list(before.history))
    cohort.agents[before.slot] = state
    fresh = partial(cohort.fresh_optimizer, before.slot, kept.hparams)
    unpack(slots, state, kept.tensors, fresh)
    state.hparams = kept.hparams
    state.optimizer.zero_grad(set_to_none=True)


@final
class LastWholeRound:
    """Keeps the population of a cohort as it was after its latest finished round.

    It keeps nothing if several processes train, since an error on one of them ends all, or if one
    DeepSpeed engine trains all agents, whose state in the middle of a step is unknown.
    """

    def __init__(self, cohort: Cohort) -> None:
        self._cohort = cohort
        self._kept: WholeRound | None = None

    def keep(self, slots: Sequence[Slot], rounds: int) -> None:
        """Keep the agents of these slots, after `rounds` finished rounds."""
        self._kept = None  # free its memory first
        if self._cohort.team.size == 1 and not self._cohort.together:
            self._kept = WholeRound.of(self._cohort, slots, rounds)

    def put_back(self) -> WholeRound | None:
        """Restore the agents that were kept last; return them, None if none were kept."""
        if self._kept is not None:
            self._kept.put_back()
        return self._kept

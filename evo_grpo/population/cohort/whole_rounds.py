"""Keeps the state of agents between two rounds, to restore it after an interrupted round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import final

from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.cohort.state import AgentState, Packed, packed, unpack
from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Slot


@final
class LastWholeRound:
    """Keeps the population of a cohort as it was after its latest finished round.

    The tensors are copies on the CPU: 12 bytes per parameter of an adapter, 16 with a reference of
    its own. Nothing is kept if several processes train, since an error on one of them ends all, or
    if one DeepSpeed engine trains all agents, whose state in the middle of a step is unknown.

    Attributes:
        slots: Slots of the population that was kept last, without the archive.
        rounds: Number of finished rounds then.
    """

    def __init__(self, cohort: Cohort) -> None:
        self.slots: tuple[Slot, ...] = ()
        self.rounds = 0
        self._cohort = cohort
        self._agents: list[tuple[AgentState, Hparams, Packed]] = []
        self._archive: Slot | None = None
        self._known: frozenset[int] = frozenset()

    def keep(self, slots: Sequence[Slot], rounds: int) -> None:
        """Keep the agents of these slots and the archive, after `rounds` finished rounds."""
        cohort = self._cohort
        self._agents = []  # free their memory first
        if cohort.team.size > 1 or cohort.together:
            return
        self.slots, self.rounds, self._known = tuple(slots), rounds, frozenset(cohort.agents)
        self._archive = None if cohort.archive is None else cohort.archive.slot
        agents: list[tuple[AgentState, Hparams, Packed]] = []
        for slot in (*slots, *(() if self._archive is None else (self._archive,))):
            state = cohort.agents[slot]
            copy = replace(state, history=list(state.history))
            tensors = packed(cohort.slots, state, moments=True)
            agents.append((copy, state.hparams, tensors))
        self._agents = agents  # all of them, or none after Ctrl-C

    def put_back(self) -> bool:
        """Restore what was kept last, and remove the slots that were added since.

        Slots and member ids that were used since are not used again.

        Returns:
            Whether anything was kept.
        """
        if not self._agents:
            return False
        cohort = self._cohort
        # Stacked weights may hold gradients of an unfinished step.
        cohort.slots.derived.clear()
        for before, hparams, tensors in self._agents:
            _restore(cohort, before, hparams, tensors)
        cohort.archive = None if self._archive is None else cohort.agents[self._archive]
        for slot in sorted(set(cohort.agents) - self._known):
            cohort.remove(slot)
        return True


def _restore(cohort: Cohort, before: AgentState, hparams: Hparams, tensors: Packed) -> None:
    slots = cohort.slots
    if before.adapter not in slots.names:  # the agent has left
        slots.add(before.adapter)
    if before.has_reference and before.reference not in slots.names:
        cohort.references.add(before)
    elif not before.has_reference and before.reference in slots.names:
        slots.remove(before.reference)
    state = replace(before, history=list(before.history))
    cohort.agents[before.slot] = state
    unpack(slots, state, tensors, partial(cohort.fresh_optimizer, before.slot, hparams))
    state.hparams = hparams
    state.optimizer.zero_grad(set_to_none=True)

"""Copies agents to spare slots and into the archive, mixes them, and keeps the last whole round."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import final

from evo_grpo.model.lora.resize import mix_products, mix_slots
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.cohort.state import AgentState, AgentTensors, copy_tensors, put_tensors
from evo_grpo.schema.hparams import LORA, Hparams, of_mean
from evo_grpo.types import Score, Slot


@final
class LastWholeRound:
    """Keeps the population of a cohort as it was after its latest finished round.

    The copies on the CPU take 12 bytes per parameter of an adapter, 16 if an agent has its own
    reference. With several processes nothing is kept, because an error in one process ends all. The
    same holds with DeepSpeed, because its state in the middle of a step is unknown. `slots`
    (without the archive) and `rounds`, the number of finished rounds, are those of the last copy.
    """

    def __init__(self, cohort: Cohort) -> None:
        self.slots: tuple[Slot, ...] = ()
        self.rounds = 0
        self._cohort = cohort
        self._agents: list[tuple[AgentState, Hparams, AgentTensors]] = []
        self._archive: Slot | None = None
        self._known: frozenset[int] = frozenset()

    def keep(self, slots: Sequence[Slot], rounds: int) -> None:
        """Copy the agents in `slots` and the archive to the CPU, after `rounds` finished rounds."""
        cohort = self._cohort
        self._agents = []  # free their memory first
        if cohort.team.size > 1 or cohort.trains_jointly:
            return
        self.slots, self.rounds, self._known = tuple(slots), rounds, frozenset(cohort.agents)
        self._archive = None if cohort.archive is None else cohort.archive.slot
        agents: list[tuple[AgentState, Hparams, AgentTensors]] = []
        for slot in (*slots, *(() if self._archive is None else (self._archive,))):
            state = cohort.agents[slot]
            copy = replace(state, history=list(state.history))
            tensors = copy_tensors(cohort.slots, state, moments=True)
            agents.append((copy, state.hparams, tensors))
        self._agents = agents  # all of them, or none after Ctrl-C

    def put_back(self) -> bool:
        """Restore the kept population; return False if no population was kept.

        Slots that were added since are removed. Their numbers, and member ids that were assigned
        since, are not used again.
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


def _restore(cohort: Cohort, before: AgentState, hparams: Hparams, tensors: AgentTensors) -> None:
    slots = cohort.slots
    if before.adapter not in slots.names:  # the agent has left
        slots.add(before.adapter)
    if before.has_reference and before.reference not in slots.names:
        cohort.references.add(before)
    elif not before.has_reference and before.reference in slots.names:
        slots.remove(before.reference)
    state = replace(before, history=list(before.history))
    cohort.agents[before.slot] = state
    put_tensors(slots, state, tensors, partial(cohort.fresh_optimizer, before.slot, hparams))
    state.hparams = hparams
    state.optimizer.zero_grad(set_to_none=True)


def add_spare_like(cohort: Cohort, slot: int) -> Slot:
    """Add a slot that does not train, as a copy of an agent; return the slot."""
    state = cohort.agents[slot]
    spare = cohort.add_spare(state.member, state.hparams, state.rank)
    cohort.copy(slot, spare.slot)
    spare.hparams = state.hparams
    return spare.slot


def put_into_archive(cohort: Cohort, slot: int, score: Score) -> None:
    """Copy an agent, with its fitness `score`, into the archive, the slot of the best agent."""
    state = cohort.agents[slot]
    if cohort.archive is None:
        cohort.archive = cohort.add_spare(state.member, state.hparams, state.rank)
    cohort.move({cohort.archive.slot: state.rank}, weights=False)
    cohort.copy(slot, cohort.archive.slot)
    cohort.archive.member = state.member
    cohort.archive.hparams = state.hparams
    cohort.archive.history = [score]


def may_mix(cohort: Cohort, first: int, second: int) -> bool:
    """Return whether the mean of two agents can be taken.

    Their adapters must have equal shapes, or the LoRA rank or the modules must be searched. With
    several processes, the names of the agents' module sets are compared instead of shapes, because
    this process may lack the adapters.
    """
    if f"{LORA}target_modules" in cohort.hp_config.names():
        return True
    states = [cohort.agents[slot] for slot in (first, second)]
    if cohort.team.size > 1:
        names = [state.hparams.lora_target_modules for state in states]
        return names[0] == names[1]
    left, right = (cohort.slots.shapes(state.adapter) for state in states)
    return list(left) == list(right) if _searched(cohort) else left == right


def mix_agents(cohort: Cohort, sources: Sequence[int], target: int) -> None:
    """Write the mean of the adapters of the agents `sources`, of this rank, to the slot `target`.

    The mean is taken of A and of B separately. But if the rank, alpha or modules are searched, A
    and B of different agents may not correspond. The mean is then taken of the products B A, with
    the largest rank and the modules of all agents, and the target's `lora_target_modules` is None
    if these modules are no named set.
    """
    states = [cohort.agents[slot] for slot in sources]
    names, into = [state.adapter for state in states], cohort.agents[target]
    if not _searched(cohort):
        if cohort.is_local(target):
            mix_slots(cohort.slots, names, into.adapter)
        return
    set_names = [state.hparams.lora_target_modules for state in states]
    sets = cohort.slots.target_sets
    modules = [sets.modules(name) for name in set_names if name is not None]
    all_named = len(modules) == len(set_names)
    union = sets.name_of(frozenset().union(*modules)) if all_named else None
    hparams = of_mean([state.hparams for state in states])
    into.hparams = hparams.replace(lora_target_modules=union)
    if cohort.is_local(target):
        mix_products(cohort.slots, names, into.adapter)
        into.optimizer = cohort.fresh_optimizer(into.slot, into.hparams)


def _searched(cohort: Cohort) -> bool:
    return any(name.startswith(LORA) for name in cohort.hp_config.names())

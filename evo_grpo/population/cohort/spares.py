"""Slots that play no rounds: copies of agents, their mean, and the archive of the best so far."""

from __future__ import annotations

from collections.abc import Sequence

from evo_grpo.model.lora.load import mix_slots
from evo_grpo.model.lora.resize import mix_products
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.schema.hparams import LORA, of_mean
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


def may_mix(cohort: Cohort, first: int, second: int) -> bool:
    """Return whether the mean of two agents can be taken.

    It can if their adapters have equal shapes, or what differs is searched: the rank, or the
    modules. On several ranks no agent has loaded an adapter with other modules, so the sets that
    agents have by name tell, also of agents whose weights are elsewhere.
    """
    if f"{LORA}target_modules" in cohort.hp_config.names():
        return True
    states = [cohort.agents[slot] for slot in (first, second)]
    if cohort.team.size > 1:
        names = [state.hparams.lora_target_modules for state in states]
        return names[0] == names[1]
    one, other = (cohort.slots.shapes(state.adapter) for state in states)
    return list(one) == list(other) if _searched(cohort) else one == other


def mix_agents(cohort: Cohort, sources: Sequence[int], target: int) -> None:
    """Write the mean of the adapters of agents of this rank to another slot.

    It is the mean of A and of B, unless related agents may differ in the basis of the two, where
    the rank, alpha or modules are searched. Then it is the mean of the products B A, of the largest
    rank and with the modules of all. Modules that are no set with a name have none.

    Args:
        cohort: The cohort.
        sources: Slots of the agents.
        target: The slot to write to.
    """
    states = [cohort.agents[slot] for slot in sources]
    names, into = [state.adapter for state in states], cohort.agents[target]
    if not _searched(cohort):
        if cohort.is_local(target):
            mix_slots(cohort.slots, names, into.adapter)
        return
    own = [state.hparams.lora_target_modules for state in states]
    sets = cohort.slots.target_sets
    modules = [sets.modules(name) for name in own if name is not None]
    of_all = len(modules) == len(own)
    union = sets.name_of(frozenset().union(*modules)) if of_all else None
    made = of_mean([state.hparams for state in states])
    into.hparams = made.replace(lora_target_modules=union)
    if cohort.is_local(target):
        mix_products(cohort.slots, names, into.adapter)
        into.optimizer = cohort.fresh_optimizer(into.slot, into.hparams)


def _searched(cohort: Cohort) -> bool:
    return any(name.startswith(LORA) for name in cohort.hp_config.names())

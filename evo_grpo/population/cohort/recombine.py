"""The weights of a child of two agents, and noise on the weights of a copy.

Both follow from the weights of the parents and from the record of a round, so that a resumed run
makes them again from the checkpoints of that round.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

from evo_grpo.model.lora.recombine.apply import recombine_slots
from evo_grpo.model.lora.recombine.registry import OPERATORS
from evo_grpo.model.lora.recombine.svd_noise import SVDNoise
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.cohort.spares import add_spare_like
from evo_grpo.seeding import generator
from evo_grpo.settings import EvolveConfig
from evo_grpo.types import Member, Slot


def may_recombine(cohort: Cohort, first: int, second: int) -> bool:
    """Return whether two agents adapt the same modules.

    On several ranks no agent has loaded an adapter with other modules, so the sets that agents have
    by name tell, also of agents whose weights are elsewhere.
    """
    if cohort.team.size > 1:
        states = [cohort.agents[slot] for slot in (first, second)]
        names = [state.hparams.lora_target_modules for state in states]
        return names[0] == names[1]
    keys = [list(cohort.slots.shapes(cohort.agents[slot].adapter)) for slot in (first, second)]
    return keys[0] == keys[1]


@contextmanager
def passing_slots(cohort: Cohort) -> Generator[None]:
    """Free the numbers of the slots that are added within, all of which are removed within.

    A resumed run does not add those of its earlier rounds, and numbers later slots as this one.
    """
    number = cohort.next_slot
    yield
    cohort.next_slot = number


def add_child(cohort: Cohort, first: Slot, second: Slot, operator: str, born: int) -> Slot:
    """Add a slot that plays no rounds with the child of two agents, beside the first of them.

    All ranks make this call.

    Args:
        cohort: The cohort.
        first: The better parent.
        second: The other parent.
        operator: Name of the operator.
        born: First round of the child.

    Returns:
        The slot.
    """
    child = add_spare_like(cohort, first)
    _recombine(cohort, child, _copy_beside(cohort, second, child), operator, born)
    return child


def second_parents(
    cohort: Cohort, slots: Sequence[Slot], members: Sequence[Member]
) -> dict[Slot, Slot]:
    """Return a copy of the second parent of each child that is born, by the slot of the child.

    Args:
        cohort: The cohort, with the members that played the round.
        slots: Their slots.
        members: The members of the next round.
    """
    played = {cohort.agents[slot].member.id: slot for slot in slots}
    return {
        member.agent: _copy_beside(cohort, played[member.second_parent], member.agent)
        for member in members
        if member.second_parent is not None and member.id not in played
    }


def change_weights(
    cohort: Cohort,
    slots: Sequence[Slot],
    members: Sequence[Member],
    others: Mapping[Slot, Slot],
    evolve: EvolveConfig,
) -> None:
    """Recombine the children that are born, and add noise to copies that have a seed for it.

    Args:
        cohort: The cohort, in which each child and each copy has the weights of its parent.
        slots: Slots of the agents that played the round.
        members: The members of the next round.
        others: The copies of `second_parents`, which are removed.
        evolve: The settings.
    """
    played = {cohort.agents[slot].member.id for slot in slots}
    for member in members:
        slot, seed = member.agent, member.mutation.noise
        if slot in others:
            _recombine(cohort, slot, others[slot], evolve.recombine, member.born)
        elif seed is not None and member.id not in played and cohort.is_local(slot):
            name = cohort.agents[slot].adapter
            noise = SVDNoise(evolve.svd_noise)
            recombine_slots(cohort.slots, [name], name, noise, generator(seed, "svd_noise"))


def _copy_beside(cohort: Cohort, slot: Slot, other: Slot) -> Slot:
    """Add a copy of an agent's weights on the rank of another agent; return its slot."""
    state = cohort.agents[slot]
    spare = cohort.add_spare(state.member, state.hparams, cohort.agents[other].rank).slot
    cohort.copy(slot, spare, inherit_optimizer=False)
    return spare


def _recombine(cohort: Cohort, child: Slot, other: Slot, operator: str, born: int) -> None:
    """Recombine the weights in the slot of a child with those of a copy, which is removed.

    The child keeps the moments that it has from its better parent, unless the other one has another
    rank or alpha: then it has new parameters.
    """
    state, slots = cohort.agents[child], cohort.slots
    if cohort.is_local(child):
        names = [state.adapter, cohort.agents[other].adapter]
        before = slots.parameters(state.adapter)
        rng = generator(cohort.seed, "recombine", born)
        recombine_slots(slots, names, state.adapter, OPERATORS[operator], rng)
        after = slots.parameters(state.adapter)
        if any(one is not new for one, new in zip(before, after, strict=True)):
            state.optimizer = cohort.fresh_optimizer(child, state.hparams)
    cohort.remove(other)

"""The mean of the adapters of two agents."""

from __future__ import annotations

from collections.abc import Sequence

from evo_grpo.model.lora.load import mix_slots
from evo_grpo.model.lora.recombine.apply import recombine_slots
from evo_grpo.model.lora.recombine.average import average
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.cohort.recombine import may_recombine
from evo_grpo.schema.hparams import LORA, of_mean
from evo_grpo.seeding import generator


def may_mix(cohort: Cohort, first: int, second: int) -> bool:
    """Return whether the mean of two agents can be taken.

    It can if their adapters have equal shapes, or what differs is searched: the rank, or the
    modules. On several ranks no agent has loaded an adapter with other modules.
    """
    if f"{LORA}target_modules" in cohort.hp_config.names():
        return True
    if cohort.team.size > 1 or _searched(cohort):
        return may_recombine(cohort, first, second)
    shapes = [cohort.slots.shapes(cohort.agents[slot].adapter) for slot in (first, second)]
    return shapes[0] == shapes[1]


def mix_agents(
    cohort: Cohort, sources: Sequence[int], target: int, *, recombined: bool = False
) -> None:
    """Write the mean of the adapters of agents of this rank to another slot.

    It is the mean of A and of B, unless related agents may differ in the basis of the two. Then it
    is the mean of the products B A, of the largest rank and with the modules of all: where the
    rank, alpha or modules are searched, and where agents may descend from a child of two. Modules
    that are no set with a name have none.

    Args:
        cohort: The cohort.
        sources: Slots of the agents.
        target: The slot to write to.
        recombined: Whether some agent of the run was a child of two.
    """
    states = [cohort.agents[slot] for slot in sources]
    names, into = [state.adapter for state in states], cohort.agents[target]
    if _searched(cohort):
        own = [state.hparams.lora_target_modules for state in states]
        sets = cohort.slots.target_sets
        modules = [sets.modules(name) for name in own if name is not None]
        of_all = len(modules) == len(own)
        union = sets.name_of(frozenset().union(*modules)) if of_all else None
        made = of_mean([state.hparams for state in states])
        into.hparams = made.replace(lora_target_modules=union)
    if not cohort.is_local(target):
        return
    if recombined or _searched(cohort):
        nothing_drawn = generator(0)
        recombine_slots(cohort.slots, names, into.adapter, average, nothing_drawn)
        into.optimizer = cohort.fresh_optimizer(into.slot, into.hparams)
    else:
        mix_slots(cohort.slots, names, into.adapter)


def _searched(cohort: Cohort) -> bool:
    return any(name.startswith(LORA) for name in cohort.hp_config.names())

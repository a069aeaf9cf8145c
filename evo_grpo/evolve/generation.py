"""Plan + mutations -> the next generation: who lives where, with which hyperparameters. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from evo_grpo.errors import ShapeError
from evo_grpo.types import Member, Mutation

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from evo_grpo.evolve.mutate import Mutations
    from evo_grpo.evolve.select import Offspring
    from evo_grpo.schema.hparams import Hparams
    from evo_grpo.schema.search_space import HyperparameterConfig


@dataclass(frozen=True)
class Generation:
    """The population of the next round, by slot.

    Attributes:
        members: Who lives in each slot.
        hparams: What they train with.
        parents: The slot that each slot is copied from; its own number means nothing is copied.
        next_id: The first member id that is still free.
    """

    members: tuple[Member, ...]
    hparams: tuple[Hparams, ...]
    parents: tuple[int, ...]
    next_id: int


def next_generation(
    plan: Sequence[Offspring],
    members: Sequence[Member],
    hparams: Sequence[Hparams],
    mutations: Mutations,
    hp_config: HyperparameterConfig,
    rng: np.random.Generator,
    *,
    round: int,
    next_id: int,
) -> Generation:
    """Carry a plan out on the values of a population; the adapters follow `parents`.

    A slot that is copied or mutated begins a new life: a new id, whose parent is the member it came
    from. A survivor that does not mutate stays the member it is.

    Args:
        plan: One `Offspring` per slot, in slot order.
        members: The members of this round, by slot.
        hparams: What they trained with, by slot.
        mutations: What may happen to each of them; the elite is spared unless `mutate_elite`.
        hp_config: Which hyperparameters may move within which bounds.
        rng: The stream that the mutations are drawn from.
        round: The round that has just been evaluated (0-based).
        next_id: A member id that no member of the run has had.

    Raises:
        ShapeError: When the plan does not fill every slot once, or copies from a slot that it
            overwrites.
    """
    _check(plan, members, hparams)
    new_members: list[Member] = []
    new_hparams: list[Hparams] = []
    for offspring in plan:
        values, changes = hparams[offspring.parent], {}
        if mutations.mutate_elite or not offspring.elite:
            values, changes = mutations.mutate(values, hp_config, rng)
        parent = members[offspring.parent]
        if changes or offspring.parent != offspring.agent:
            mutation = Mutation("mutate" if changes else "clone", changes)
            new_members.append(Member(next_id, offspring.agent, parent.id, round + 1, mutation))
            next_id += 1
        else:
            new_members.append(parent)
        new_hparams.append(values)
    return Generation(
        members=tuple(new_members),
        hparams=tuple(new_hparams),
        parents=tuple(offspring.parent for offspring in plan),
        next_id=next_id,
    )


def _check(
    plan: Sequence[Offspring], members: Sequence[Member], hparams: Sequence[Hparams]
) -> None:
    slots = [offspring.agent for offspring in plan]
    size = len(members)
    if slots != list(range(size)) or len(hparams) != size:
        raise ShapeError(
            f"next_generation: expected one offspring and one Hparams for each of {size} slots, "
            f"in order, got offspring for slots {slots} and {len(hparams)} Hparams"
        )
    for offspring in plan:
        parent = offspring.parent
        if not 0 <= parent < size or plan[parent].parent != parent:
            raise ShapeError(
                f"next_generation: slot {offspring.agent} copies slot {parent}, expected one that "
                f"survives in place among 0..{size - 1}: its agent would be lost before the copy"
            )

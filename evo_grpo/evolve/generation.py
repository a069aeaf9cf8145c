"""Plan + exploration -> the next generation: who goes on, with which hyperparameters. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from evo_grpo.errors import ShapeError
from evo_grpo.evolve.explore.protocol import Candidate
from evo_grpo.schema.validation import is_whole, shown
from evo_grpo.types import Member, Mutation, Slot

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from evo_grpo.evolve.explore.protocol import Explorer, Trial
    from evo_grpo.evolve.select.protocol import Offspring
    from evo_grpo.schema.hparams import Hparams
    from evo_grpo.schema.search_space import HyperparameterConfig


@dataclass(frozen=True)
class Generation:
    """The agents of the next round, in the order of their positions.

    An agent of this round that is not among them leaves.

    Attributes:
        members: Who they are.
        hparams: What they train with.
        parents: The slot that each one's weights come from: its own for a survivor.
        next_id: The first member id that is still free.
    """

    members: tuple[Member, ...]
    hparams: tuple[Hparams, ...]
    parents: tuple[Slot, ...]
    next_id: int

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots that go on."""
        return tuple(member.agent for member in self.members)


def next_generation(  # noqa: PLR0913 -- what is known after a round, each by its name
    plan: Sequence[Offspring],
    members: Sequence[Member],
    hparams: Sequence[Hparams],
    explorer: Explorer,
    hp_config: HyperparameterConfig,
    rng: np.random.Generator,
    *,
    round: int,
    next_id: int,
    trials: Sequence[Trial] = (),
) -> Generation:
    """Carry a plan out on the values of a population; the adapters follow `Generation.parents`.

    An agent that is a copy, or whose hyperparameters changed, begins a new life: a new member id,
    whose parent is the member it comes from. A survivor without changes stays the member it is.
    Members and hyperparameters are by position; the plan has passed `check_plan`; for the others
    see `decide`.
    """
    new_members: list[Member] = []
    new_hparams: list[Hparams] = []
    for offspring in plan:
        parent, agent = members[offspring.parent], members[offspring.position].agent
        copied = offspring.parent != offspring.position
        candidate = Candidate(hparams[offspring.parent], copied, offspring.elite, trials)
        values, changes = explorer.explore(candidate, hp_config, rng)
        if changes or copied:
            mutation = Mutation("mutate" if changes else "clone", changes)
            new_members.append(Member(next_id, agent, parent.id, round + 1, mutation))
            next_id += 1
        else:
            new_members.append(parent)
        new_hparams.append(values)
    return Generation(
        members=tuple(new_members),
        hparams=tuple(new_hparams),
        parents=tuple(members[offspring.parent].agent for offspring in plan),
        next_id=next_id,
    )


def check_plan(name: str, plan: Sequence[Offspring], size: int, places: int) -> None:
    """Refuse a plan of `name` that cannot be carried out on `size` agents in so many places.

    Raises:
        ShapeError: It names a position that does not exist, fills none, one twice or more than
            there are places, or copies an agent that it overwrites or that leaves.
    """
    numbers = [number for one in plan for number in (one.position, one.parent)]
    if not all(is_whole(number) and 0 <= number < size for number in numbers):
        raise ShapeError(
            f"{name}: expected positions and parents among 0..{size - 1}, the places of "
            f"`histories`, got {shown(numbers)}"
        )
    filled = [one.position for one in plan]
    if not filled or len(filled) > places or any(a >= b for a, b in pairwise(filled)):
        raise ShapeError(
            f"{name}: expected 1 to {places} offspring, one per place, each at another "
            f"position, by rising position, got positions {shown(filled)}"
        )
    survivors = {one.position for one in plan if one.parent == one.position}
    for one in plan:
        if one.parent not in survivors:
            raise ShapeError(
                f"{name}: position {one.position} copies position {one.parent}, expected one "
                f"that survives in place, with itself as parent: {shown(sorted(survivors))}; an "
                "agent that is overwritten or leaves is lost before it can be copied"
            )

"""Plan + exploration -> the next generation: who goes on, with which hyperparameters. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from evo_grpo.errors import ShapeError
from evo_grpo.evolve.explore.protocol import Candidate
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

    Args:
        plan: The agents of the next round, by rising position.
        members: The members of this round, by position.
        hparams: What they trained with, by position.
        explorer: Varies the hyperparameters of each agent.
        hp_config: Which hyperparameters may change within which bounds.
        rng: The stream that the exploration draws from.
        round: The round that has just been evaluated (0-based).
        next_id: A member id that no member of the run has had.
        trials: All agents of all finished rounds so far, which the exploration may learn from.

    Raises:
        ShapeError: The plan fills no position or one twice, or copies an agent that it overwrites
            or that leaves.
    """
    if len(hparams) != len(members):
        raise ShapeError(
            f"next_generation: expected the Hparams of each of {len(members)} agents, got "
            f"{len(hparams)}"
        )
    check_plan(plan, len(members))
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


def check_plan(plan: Sequence[Offspring], size: int) -> None:
    """Refuse a plan that cannot be carried out on `size` agents.

    Raises:
        ShapeError: It fills no position or one twice, or copies an agent that it overwrites or that
            leaves.
    """
    filled = [offspring.position for offspring in plan]
    rising = all(one < other for one, other in pairwise(filled))
    if not filled or not rising or filled[0] < 0 or filled[-1] >= size:
        raise ShapeError(
            f"plan: expected at least one offspring, by rising position among 0..{size - 1}, got "
            f"positions {filled}; a selection returns one Offspring per agent that goes on"
        )
    survivors = {o.position for o in plan if o.parent == o.position}
    for offspring in plan:
        if offspring.parent not in survivors:
            raise ShapeError(
                f"plan: position {offspring.position} copies position {offspring.parent}, expected "
                f"one of an agent that survives in place, {sorted(survivors)}: the other agents "
                "are lost before the copy"
            )

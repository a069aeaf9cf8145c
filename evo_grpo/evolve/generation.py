"""Computes the members and hyperparameters of the next round from a plan and an explorer.

What a user-defined strategy returns is checked here before it takes effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from evo_grpo.errors import ShapeError
from evo_grpo.evolve.explore.step import value_of
from evo_grpo.evolve.protocols import Candidate, Changes, Explorer, Offspring, Trial
from evo_grpo.evolve.ranges import latin_hypercube
from evo_grpo.schema.hparams import CLIP_ENDS, Hparams, in_order
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.schema.validation import is_whole, shown
from evo_grpo.types import Member, Mutation, Slot

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Generation:
    """The agents of the next round, in order of position; all other agents of this round leave.

    `parents` has the slot from which each agent's weights are copied; for an agent that keeps its
    weights, this is the agent's slot. `next_id` is the first unused member id.
    """

    members: tuple[Member, ...]
    hparams: tuple[Hparams, ...]
    parents: tuple[Slot, ...]
    next_id: int

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots of the agents."""
        return tuple(member.agent for member in self.members)


def next_generation(  # noqa: PLR0913 -- the values of a population, one argument each
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
    """Return the agents of the next round, as a plan and an explorer give them; copy no adapter.

    A copy, or an agent whose hyperparameters changed, becomes a new member; a survivor without
    changes keeps its member. The plan has passed `check_plan`; `members` and `hparams` are by
    position.
    """
    new_members: list[Member] = []
    new_hparams: list[Hparams] = []
    shares = _shares_of_twins(plan, hparams, len(hp_config.names()) + 1, rng)
    for place, offspring in enumerate(plan):
        parent, agent = members[offspring.parent], members[offspring.position].agent
        copied = offspring.parent != offspring.position
        source = hparams[offspring.parent]
        candidate = Candidate(
            source, copied, offspring.elite, trials, round + 1, place in shares,
            shares.get(place, ()),
        )  # fmt: skip
        values = explorer.explore(candidate, hp_config, rng)
        changes = _checked_changes(f"{type(explorer).__name__}.explore", source, values, hp_config)
        if not changes:
            values = source  # the same in other words, such as the limit that None stands for
        if copied or changes:
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


def _shares_of_twins(
    plan: Sequence[Offspring], hparams: Sequence[Hparams], names: int, rng: np.random.Generator
) -> dict[int, tuple[float, ...]]:
    """Return the `names` numbers `Candidate.shares` of each twin, by its index in the plan.

    Among agents with equal hyperparameters, the best agent, else the first survivor, keeps its
    values; the others are twins. Shares are drawn from a stream that `rng` spawns.
    """
    places_of: dict[Hparams, list[int]] = {}
    for place, offspring in enumerate(plan):
        places_of.setdefault(hparams[offspring.parent], []).append(place)
    (stream,) = rng.spawn(1)
    shares: dict[int, tuple[float, ...]] = {}
    for places in places_of.values():
        keeper = min(
            places, key=lambda p: (plan[p].parent != plan[p].position, not plan[p].elite, p)
        )
        twins = [place for place in places if place != keeper]
        if twins:
            rows = latin_hypercube(len(twins), names, stream).tolist()
            shares |= {place: tuple(row) for place, row in zip(twins, rows, strict=True)}
    return shares


def _checked_changes(
    name: str, old: Hparams, values: object, hp_config: HyperparameterConfig
) -> Changes:
    """Return the changes from `old` to the `values` that method `name` returned.

    Raises:
        ShapeError: `values` are no Hparams, one is none of its choices, or one is unset, or set,
            that all agents have from the run's settings.
    """
    if not isinstance(values, Hparams):
        raise ShapeError(
            f"{name}: expected an evo_grpo.Hparams, got {shown(values)}; return the Hparams alone, "
            "such as candidate.hparams.replace(lr=1e-4)"
        )
    had, has = ({n for n, v in one.named().items() if v is not None} for one in (old, values))
    searched = hp_config.names()
    if wrong := in_order(had - has | has - had - set(searched)):
        raise ShapeError(
            f"{name}: expected values of the hyperparameters that the agent has, or that are "
            f"searched, got others in {', '.join(wrong)}; change no value to None, and give what "
            "may change a range in evolve.hyperparameters"
        )
    changes = changes_between(old, values, hp_config)
    for changed, (_, value) in changes.items():
        parameter = hp_config[changed] if changed in searched else None
        if parameter is not None and parameter.choices is not None and not parameter.allows(value):
            raise ShapeError(f"{name}: {changed}: expected {parameter.expected()}, got {value!r}")
    return changes


def changes_between(old: Hparams, new: Hparams, hp_config: HyperparameterConfig) -> Changes:
    """Return the hyperparameters that differ between `old` and `new`, as name -> (old, new).

    The two ends of a clip range are separate entries if a clip_coef is a pair or if the ends
    mutate. A searched hyperparameter that is None in `old` has the value of `value_of`; others that
    are None in `old` or `new` are left out.
    """
    searched = hp_config.names()
    pairs = any(isinstance(hparams.clip_coef, tuple) for hparams in (old, new))
    ends = pairs or not set(CLIP_ENDS).isdisjoint(searched)
    changes: Changes = {}
    for name in in_order((*old.named(), *new.named(), *CLIP_ENDS)):
        if name == "clip_coef" if ends else name in CLIP_ENDS:
            continue
        before, after = old.get(name), new.get(name)
        if before is None and name in searched:
            before = value_of(old, name, hp_config[name])
        if before is not None and after is not None and before != after:
            changes[name] = (before, after)
    return changes


def check_plan(name: str, plan: object, size: int, places: int) -> list[Offspring]:
    """Return what method `name` planned for `size` agents and at most `places`, as a list.

    Raises:
        ShapeError: It is no plan, or does not suit the agents or the places.
    """
    entries = list(cast("Iterable[object]", plan)) if isinstance(plan, Iterable) else [plan]
    offspring = [entry for entry in entries if isinstance(entry, Offspring)]
    if not isinstance(plan, Iterable) or len(offspring) < len(entries):
        raise ShapeError(
            f"{name}: expected a sequence of evo_grpo.Offspring, got {shown(plan)}; return one for "
            "each agent that goes on"
        )
    if wrong := _wrong_in(offspring, size, places):
        raise ShapeError(f"{name}: {wrong}")
    return offspring


def _wrong_in(plan: Sequence[Offspring], size: int, places: int) -> str:
    numbers = [number for offspring in plan for number in (offspring.position, offspring.parent)]
    if not all(is_whole(number) and 0 <= number < size for number in numbers):
        return (
            f"expected positions and parents in 0..{size - 1}, the indices of `histories`, got "
            f"{shown(numbers)}"
        )
    positions = [offspring.position for offspring in plan]
    if not positions or len(positions) > places or any(a >= b for a, b in pairwise(positions)):
        return (
            f"expected 1 to {places} offspring at different positions in ascending order, got "
            f"positions {shown(positions)}"
        )
    survivors = {offspring.position for offspring in plan if offspring.parent == offspring.position}
    for position, parent in ((offspring.position, offspring.parent) for offspring in plan):
        if parent not in survivors:
            return (
                f"position {position} copies position {parent}, expected a parent that survives, "
                f"which is its own parent: {shown(sorted(survivors))}; an agent that leaves or is "
                "overwritten cannot be copied"
            )
    return ""

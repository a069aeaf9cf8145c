"""Fitness -> plan: who survives and who is whose parent. Pure values, no torch, no bookkeeping.

A plan names for every slot the slot whose agent fills it. Parents always survive in their own
slots, so a plan can be carried out in any order without a temporary copy, and no parent is
overwritten before its child read it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final

from evo_grpo.errors import ConfigError, RunFailedError, ShapeError
from evo_grpo.seeding import generator

if TYPE_CHECKING:
    import numpy as np

    from evo_grpo.types import Score


@dataclass(frozen=True)
class Offspring:
    """What fills one slot in the next round.

    Attributes:
        agent: The slot that is filled (0-based).
        parent: The slot whose agent fills it; equal to `agent` where that agent survives in place.
        elite: True for the best agent, which keeps its slot and is not mutated unless asked for.
    """

    agent: int
    parent: int
    elite: bool = False


class Selector(Protocol):
    """Turns the fitness of a population into a plan."""

    def plan(
        self, histories: Sequence[Sequence[Score]], rng: np.random.Generator
    ) -> tuple[Offspring, ...]:
        """Return one `Offspring` per slot, in slot order.

        Args:
            histories: The scores of each slot's current member, latest last; empty for a failed
                agent.
            rng: The stream that the draws come from.

        Raises:
            RunFailedError: When every agent has failed.
        """
        ...


class EvolvablePopulation(Protocol):
    """What `select` calls on a population; `Population` has it."""

    def __getitem__(self, slot: int, /) -> object:
        """Return the agent in a slot."""
        ...

    def histories(self) -> Sequence[Sequence[Score]]:
        """Return the scores of each slot's current member, latest last; empty when failed."""
        ...

    def apply(self, plan: Sequence[Offspring], /) -> object:
        """Copy parents over the slots that the plan gives to somebody else's offspring."""
        ...


PopulationT = TypeVar("PopulationT", bound=EvolvablePopulation)


@final
class TournamentSelection:
    """The best agent stays; every other place goes to the winner of a tournament.

    A tournament compares `tournament_size` different agents that have not failed, drawn anew for
    each place. The first place that an agent wins is its own slot; each further one is the lowest
    slot of an agent that won nothing. Equal fitness: the lower slot wins.

    Args:
        tournament_size: Agents per tournament, 1 to population_size; 1 draws parents at random.
        elitism: Whether the best agent keeps its slot whatever the draws say.
        population_size: Agents in the population, at least 2.
        eval_loop: How many of a member's own latest scores are averaged, at least 1.
        rand_seed: Seed of the draws of `select`; None is 0, so that runs repeat. `plan` takes its
            stream instead.

    Raises:
        ConfigError: For a value out of range.
    """

    def __init__(
        self,
        tournament_size: int,
        elitism: bool,
        population_size: int,
        eval_loop: int = 1,
        rand_seed: int | None = None,
    ) -> None:
        for name, value, least in (
            ("population_size", population_size, 2),
            ("tournament_size", tournament_size, 1),
            ("eval_loop", eval_loop, 1),
        ):
            if value < least:
                raise ConfigError(
                    f"TournamentSelection: {name} must be >= {least}, got {value!r}"
                    + ("; one agent alone has nobody to compete with" if least == 2 else "")
                )
        if tournament_size > population_size:
            raise ConfigError(
                "TournamentSelection: tournament_size must not exceed "
                f"population_size={population_size}, "
                f"got {tournament_size}: an agent meets another one only once in a tournament"
            )
        self.tournament_size = tournament_size
        self.elitism = elitism
        self.population_size = population_size
        self.eval_loop = eval_loop
        self.rand_seed = rand_seed
        self._calls = 0

    def plan(
        self, histories: Sequence[Sequence[Score]], rng: np.random.Generator
    ) -> tuple[Offspring, ...]:
        """Return one `Offspring` per slot, in slot order.

        Args:
            histories: The scores of each slot's current member, latest last; empty for a failed
                agent.
            rng: The stream that the tournaments are drawn from.

        Raises:
            ShapeError: When there is not one history per agent.
            RunFailedError: When every agent has failed.
        """
        if len(histories) != self.population_size:
            raise ShapeError(
                "TournamentSelection: expected one history for each of "
                f"population_size={self.population_size} "
                f"agents, got {len(histories)}; make the selection with "
                f"population_size={len(histories)}"
            )
        ranking = rank(histories, self.eval_loop)
        place = {slot: position for position, slot in enumerate(ranking)}
        elite = ranking[0] if self.elitism else None
        size = min(self.tournament_size, len(ranking))
        survivors = set[int]() if elite is None else {elite}
        further: list[int] = []  # winners of places beyond their own slot, in the order drawn
        for _ in range(self.population_size - len(survivors)):
            drawn = rng.choice(len(ranking), size=size, replace=False)
            winner = min((ranking[int(i)] for i in drawn), key=place.__getitem__)
            if winner in survivors:
                further.append(winner)
            survivors.add(winner)
        losers = [slot for slot in range(self.population_size) if slot not in survivors]
        parents = dict(zip(losers, further, strict=True))
        return tuple(
            Offspring(slot, parents.get(slot, slot), slot == elite)
            for slot in range(self.population_size)
        )

    def select(self, population: PopulationT) -> tuple[Any, PopulationT]:
        """Plan, carry the plan out, and return the elite agent and the population.

        Args:
            population: Anything with the methods of `EvolvablePopulation`; changed in place.

        Returns:
            The best surviving agent (the elite, when elitism is on), and the same population.
        """
        rng = generator(self.rand_seed or 0, "select", self._calls)
        self._calls += 1
        return _carry_out(self, population, rng, self.eval_loop)


@final
class NoSelection:
    """Everyone stays: independent agents, the baseline that a selection has to beat."""

    def plan(
        self, histories: Sequence[Sequence[Score]], rng: np.random.Generator
    ) -> tuple[Offspring, ...]:
        """Return a plan that copies nothing; `rng` is not used.

        Raises:
            RunFailedError: When every agent has failed.
        """
        rank(histories)
        return tuple(Offspring(slot, slot) for slot in range(len(histories)))

    def select(self, population: PopulationT) -> tuple[Any, PopulationT]:
        """Return the best agent and the population, unchanged."""
        return _carry_out(self, population, generator(0, "select"), 1)


def rank(histories: Sequence[Sequence[Score]], window: int = 1) -> list[int]:
    """Order the slots of the agents that have not failed, best first.

    Args:
        histories: The scores of each slot's current member, latest last; empty for a failed agent.
        window: How many latest scores are averaged (fewer where a member has fewer).

    Returns:
        Slots by falling mean, the lower slot first among equals. A mean that is not finite counts
        as failed.

    Raises:
        RunFailedError: When every agent has failed.
    """
    means: dict[int, float] = {}
    for slot, history in enumerate(histories):
        latest = [score.mean for score in history[-window:]]
        if latest and all(math.isfinite(mean) for mean in latest):
            means[slot] = math.fsum(latest) / len(latest)
    if not means:
        raise RunFailedError(
            "selection: expected at least one agent with a finite fitness, got none of "
            f"{len(histories)}; look at the reasons in rounds.jsonl (often lr or beta is too high) "
            "and start again with a smaller range"
        )
    return sorted(means, key=lambda slot: (-means[slot], slot))


def _carry_out(
    selector: Selector, population: PopulationT, rng: np.random.Generator, window: int
) -> tuple[Any, PopulationT]:
    histories = population.histories()
    plan = selector.plan(histories, rng)
    population.apply(plan)
    # Without elitism the best agent may have been overwritten: then the best of those that stayed.
    best = next(slot for slot in rank(histories, window) if plan[slot].parent == slot)
    return population[best], population

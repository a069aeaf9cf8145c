"""Settings of the rounds of a run, with the strategies that they name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from evo_grpo.errors import ConfigError
from evo_grpo.evolve.explore.protocol import Explorer
from evo_grpo.evolve.select.protocol import Selector
from evo_grpo.evolve.sizes import places_by_round, prompts_of_agents
from evo_grpo.settings import EvolveConfig, PopulationConfig, RecordConfig


@dataclass(frozen=True)
class RoundSettings:
    """How the rounds of a run are played.

    Attributes:
        population: How many agents play how many rounds of how many steps.
        evolve: What happens between them, and how fitness is measured; the two strategies below
            act in place of its `selection` and `exploration`.
        record: What is kept of them.
        selector: Plans which agents survive, and which are copied.
        explorer: Varies the hyperparameters of the agents of the next round.
        prompts_per_step: P, the same prompts or episode seeds for every agent.
        rows_per_step: Completions that all agents together sample in a step: each agent takes as
            many prompts as make up its equal share, so that the others take over the share of
            agents that leave. None gives every agent `prompts_per_step` prompts, whatever its group
            size.

    Raises:
        ConfigError: A sequence of places grows, or leaves no place.
    """

    population: PopulationConfig
    evolve: EvolveConfig
    record: RecordConfig
    selector: Selector
    explorer: Explorer
    prompts_per_step: int
    rows_per_step: int | None

    def __post_init__(self) -> None:
        places = self.places
        grows = any(later > earlier for earlier, later in pairwise(places))
        if grows or min(places) < 1:
            raise ConfigError(
                "places: expected at least one number >= 1, none above the one before it, got "
                f"{list(places)}; an agent that has left does not come back"
            )

    @property
    def places(self) -> tuple[int, ...]:
        """Agents that each round has room for; the last number repeats."""
        selects = self.evolve.selection.kind != "none"
        return places_by_round(self.population.size, self.population.sizes, selects=selects)

    def room(self, round: int, agents: int) -> int:
        """Return how many of `agents` agents a round has places for.

        Where a round has fewer places than agents, agents leave.
        """
        places = self.places
        return min(places[min(round, len(places) - 1)], agents)

    def prompts_of(self, group_sizes: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return for each step of a round P_i of each agent, given its group size."""
        steps = self.population.steps_per_round
        if self.rows_per_step is None:
            return [[self.prompts_per_step] * len(group_sizes)] * steps
        return prompts_of_agents(self.rows_per_step, steps, group_sizes)

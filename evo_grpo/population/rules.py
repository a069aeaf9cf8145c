"""Defines the settings of the rounds of a run, with the strategies that they name."""

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
    """The settings of the rounds of a run.

    Attributes:
        population: Number of agents, rounds and steps.
        evolve: Settings of evolution and fitness; `selector` and `explorer` below replace its
            `selection` and `exploration`.
        record: Which files are recorded.
        selector: Plans which agents survive and which are copied.
        explorer: Varies the hyperparameters of the agents of the next round.
        prompts_per_step: P, the number of prompts or episode seeds, the same for every agent.
        rows_per_step: Completions that all agents together sample in a step. Each agent takes as
            many prompts as fill its equal share; when agents leave, the others share their
            completions. None gives every agent `prompts_per_step` prompts, whatever its group size.

    Raises:
        ConfigError: The numbers of places increase, or one of them is below 1.
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
        """Number of agents that each round has room for; the last number repeats."""
        selects = self.evolve.selection.kind != "none"
        return places_by_round(self.population.size, self.population.sizes, selects=selects)

    def room(self, round: int, agents: int) -> int:
        """Return how many of `agents` agents a round has places for.

        If a round has fewer places than agents, agents leave.
        """
        places = self.places
        return min(places[min(round, len(places) - 1)], agents)

    def prompts_of(self, group_sizes: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return the number of prompts P_i of each agent in each step of a round."""
        steps = self.population.steps_per_round
        if self.rows_per_step is None:
            return [[self.prompts_per_step] * len(group_sizes)] * steps
        return prompts_of_agents(self.rows_per_step, steps, group_sizes)

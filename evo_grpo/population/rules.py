"""Defines the settings of the rounds of a run, with the strategies that they name."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from evo_grpo.errors import ConfigError
from evo_grpo.evolve.protocols import Explorer, Selector
from evo_grpo.evolve.sizes import decides_after, prompts_of_agents
from evo_grpo.settings import EvolveConfig, PopulationConfig, RecordConfig


@dataclass(frozen=True)
class RoundSettings:
    """The settings of the rounds of a run.

    `selector` and `explorer` are used, not the `selection` and `exploration` of `evolve`. With
    `rows_per_step`, the completions of a step are divided equally among the agents, so an agent's
    share grows when others leave; with None, every agent gets `prompts_per_step` prompts or seeds.
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
        """Maximum number of agents in each round; the last number repeats."""
        return self.population.places(selects=self.evolve.selects)

    def decides(self, round: int) -> bool:
        """Return whether agents are selected after a round (0-based)."""
        always = self.evolve.decides_always
        return always or decides_after(round + 1, self.population.decided)

    def validation_prompts(self, round: int) -> int:
        """Return on how many validation prompts a round (0-based) evaluates agents; 0 for none."""
        fitness = self.evolve.fitness
        ends = round + 1 >= self.population.rounds
        return fitness.prompts if ends or self.decides(round) else fitness.in_between

    def room(self, round: int, agents: int) -> int:
        """Return how many of `agents` agents can play a round (0-based); the others leave."""
        places = self.places
        return min(places[min(round, len(places) - 1)], agents)

    def rows_of_agent(self, agents: int) -> float:
        """Return an agent's completions per step or, without `rows_per_step`, prompts per step."""
        if self.rows_per_step is None:
            return float(self.prompts_per_step)
        return self.rows_per_step / agents

    def minibatches(self, agents: int) -> int:
        """Return the number of optimizer steps in a step with `agents` agents.

        When agents leave, each remaining agent learns from f times as many rows. The number of
        optimizer steps, and the rows of each, then both grow by the square root of f. With f times
        the rows in one optimizer step, the lr, chosen for few rows, would no longer be suitable,
        and more rows would only reduce gradient noise.
        """
        if self.rows_per_step is None:
            return 1
        return math.ceil(math.sqrt(self.population.size / agents) - 1e-9)

    def prompts_of(self, group_sizes: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return, for each step of a round, the number of prompts P_i of each agent i."""
        steps = self.population.steps_per_round
        if self.rows_per_step is None:
            return [[self.prompts_per_step] * len(group_sizes)] * steps
        return prompts_of_agents(self.rows_per_step, steps, group_sizes)

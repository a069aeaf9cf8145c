"""TournamentSelection and Mutations with AgileRL's arguments and methods."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, final

import numpy as np

from evo_grpo.api.population import Population
from evo_grpo.errors import ConfigError
from evo_grpo.evolve.explore.mutate import Mutations as Strategy
from evo_grpo.evolve.generation import changes_between
from evo_grpo.evolve.protocols import Candidate, Offspring, rank
from evo_grpo.evolve.select.tournament import TournamentSelection as Tournament
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig, warn_if_nothing_mutates
from evo_grpo.schema.validation import whole
from evo_grpo.seeding import generator
from evo_grpo.types import Score


@final
@dataclass(eq=False)
class TournamentSelection:
    """Keeps the best agent if `elitism` is set, and fills all other places by tournaments.

    Args:
        tournament_size: Agents per tournament, at most all; 1 draws parents at random.
        elitism: Whether the best agent always keeps its place.
        population_size: Not used; the population determines the number of agents.
        eval_loop: Number of latest scores of a member to average; at most 100 are kept.
        rand_seed: Seed of the draws of `select`; None is 0. `plan` gets a generator instead.
    """

    tournament_size: int
    elitism: bool
    population_size: int
    eval_loop: int = 1
    rand_seed: int | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        for name in ("tournament_size", "population_size", "eval_loop"):
            whole(1).check(name, getattr(self, name))
        self.strategy = Tournament(size=self.tournament_size, elitism=self.elitism)
        self._calls = 0

    def plan(
        self, histories: Sequence[Sequence[Score]], places: int, rng: np.random.Generator
    ) -> tuple[Offspring, ...]:
        """Plan the next round from each member's latest `eval_loop` scores; see `Selector`."""
        return self.strategy.plan(self._window(histories), places, rng)

    def select(self, population: Population[Any]) -> tuple[Any, Population[Any]]:
        """Select agents of a population in place.

        Returns:
            The best surviving agent (the elite, when elitism is on), and the same population.
        """
        rng = generator(self.rand_seed or 0, "select", self._calls)
        self._calls += 1
        histories = self._window(population.histories())
        plan = self.plan(histories, len(histories), rng)
        # A population clears the histories of the agents that it overwrites.
        ranking = rank(histories)
        population.apply(plan)
        # Without elitism the best agent may have been overwritten.
        return population[next(p for p in ranking if plan[p].parent == p)], population

    def _window(self, histories: Sequence[Sequence[Score]]) -> list[Sequence[Score]]:
        return [history[-self.eval_loop :] for history in histories]


@final
@dataclass(eq=False)
class Mutations:
    """Changes one hyperparameter of an agent, or none.

    Args:
        no_mutation: Weight of no change, >= 0.
        rl_hp: Weight of a change of one hyperparameter, >= 0. Only the ratio of the weights counts.
        mutate_elite: Whether the best agent may mutate too.
        rand_seed: Seed of the draws of `mutation`; None is 0. `explore` gets a generator instead.
        architecture: Must be 0, like the next three arguments: layers, weights and activations
            cannot mutate, because all agents share one pretrained model.
        new_layer_prob: See `architecture`.
        parameters: See `architecture`.
        activation: See `architecture`.
    """

    no_mutation: float = 0.2
    rl_hp: float = 0.8
    mutate_elite: bool = False
    rand_seed: int | None = None
    _: KW_ONLY
    architecture: float = 0
    new_layer_prob: float = 0
    parameters: float = 0
    activation: float = 0

    def __post_init__(self) -> None:
        """Check the arguments."""
        for name in ("architecture", "new_layer_prob", "parameters", "activation"):
            if (value := getattr(self, name)) != 0:
                raise ConfigError(
                    f"Mutations: {name} must be 0, got {value!r}: all agents share one pretrained "
                    "model, so only hyperparameters mutate; raise rl_hp instead"
                )
        strategy = Strategy(
            no_mutation=self.no_mutation,
            rl_hp=self.rl_hp,
            mutate_elite=self.mutate_elite,
            step="factors",
        )
        # AgileRL has one weight for all hyperparameters: 0 means that none mutates.
        self.strategy = strategy if self.rl_hp else strategy.replace(choice=0.0)
        self._calls = 0

    def explore(
        self, candidate: Candidate, hp_config: HyperparameterConfig, rng: np.random.Generator
    ) -> Hparams:
        """Change one hyperparameter of a candidate, or none; see `Explorer`."""
        return self.strategy.explore(candidate, hp_config, rng)

    def mutation(self, population: Population[Any]) -> Population[Any]:
        """Mutate agents in place, the elite only with `mutate_elite`; return the population."""
        space = population.hp_config
        warn_if_nothing_mutates(self.rl_hp, space)
        call, self._calls = self._calls, self._calls + 1
        for position in range(len(population)):
            rng = generator(self.rand_seed or 0, "mutate", call, position)
            hparams = population[position].hparams
            candidate = Candidate(hparams, elite=position == population.elite)
            new = self.explore(candidate, space, rng)
            if changes := changes_between(hparams, new, space):
                population.set_hparams(position, new, changes)
        return population

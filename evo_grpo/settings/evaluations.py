"""Counts the evaluations of a run from its settings, and the validation prompts for them."""

from __future__ import annotations

from typing import NamedTuple

from evo_grpo.evolve.sizes import decides_after
from evo_grpo.settings.evolve import EvolveConfig, FitnessConfig
from evo_grpo.settings.population import PopulationConfig

LEAST_PROMPTS = 8
"""Validation prompts that `fitness.share` leaves; fewer hardly tell agents apart."""


class Evaluations(NamedTuple):
    """The most evaluations of a run.

    Attributes:
        places: Agents of each round.
        decisions: Finished rounds after which all agents answer all validation prompts: rounds with
            a decision, and the last round.
        whole: Evaluations on all validation prompts after each round, including racing and the
            archive.
        between: Agents that answer `fitness.between` prompts after each round.
        finalists: Candidates of the final comparison: best of the last round, archive, mean.
    """

    places: tuple[int, ...]
    decisions: tuple[int, ...]
    whole: tuple[int, ...]
    between: tuple[int, ...]
    finalists: int


def count_evaluations(population: PopulationConfig, evolve: EvolveConfig) -> Evaluations:
    """Return the most evaluations of a run."""
    by_round = population.places(selects=evolve.selects)
    places = tuple(by_round[min(n, len(by_round) - 1)] for n in range(population.rounds))
    always = evolve.decides_always
    decided = population.decided
    decisions = tuple(
        finished
        for finished in range(1, population.rounds + 1)
        if always or finished == population.rounds or decides_after(finished, decided)
    )
    whole = [0] * len(places)
    for finished in decisions:
        agents = places[finished - 1]
        looks = int(evolve.fitness.second_looks * agents)
        # The archive is filled at the first decision, and compared with the best agent afterwards.
        archive = 2 * int(evolve.keeps_archive and finished != decisions[0])
        # Racing compares at least two agents.
        whole[finished - 1] = agents + (looks if looks > 1 else 0) + archive
    return Evaluations(
        places,
        decisions,
        tuple(whole),
        tuple(0 if n in decisions else agents for n, agents in enumerate(places, start=1)),
        _finalists(population, evolve, places),
    )


def affordable(population: PopulationConfig, evolve: EvolveConfig, rows: float) -> FitnessConfig:
    """Return the fitness settings with as many prompts as `rows` evaluated completions allow."""
    fitness, counts = evolve.fitness, count_evaluations(population, evolve)
    samples = fitness.per_prompt(fitness.samples)
    rows_per_prompt = sum(counts.whole) * samples + counts.finalists * fitness.per_prompt(
        fitness.final_samples
    )
    prompts = int((rows - sum(counts.between) * fitness.in_between * samples) / rows_per_prompt)
    if prompts < fitness.in_between:  # then rounds without decisions take as few
        prompts = int(rows / (rows_per_prompt + sum(counts.between) * samples))
    return fitness.replace(prompts=min(fitness.prompts, max(LEAST_PROMPTS, prompts)))


def _finalists(population: PopulationConfig, evolve: EvolveConfig, places: tuple[int, ...]) -> int:
    fitness = evolve.fitness
    if population.rounds == 1 or fitness.final_samples == 0 or fitness.objectives:
        return 0
    finalists = 1 + int(evolve.keeps_archive) + int(places[-1] > 1)
    return finalists if finalists > 1 else 0

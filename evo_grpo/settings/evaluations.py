"""Fills in settings that depend on the length of a run: decisions, agents and evaluations."""

from typing import NamedTuple

from evo_grpo.evolve.sizes import decides_after
from evo_grpo.schema.hparams import REWARD_WEIGHT
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.settings.algorithm import DEFAULT_PROMPTS, AlgorithmConfig
from evo_grpo.settings.evolve import EvolveConfig, FitnessConfig
from evo_grpo.settings.population import PopulationConfig

LEAST_PROMPTS = 8
"""Least number of validation prompts with `fitness.share`; fewer hardly tell agents apart."""
_SAMPLED_BY = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Hyperparameters that act on sampling in training, and on no evaluation."""


class Evaluations(NamedTuple):
    """Upper bounds on the evaluations that a run makes.

    Attributes:
        places: Number of agents in each round.
        decisions: Numbers of finished rounds after which all agents answer all validation prompts:
            rounds with a decision, and the last round.
        whole: Number of evaluations on all validation prompts after each round, including racing
            and the archive.
        between: Number of agents that answer `fitness.between` prompts after each round.
        finalists: Number of candidates in the final comparison: the best of the last round, the
            archive, and a mean.
    """

    places: tuple[int, ...]
    decisions: tuple[int, ...]
    whole: tuple[int, ...]
    between: tuple[int, ...]
    finalists: int


def count_evaluations(population: PopulationConfig, evolve: EvolveConfig) -> Evaluations:
    """Return upper bounds on the evaluations that a run makes."""
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


def _affordable(population: PopulationConfig, evolve: EvolveConfig, rows: float) -> FitnessConfig:
    """Return the fitness settings with as many prompts as `rows` evaluated completions pay for."""
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


def settled(
    population: PopulationConfig,
    evolve: EvolveConfig,
    algorithm: AlgorithmConfig,
    space: HyperparameterConfig,
    tokens: int | None = None,
) -> tuple[PopulationConfig, EvolveConfig]:
    """Return settings with the decisions, the agents of each round and the evaluations filled in.

    If `population.stop.tokens` may end a run early, decisions and prompts are computed for the
    rounds that are certain to be played. `tokens` is the most tokens that a round trains on; None
    if they are not known.
    """
    rounds, limit = population.rounds, population.stop.tokens
    if limit is not None and tokens:
        population = population.replace(rounds=max(1, min(rounds, int(limit / tokens))))
    sure_rounds = population.rounds
    selects = evolve.selects
    places = list(population.places(selects=selects))
    sizes = "constant" if len(set(places)) == 1 else places
    decided = population.decided
    population = population.replace(rounds=rounds, decisions=decided, sizes=sizes)
    fitness = evolve.fitness
    if fitness.between is None:
        stop = population.stop
        stops_by_fitness = stop.fitness is not None or stop.rewards or stop.patience is not None
        alike = _trains_as_fitness(population, evolve, algorithm, space)
        between = fitness.prompts if stops_by_fitness else 0 if alike else fitness.in_between
        evolve = evolve.replace(fitness=fitness.replace(between=between))
    if evolve.fitness.share is not None:
        rows = population.size * (algorithm.prompts_per_step or DEFAULT_PROMPTS)
        rows *= algorithm.group_size * population.steps_per_round * sure_rounds
        shortened = population.replace(rounds=sure_rounds)
        evolve = evolve.replace(fitness=_affordable(shortened, evolve, evolve.fitness.share * rows))
    return population, evolve


def _trains_as_fitness(
    population: PopulationConfig,
    evolve: EvolveConfig,
    algorithm: AlgorithmConfig,
    space: HyperparameterConfig,
) -> bool:
    """Return whether a completion in training is sampled and scored as one in an evaluation."""
    fitness, defaults = evolve.fitness, AlgorithmConfig()
    sampling = {"prompt", "max_output_tokens", *_SAMPLED_BY}
    names = set(space.names())
    if isinstance(population.init, list):
        names |= {name for values in population.init for name in values}
    differs = bool(names & sampling) or any(name.startswith(REWARD_WEIGHT) for name in names)
    as_sampled = all(
        getattr(algorithm, name) == getattr(defaults, name) for name in _SAMPLED_BY[1:]
    )
    return (
        not differs
        and as_sampled
        and algorithm.temperature == fitness.temperature
        and fitness.reward is None
        and not fitness.objectives
    )

"""Checks across groups of settings: contradictions, and doubtful combinations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any

from evo_grpo.evolve.explore.schedule import ScheduleExploration
from evo_grpo.evolve.kinds import OWN
from evo_grpo.evolve.select.pareto import ParetoSelection
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.evolve.sizes import planned_rows, wrong_sizes
from evo_grpo.evolve.start import start_problems, with_first_choices
from evo_grpo.schema.hparams import REWARD_WEIGHT, WARMUP
from evo_grpo.schema.outside import outside
from evo_grpo.schema.problems import MOST_PROBLEMS, Path, Problem
from evo_grpo.schema.search_space import CLIPS, HyperparameterConfig, RLParameter
from evo_grpo.settings.adapters import adapter_problems, begins_outside
from evo_grpo.settings.algorithm import DEFAULT_PROMPTS, AlgorithmConfig
from evo_grpo.settings.engine import EngineConfig
from evo_grpo.settings.engine_checks import engine_problems
from evo_grpo.settings.env import EnvConfig
from evo_grpo.settings.evolve import (
    FITNESS,
    TOKENS,
    EvolveConfig,
    FitnessConfig,
    ObjectiveConfig,
    search_space,
)
from evo_grpo.settings.given import OBJECT
from evo_grpo.settings.loss import level_problems
from evo_grpo.settings.model import ModelConfig
from evo_grpo.settings.population import PopulationConfig
from evo_grpo.settings.prompting import prompt_problems


class DoubtfulSetting(UserWarning):
    """A setting is valid, but probably not what was meant, alone or beside others."""


MOST_AGENTS = 10_000
MOST_ROUNDS = 100_000
MOST_STEPS = 1_000_000
"""Limits far beyond use: a plan lists agents and rounds, and a typo must not exhaust memory."""
ROWS_TOLERANCE = 0.02
"""Largest relative difference between the rows of a round and its plan."""


def run_problems(
    model: ModelConfig,
    env: EnvConfig,
    population: PopulationConfig,
    algorithm: AlgorithmConfig,
    evolve: EvolveConfig,
    engine: EngineConfig,
) -> Iterator[Problem]:
    """Yield contradictions among the settings of a run, with their YAML paths."""
    yield from _env(env)
    yield from _counts(population)
    yield from _selection(population, evolve)
    for text in wrong_sizes(population.size, population.sizes, archive=evolve.keeps_archive):
        yield Problem(("population", "sizes"), text)
    space = search_space(evolve.hyperparameters, algorithm.hparams())
    first = algorithm.first_hparams(space, model.lora.rank_alpha)
    yield from _below(fitness_problems(space, evolve.fitness), "evolve", "fitness")
    if isinstance(evolve.exploration, ScheduleExploration):
        found = evolve.exploration.problems(with_first_choices(first, space), space)
        yield from _below(islice(found, MOST_PROBLEMS + 1), "evolve", "exploration")
    yield from _below(objective_problems(evolve), "evolve")
    if not env.kind.startswith(OBJECT):  # an object may have prompts that no file can name
        prompts = prompt_problems(space, list(env.prompts or ()))
        yield from _below(prompts, "evolve", "hyperparameters")
    if model.adapter is None or not model.lora.is_default:  # else it brings its own rank
        above = ("evolve", "hyperparameters")
        for name, text in begins_outside(space, model.lora.rank_alpha, above):
            yield Problem(("model", "lora", name), text)
    starts = start_problems(first, space, population.size, population.init)
    yield from _below(islice(starts, MOST_PROBLEMS + 1), "population", "init")


def fitness_problems(space: HyperparameterConfig, fitness: FitnessConfig) -> Iterator[Problem]:
    """Yield a problem if agents would be compared by the rewards whose weights they search."""
    weights = [name for name in space.names() if name.startswith(REWARD_WEIGHT)]
    if weights and fitness.counted is None:
        text = (
            f"missing; {weights[0]} is searched, and an agent with a larger weight would have a "
            "larger fitness for the same completions: name the reward function that measures "
            'success, for instance "exact", or a mapping of names to weights'
        )
        yield Problem(("reward",), text)


def objective_problems(evolve: EvolveConfig, *, own: bool = False) -> Iterator[Problem]:
    """Yield contradictions between the objectives and the other settings of evolution.

    `own` says that an object replaces `evolve.selection`.
    """
    fitness, kind = evolve.fitness, OWN if own else evolve.selection.kind
    given, path = fitness.objectives, ("fitness", "objectives")
    if not given:
        if kind == "pareto":
            text = (
                "missing; selection pareto needs two or more, for instance [exact, {name: tokens, "
                "direction: minimize}]"
            )
            yield Problem(path, text)
        return
    yield from _below(_objectives(given), *path)
    if kind != "pareto" and ":" not in kind:
        text = (
            f"expected pareto, or your own class as module:Class, with objectives, got {kind}, "
            "which orders agents by one goal; set evolve.selection: pareto"
        )
        yield Problem(("selection",), text)
    if fitness.reward is not None and given[0].name != FITNESS:
        text = (
            f"expected null with objectives of which the first is not {FITNESS!r}, since the first "
            "is the fitness; remove it"
        )
        yield Problem(("fitness", "reward"), text)
    if fitness.racing:
        text = (
            f"expected 0 with objectives, got {fitness.racing:g}: no evaluation separates agents "
            "of a front; remove it, and raise evolve.fitness.samples"
        )
        yield Problem(("fitness", "racing"), text)
    if fitness.window > 1:
        text = (
            f"expected 1 with objectives, whose tests compare the latest evaluation, got "
            f"{fitness.window}; remove it"
        )
        yield Problem(("fitness", "window"), text)
    if evolve.exploration.kind == "optuna":
        text = "expected an exploration for several goals, got optuna; use mutate or resample"
        yield Problem(("exploration",), text)


def _objectives(given: Sequence[ObjectiveConfig]) -> Iterator[Problem]:
    """Yield what is wrong with a list of objectives that is not empty."""
    first, names = given[0], [one.name for one in given]
    if len(given) == 1:
        text = (
            f"expected two or more, got {first.name!r} alone; add one, or give one goal as "
            "evolve.fitness.reward"
        )
        yield Problem((), text)
    for number, one in enumerate(given):
        if one.name in names[:number]:
            text = f"expected each objective once, got {one.name!r} again; remove one of them"
            yield Problem((number, "name"), text)
        if one.name == TOKENS and one.direction is None:
            text = "missing; say of tokens whether more or fewer are better: maximize or minimize"
            yield Problem((number, "direction"), text)
        if one.name == FITNESS and number:
            text = "expected fitness as the first objective, which is the fitness of the run"
            yield Problem((number, "name"), text)
    if first.name == TOKENS or first.minimize:
        text = (
            "expected a reward that is maximized as the first objective, which is the fitness of "
            f"the run, got {first.name!r}{', minimized' if first.minimize else ''}; put it after "
            "one"
        )
        yield Problem((0,), text)


def _below(found: Iterable[Problem], *path: str) -> Iterator[Problem]:
    for problem in found:
        yield problem._replace(path=(*path, *problem.path))


def agent_problems(
    algorithm: AlgorithmConfig,
    engine: EngineConfig,
    ranges: Mapping[str, RLParameter] | None,
    model: ModelConfig | None,
    *,
    own_lora: bool = True,
    above: Path = ("hyperparameters",),
) -> Iterator[Problem]:
    """Yield contradictions among the settings of agents.

    Args:
        algorithm: The group `algorithm`.
        engine: The group `engine`.
        ranges: Ranges of hyperparameters.
        model: The group `model`; None if the base was given as a module.
        own_lora: Whether Python may supply another adapter than `model.lora`.
        above: The path of `ranges`.
    """
    yield from _below(engine_problems(engine), "engine")
    space = HyperparameterConfig(**(ranges or {}))
    yield from _lengths(algorithm, space, above)
    yield from _levels(algorithm, ranges or {}, above)
    yield from _outside(algorithm, ranges or {}, above)
    yield from _schedule(algorithm, space, above)
    yield from adapter_problems(model, space, above)
    lora = None if own_lora or model is None else model.lora.largest(space)
    for name, own in engine.engines.items():
        yield from _below(own.problems(engine.device, lora), "engine", name)


def doubtful_settings(
    population: PopulationConfig,
    algorithm: AlgorithmConfig,
    evolve: EvolveConfig,
    engine: EngineConfig,
) -> Iterator[str]:
    """Yield a sentence for each valid but doubtful combination of settings.

    Settings without any effect are found by `evo_grpo.settings.without_effect`.
    """
    hp_config = search_space(evolve.hyperparameters, algorithm.hparams())
    prompts = algorithm.prompts_per_step or DEFAULT_PROMPTS
    named = isinstance(population.init, str)
    if population.size > 1 and not hp_config and named:
        yield (
            "evolve.hyperparameters is empty: all agents train with the same values and nothing "
            "mutates; leave it out, or give ranges, for instance lr: {min: 1e-4, max: 1e-2}"
        )
    yield from _uneven_rows(population, algorithm, hp_config, prompts)
    if population.size > 1 and population.rounds == 1 and evolve.selection.kind != "none":
        yield (
            "population.rounds is 1: selection and mutation happen between rounds, so there will "
            "be none"
        )
    if why := divides_quantized(engine):
        yield why
    if engine.zero is not None:
        others = "sharded" if engine.zero == 3 else "replicated"
        yield (
            f"engine.zero {engine.zero}: agents take turns, so a step of {population.size} agents "
            f"takes {population.size} steps of one agent; zero: null with base: {others} trains "
            "them all at once"
        )
    if engine.base == "sharded" and engine.shards == 1:
        yield (
            "engine.base sharded saves nothing with engine.shards 1: one process has the whole "
            "base; set engine.shards to the number of processes"
        )


def _uneven_rows(
    population: PopulationConfig,
    algorithm: AlgorithmConfig,
    hp_config: HyperparameterConfig,
    prompts: int,
) -> Iterator[str]:
    """Yield a sentence if whole groups cannot make up the rows of a round."""
    if "group_size" not in hp_config.names():
        return
    largest, steps = int(hp_config["group_size"].max), population.steps_per_round
    rows = population.size * prompts * algorithm.group_size
    sizes = [largest] * population.size
    planned = planned_rows(rows, steps, sizes)
    if abs(planned - rows * steps) > ROWS_TOLERANCE * rows * steps:
        yield (
            f"hyperparameters.group_size goes up to {largest}: agents with such groups would "
            f"sample {planned} completions in a round instead of {rows * steps}; raise "
            "algorithm.prompts_per_step or population.steps_per_round, or lower its max to "
            f"{prompts * algorithm.group_size}"
        )


def divides_quantized(engine: EngineConfig) -> str:
    """Return why a quantised base cannot be divided among processes; empty if it is not divided."""
    if engine.quantization is None or not (engine.base == "sharded" or engine.zero == 3):
        return ""
    how = "base: sharded" if engine.base == "sharded" else "zero: 3"
    return (
        f"engine.quantization: expected null on more than one process with engine.{how}, which "
        f"divides only floating-point weights, got {engine.quantization}; leave it out, or "
        "leave the base whole on each process"
    )


def _env(env: EnvConfig) -> Iterator[Problem]:
    if env.kind == "dataset" and env.train is None:
        text = "missing; env.kind dataset needs a CSV, JSON, JSONL or Parquet file to learn from"
        yield Problem(("env", "train"), text)
    if env.kind == "dataset" and env.reward is None:
        text = 'missing; env.kind dataset needs a reward function, for instance "my_rewards:exact"'
        yield Problem(("env", "reward"), text)
    if env.prompt is not None and env.conversation is not None:
        text = "expected prompt or conversation, got both; remove one"
        yield Problem(("env", "conversation"), text)
    if isinstance(env.reward_weights, list):
        wanted = len(env.rewards)
        got = len(env.reward_weights)
        if wanted != got:
            text = f"expected one weight per function of env.reward ({wanted}), got {got}"
            yield Problem(("env", "reward_weights"), text)


def _counts(population: PopulationConfig) -> Iterator[Problem]:
    most = {"size": MOST_AGENTS, "rounds": MOST_ROUNDS, "steps_per_round": MOST_STEPS}
    for name, limit in most.items():
        if (got := getattr(population, name)) > limit:
            yield Problem(("population", name), f"expected at most {limit:,}, got {got:,}")


def _selection(population: PopulationConfig, evolve: EvolveConfig) -> Iterator[Problem]:
    selection = evolve.selection
    if not isinstance(selection, TournamentSelection | ParetoSelection):
        return
    if population.size == 1:
        front = isinstance(selection, ParetoSelection)
        several = front and evolve.fitness.objectives
        also = " and remove evolve.fitness.objectives" if several else ""
        text = (
            f"expected at least 2 agents for {'a front' if front else 'a tournament'}, got 1; "
            f"raise it, or set evolve.selection.kind: none{also}"
        )
        yield Problem(("population", "size"), text)
    # The default is right for fewer agents too: a tournament is then one of all of them.
    elif selection.size > population.size and selection.size != type(selection)().size:
        text = f"expected at most population.size ({population.size}), got {selection.size}"
        yield Problem(("evolve", "selection", "size"), text)


def _lengths(
    algorithm: AlgorithmConfig, space: HyperparameterConfig, above: Path
) -> Iterator[Problem]:
    """Yield lengths of completions that contradict each other, for the limits of all agents."""
    least, longest = algorithm.shortest_output(space), algorithm.longest_output(space)
    searched = "max_output_tokens" in space.names()
    where = "the least max_output_tokens" if searched else "max_output_tokens"
    for name in ("min_output_tokens", "overlong_buffer"):
        value = getattr(algorithm, name)
        if least is not None and value is not None and value > least:
            text = f"expected at most {where} ({least}), got {value}; lower it"
            yield Problem(("algorithm", name), text)
    context = algorithm.max_model_len
    if longest is not None and context is not None and longest >= context:
        text = (
            f"expected less than max_model_len ({context}), so that a prompt fits too, got "
            f"{longest}; raise max_model_len"
        )
        path = (*above, "max_output_tokens") if searched else ("algorithm", "max_output_tokens")
        yield Problem(path, text)


def _schedule(
    algorithm: AlgorithmConfig, space: HyperparameterConfig, above: Path
) -> Iterator[Problem]:
    """Yield a problem if the warm-up of a schedule is searched and there is no schedule."""
    if WARMUP in space.names() and algorithm.lr_schedule is None:
        where = ".".join(map(str, (*above, WARMUP)))
        text = (
            f"missing; {where} is searched, a share of the steps of a schedule: give their number, "
            "such as {steps: 100}, the steps of an agent in the whole run"
        )
        yield Problem(("algorithm", "lr_schedule"), text)


def _levels(
    algorithm: AlgorithmConfig, ranges: Mapping[str, RLParameter], above: Path
) -> Iterator[Problem]:
    """Yield the first contradiction between a loss and a ratio level that an agent may have."""

    def choices(name: str, own: Any) -> tuple[Any, ...]:  # noqa: ANN401 -- of either setting
        return (ranges[name].choices or ()) if name in ranges else (own,)

    losses = choices("loss_type", algorithm.loss_type or algorithm.kind)
    levels = choices("importance_sampling_level", algorithm.importance_sampling_level)
    for loss_type, level in product(losses, levels):
        if found := list(level_problems(loss_type, level)):
            name = str(found[0].path[0])
            under = above if name in ranges else ("algorithm",)
            yield from (problem._replace(path=(*under, *problem.path)) for problem in found)
            return


def _outside(
    algorithm: AlgorithmConfig, ranges: Mapping[str, RLParameter], above: Path
) -> Iterator[Problem]:
    """Yield initial hyperparameters outside of their range, or among no choices."""
    space = HyperparameterConfig(**ranges)
    for found in outside(algorithm.first_hparams(space), space):
        where = ".".join(map(str, (*above, found.name)))
        text = f"expected {found.parameter.expected(where)}, got {found.shown}; {found.remedy}"
        yield Problem(("algorithm", "clip_coef" if found.name in CLIPS else found.name), text)

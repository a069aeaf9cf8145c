"""Checks across groups of settings: contradictions, and doubtful combinations."""

from collections.abc import Iterator, Mapping
from itertools import islice, product
from typing import Any

from evo_grpo.evolve import kinds, sizes, start
from evo_grpo.schema.group import contradictions
from evo_grpo.schema.hparams import REWARD_WEIGHT
from evo_grpo.schema.problems import MOST_PROBLEMS, Path, Problem, below, dotted
from evo_grpo.schema.search_space import CLIPS, HyperparameterConfig, RLParameter, outside
from evo_grpo.settings.algorithm import AlgorithmConfig, level_problems
from evo_grpo.settings.engine import ENGINES, EngineConfig
from evo_grpo.settings.env import EnvConfig, prompt_problems
from evo_grpo.settings.evolve import (
    FITNESS,
    TOKENS,
    EvolveConfig,
    FitnessConfig,
    search_space,
)
from evo_grpo.settings.model import ModelConfig, adapter_problems, begins_outside
from evo_grpo.settings.objects import OBJECT
from evo_grpo.settings.population import PopulationConfig
from evo_grpo.settings.rewards import JudgeReward


class DoubtfulSetting(UserWarning):
    """A warning of a setting, or combination of settings, that is valid but probably not meant."""


MOST_AGENTS = 10_000
MOST_ROUNDS = 100_000
MOST_STEPS = 1_000_000
"""Limits far beyond use: a plan lists agents and rounds, and a typo must not exhaust memory."""
LEAST_PARTS = 3
"""Least number of parts of a population at which `offload_adapters` keeps any in host memory."""


def run_problems(
    model: ModelConfig,
    env: EnvConfig,
    population: PopulationConfig,
    algorithm: AlgorithmConfig,
    evolve: EvolveConfig,
) -> Iterator[Problem]:
    """Yield contradictions among the settings of a run, with their YAML paths."""
    yield from below(_env(env), "env")
    yield from below(_counts(population, evolve), "population")
    judges = [reward for reward in env.rewards if isinstance(reward, JudgeReward)]
    unpriced = not any(judge.input_price or judge.output_price for judge in judges)
    cost_unknown = population.stop.judge_cost is not None and unpriced and not env.objects()
    priced = "a judge with a price (input_price, output_price) in env.reward"
    row = ("stop.judge_cost", cost_unknown, priced, "add the prices, or remove the rule")
    yield from below(contradictions(population, row), "population")
    space = search_space(evolve.hyperparameters, algorithm.hparams())
    hparams = algorithm.first_hparams(space, model.lora.rank_alpha)
    yield from below(fitness_problems(space, evolve.fitness), "evolve", "fitness")
    if (check := getattr(evolve.exploration, "problems", None)) is not None:
        problems = check(start.with_first_choices(hparams, space), space)
        yield from below(islice(problems, MOST_PROBLEMS + 1), "evolve", "exploration")
    yield from below(objective_problems(evolve), "evolve")
    if not env.kind.startswith(OBJECT):  # the prompts of an object may have names of its own
        prompts = prompt_problems(space, list(env.prompts or ()))
        yield from below(prompts, "evolve", "hyperparameters")
    if (
        model.adapter is None or not model.lora.is_default
    ):  # else the adapter's folder gives the rank
        above = ("evolve", "hyperparameters")
        for name, text in begins_outside(space, model.lora.rank_alpha, above):
            yield Problem(("model", "lora", name), text)
    starts = start.start_problems(hparams, space, population.size, population.init)
    yield from below(islice(starts, MOST_PROBLEMS + 1), "population", "init")
    entrants, agents = getattr(evolve.selection, "size", None), population.size
    if entrants is not None:
        # With the default size and fewer agents, a tournament is one of all agents.
        large = (
            1 < agents < entrants
            and entrants != type(evolve.selection).model_fields["size"].default
        )
        row = ("selection.size", large, f"at most population.size ({agents})", "lower it")
        yield from below(contradictions(evolve, row), "evolve")


def fitness_problems(space: HyperparameterConfig, fitness: FitnessConfig) -> Iterator[Problem]:
    """Yield a problem if fitness depends on reward weights that are searched."""
    for searched in [name for name in space.names() if name.startswith(REWARD_WEIGHT)][:1]:
        expected = f"a measure that does not depend on {searched}, which is searched"
        remedy = 'name the reward function that measures success, for instance "exact"'
        yield from contradictions(fitness, ("reward", fitness.counted is None, expected, remedy))


def objective_problems(evolve: EvolveConfig, *, own: bool = False) -> Iterator[Problem]:
    """Yield contradictions between the objectives and the other settings of evolution.

    `own` says that an object from Python replaces `evolve.selection`.
    """
    fitness, selection = evolve.fitness, evolve.selection
    for_goals = not own and getattr(selection, "several_goals", False)
    if not fitness.objectives:
        several = f"two or more with selection {selection.kind}"
        example = "for instance [exact, {name: tokens, direction: minimize}]"
        yield from contradictions(evolve, ("fitness.objectives", for_goals, several, example))
        return
    yield from below(_objectives(fitness), "fitness")
    reward = fitness.reward is not None and fitness.objectives[0].name != FITNESS
    for_one = not (own or for_goals or isinstance(selection, kinds.UserStrategy))
    explores_one = getattr(evolve.exploration, "one_goal", False)
    yield from contradictions(
        evolve,
        ("selection.kind", for_one, "pareto or module:Class with objectives", "take pareto"),
        ("fitness.reward", reward, "null unless 'fitness' is the first objective", "remove it"),
        ("fitness.racing", fitness.racing, "0 with objectives", "raise fitness.samples instead"),
        ("fitness.window", fitness.window > 1, "1 with objectives", "remove it"),
        ("exploration.kind", explores_one, "a kind for several goals", "use mutate or resample"),
    )


def _objectives(fitness: FitnessConfig) -> Iterator[Problem]:
    """Yield the problems of a list of objectives that is not empty."""
    objectives, names = fitness.objectives, [goal.name for goal in fitness.objectives]
    remedy = "add one, or give this one as evolve.fitness.reward"
    yield from contradictions(fitness, ("objectives", len(objectives) == 1, "two or more", remedy))
    expected = "a reward that is maximized as the first objective, the fitness of the run"
    for number, goal in enumerate(objectives):
        unclear = goal.name == TOKENS and goal.direction is None
        problems = contradictions(
            goal,
            ("name", goal.name in names[:number], "each objective once", "remove one of them"),
            ("direction", unclear, "maximize or minimize for tokens", "say which is better"),
            (
                "name",
                goal.name == FITNESS and number,
                "fitness as the first objective",
                "move it",
            ),
            ("name", not number and goal.name == TOKENS, expected, "put it after one"),
            ("direction", not number and goal.minimize, expected, "put it after one"),
        )
        yield from below(problems, "objectives", number)


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
        model: The group `model`; None if the base is a transformers module.
        own_lora: Whether Python may supply another adapter than `model.lora`.
        above: The path of `ranges` in the settings.
    """
    yield from below(_engine(engine), "engine")
    space = HyperparameterConfig(**(ranges or {}))
    yield from _lengths(algorithm, space, above)
    yield from _levels(algorithm, ranges or {}, above)
    yield from _outside(algorithm, ranges or {}, above)
    yield from adapter_problems(model, space, above)
    lora = None if own_lora or model is None else model.lora.largest(space)
    for name, settings in engine.engines.items():
        yield from below(settings.problems(engine.device, lora), "engine", name)


def _engine(engine: EngineConfig) -> Iterator[Problem]:
    """Yield a problem for each setting of the engine that another of these excludes."""
    parts, offload = engine.parts(), engine.offload_adapters
    if engine.zero is None:
        expected = f"false with fewer than {LEAST_PARTS} parts of the population ({parts})"
        remedy = f"set engine.shards to {LEAST_PARTS} or more, or leave it out"
        row = ("offload_adapters", offload and parts < LEAST_PARTS, expected, remedy)
        yield from contradictions(engine, row)
        return
    zero, remedy = f"with zero {engine.zero}", "leave it out, or set zero to null"
    exact = engine.rollout_settings.shares_base
    engines = " or ".join(name for name, kind in ENGINES.items() if kind.shares_base)
    dtypes = f"auto, bfloat16 or float32 {zero}"
    yield from contradictions(
        engine,
        ("dtype", engine.dtype == "float16", dtypes, "use bfloat16, which needs no loss scale"),
        ("base", engine.base == "sharded", f"replicated {zero}", remedy),
        ("shards", (engine.shards or 1) > 1, f"null or 1 {zero}", remedy),
        ("overlap", engine.overlap, f"false {zero}", remedy),
        ("rollout", not exact, f"{engines} {zero}", "set zero to null"),
        ("offload_adapters", offload, f"false {zero}", remedy),
    )


def divides_quantized(engine: EngineConfig) -> str:
    """Return the problem of a base that is both quantised and divided among processes, or ""."""
    if engine.quantization is None or not (engine.base == "sharded" or engine.zero == 3):
        return ""
    how = "base: sharded" if engine.base == "sharded" else "zero: 3"
    return (
        f"engine.quantization: expected null on more than one process with engine.{how}, which "
        f"divides only floating-point weights, got {engine.quantization}; leave it out, or "
        "leave the base whole on each process"
    )


def _env(env: EnvConfig) -> Iterator[Problem]:
    data, count, weights = env.kind == "dataset", len(env.rewards), env.reward_weights
    both = env.prompt is not None and env.conversation is not None
    mismatched = isinstance(weights, list) and len(weights) != count
    rows, reward = "rows for kind dataset", "a reward function for kind dataset"
    styled = env.reward_style is not None and not count and not env.kind.startswith(OBJECT)
    per_function = f"one weight per function of env.reward ({count})"
    return contradictions(
        env,
        ("train", data and env.train is None, rows, "name a CSV, JSON, JSONL or Parquet file"),
        ("reward", data and env.reward is None, reward, 'for instance "my_rewards:exact"'),
        ("conversation", both, "null beside prompt", "remove one of them"),
        ("reward_weights", mismatched, per_function, "or a mapping such as {exact: 1}"),
        ("reward_style", styled, "env.reward beside it", "name the functions, or leave it out"),
    )


def _counts(population: PopulationConfig, evolve: EvolveConfig) -> Iterator[Problem]:
    largest = {"size": MOST_AGENTS, "rounds": MOST_ROUNDS, "steps_per_round": MOST_STEPS}
    limits = [
        (name, getattr(population, name) > limit, f"at most {limit:,}", "lower it")
        for name, limit in largest.items()
    ]
    compares = hasattr(evolve.selection, "size")  # the agents of a tournament
    expected = f"at least 2 agents for selection {evolve.selection.kind}"
    remedy = "raise it, or set evolve.selection.kind: none"
    row = ("size", compares and population.size == 1, expected, remedy)
    yield from contradictions(population, *limits, row)
    for text in sizes.wrong_sizes(population.size, population.sizes, archive=evolve.keeps_archive):
        yield Problem(("sizes",), text)


def _lengths(
    algorithm: AlgorithmConfig, space: HyperparameterConfig, above: Path
) -> Iterator[Problem]:
    """Yield contradictions between the `max_output_tokens` of any agent and other lengths."""
    least, longest = algorithm.shortest_output(space), algorithm.longest_output(space)
    searched, context = "max_output_tokens" in space.names(), algorithm.max_model_len
    expected = f"at most {'the least ' * searched}max_output_tokens ({least})"
    rows = [
        (name, least is not None and (getattr(algorithm, name) or 0) > least, expected, "lower it")
        for name in ("min_output_tokens", "overlong_buffer")
    ]
    yield from below(contradictions(algorithm, *rows), "algorithm")
    if longest is not None and context is not None and longest >= context:
        text = f"expected less than max_model_len ({context}), got {longest}; raise max_model_len"
        yield Problem((*(above if searched else ("algorithm",)), "max_output_tokens"), text)


def _levels(
    algorithm: AlgorithmConfig, ranges: Mapping[str, RLParameter], above: Path
) -> Iterator[Problem]:
    """Yield the first contradiction between a loss and a ratio level that an agent may have."""

    def choices(name: str, own: Any) -> tuple[Any, ...]:  # noqa: ANN401 -- of either setting
        return (ranges[name].choices or ()) if name in ranges else (own,)

    losses = choices("loss_type", algorithm.loss_type or algorithm.kind)
    levels = choices("importance_sampling_level", algorithm.importance_sampling_level)
    for loss_type, level in product(losses, levels):
        if problems := list(level_problems(loss_type, level)):
            name = str(problems[0].path[0])
            under = above if name in ranges else ("algorithm",)
            yield from below(problems, *under)
            return


def _outside(
    algorithm: AlgorithmConfig, ranges: Mapping[str, RLParameter], above: Path
) -> Iterator[Problem]:
    """Yield a problem for each initial hyperparameter outside of its range or choices."""
    space = HyperparameterConfig(**ranges)
    for value in outside(algorithm.first_hparams(space), space):
        name = "clip_coef" if value.name in CLIPS else value.name
        yield Problem(("algorithm", name), value.told(dotted((*above, value.name))))

"""Plans the run of a recipe: the values of the winner's line as initial values and a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from evo_grpo.envs.finding import find_function
from evo_grpo.envs.registry import build_task, is_multi_turn
from evo_grpo.errors import ConfigError, RunDirError
from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.explore.none import NoExploration
from evo_grpo.evolve.explore.schedule import ROUND, ScheduleExploration
from evo_grpo.evolve.select.none import NoSelection
from evo_grpo.evolve.select.pareto import ParetoSelection
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.evolve.sizes import Sizes
from evo_grpo.record.schedule import Schedule
from evo_grpo.schema.hparams import BETAS, CLIP_ENDS, LORA, AgentFields, Hparams, Value
from evo_grpo.schema.outside import values_of
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter
from evo_grpo.settings import (
    EnvConfig,
    EvolveConfig,
    LoraSettings,
    ModelConfig,
    PopulationConfig,
    RunConfig,
    StopConfig,
)
from evo_grpo.settings.algorithm import DEFAULT_PROMPTS, AlgorithmConfig
from evo_grpo.training.sizing.machine import LIMITS

AROUND = 3.0
"""Factor by which a population around the winner searches in either direction."""
_NAMED = ("loss_type", "importance_sampling_level", "adv_norm", "kl_shaping")
DIGITS = 4
"""Significant digits of values that are no values of the run."""


class Size(NamedTuple):
    """The size of the run of a recipe.

    Attributes:
        agents: Number of agents; one follows the schedule, several search around it.
        rounds: Number of rounds.
        steps: GRPO steps per round.
    """

    agents: int
    rounds: int
    steps: int


def recipe_settings(
    config: RunConfig, schedule: Schedule, size: Size, *, model: str | None
) -> RunConfig:
    """Return the settings of a recipe.

    Args:
        config: The settings of the run.
        schedule: The schedule of its winner.
        size: The size of the recipe's run.
        model: Name of another model; None keeps that of the run.

    Raises:
        ConfigError: The settings contradict each other, or the data of the run are missing where
            the names of its reward functions are read from them.
        RunDirError: A value of the schedule is none that a file can hold.
    """
    space = config.search_space()
    line = _stretched(schedule, size.rounds)
    ranges = _ranges(line, space) if size.agents == 1 else _ranges_around(line, space)
    return config.replace(
        name=f"{config.name}-recipe",
        model=_model(config.model, line[0], list(ranges), model),
        env=_env(config, line[0], list(ranges)),
        population=config.population.replace(
            size=size.agents,
            rounds=size.rounds,
            steps_per_round=size.steps,
            init="latin_hypercube",
            sizes=_sizes(config.population, size.agents),
            stop=StopConfig(no_signal=config.population.stop.no_signal),
        ),
        algorithm=_algorithm(config, schedule, line[0], size),
        evolve=_evolve(config.evolve, line, ranges, size.agents),
        engine=config.engine if model is None else config.engine.replace(**dict.fromkeys(LIMITS)),
    )


def _sizes(population: PopulationConfig, agents: int) -> Sizes:
    """Return `population.sizes`; a list of numbers fits only a population of the same size."""
    fits = agents == population.size or (population.sizes == "constant" and agents > 1)
    return population.sizes if fits else None


def _stretched(schedule: Schedule, rounds: int) -> list[Hparams]:
    """Return the hyperparameters of each round: those of the same share of the line."""
    line = schedule.rounds
    return [line[round * len(line) // rounds].hparams for round in range(rounds)]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _values(hparams: Hparams, name: str, space: HyperparameterConfig) -> list[Value]:
    """Return the values of a hyperparameter as its range holds them.

    None counts as the maximum of the range.
    """
    found = values_of(hparams, name)
    if not found and name in space.names() and space[name].choices is None:
        return [space[name].max]
    return found


def _ranges(line: Sequence[Hparams], space: HyperparameterConfig) -> dict[str, RLParameter]:
    """Return the ranges of the hyperparameters that change on a line, from their own values."""
    names = [*space.names(), *_set_by_hand(line, space)]
    found: dict[str, RLParameter] = {}
    for name in names:
        values = [_values(one, name, space) for one in line]
        # A changed rank takes alpha with it, unless alpha is searched.
        follows = name == f"{LORA}alpha" and _differs(line, f"{LORA}r")
        if all(one == values[0] for one in values) and not follows:
            continue
        each = list(dict.fromkeys(value for of_round in values for value in of_round))
        numbers = [one for one in each if not isinstance(one, str | bool)]
        named = name in space.names() and space[name].choices is not None
        if not numbers or named or len(each) == 1:
            found[name] = RLParameter(choices=each)
        else:
            found[name] = RLParameter(min=min(numbers), max=max(numbers))
    return found


def _set_by_hand(line: Sequence[Hparams], space: HyperparameterConfig) -> list[str]:
    """Return the hyperparameters that change on a line without a range in the run."""
    known = {*space.names(), *(CLIP_ENDS if "clip_coef" in space.names() else ())}
    if known & set(CLIP_ENDS):
        known.add("clip_coef")
    first = line[0].named()
    return [name for name in first if name not in known and _differs(line, name)]


def _differs(line: Sequence[Hparams], name: str) -> bool:
    return any(one.named().get(name) != line[0].named().get(name) for one in line)


def _ranges_around(line: Sequence[Hparams], space: HyperparameterConfig) -> dict[str, RLParameter]:
    """Return the run's ranges, narrowed to a factor of `AROUND` around the values of a line.

    Names are narrowed to those of the line. A hyperparameter with a single value left is no longer
    searched.
    """
    found: dict[str, RLParameter] = {}
    for name in space.names():
        own = space[name]
        each = list(dict.fromkeys(v for one in line for v in _values(one, name, space)))
        numbers = [one for one in each if not isinstance(one, str | bool)]
        if not numbers:
            if len(each) > 1:
                found[name] = RLParameter(choices=each)
            continue
        low, high = _around(name, min(numbers), max(numbers))
        if own.choices is not None:
            near = [c for c in own.choices if not isinstance(c, str | bool) and low <= c <= high]
            if len(near) > 1:
                found[name] = RLParameter(choices=near)
            continue
        low, high = max(low, min(own.min, *numbers)), min(high, max(own.max, *numbers))
        if own.dtype == "int":
            low, high = -(-low // 1), high // 1
        if low < high:
            found[name] = own.replace(min=float(low), max=float(high), start=None)
    return found


def _around(name: str, low: float, high: float) -> tuple[float, float]:
    """Return values a factor of `AROUND` below `low` and above `high`.

    Ends of the clip range and decay rates are measured by the distance from 1.
    """
    if name not in (*CLIP_ENDS, *BETAS):
        return _rounded(low / AROUND), _rounded(high * AROUND)
    near, far = sorted((abs(low - 1), abs(high - 1)))
    near, far = _rounded(near / AROUND), _rounded(far * AROUND)
    return (1 + near, 1 + far) if name == "clip_high" else (1 - far, 1 - near)


def _entries(line: Sequence[Hparams], ranges: dict[str, RLParameter]) -> list[dict[str, Any]]:
    """Return the changes on a line as entries of a schedule."""
    space, found = HyperparameterConfig(**ranges), list[dict[str, Any]]()
    for number in range(1, len(line)):
        before, after = line[number - 1], line[number]
        changes = {name: value for name in ranges for name, value in _change(name, before, after)}
        for name, value in changes.items():
            if value is None and name not in space.names():
                raise RunDirError(
                    f"{name}: expected a number in every round of the winner's line, got none in "
                    "some, set by hand without a range; write the settings of this run by hand"
                )
            changes[name] = space[name].max if value is None else value
        if changes:
            found.append({ROUND: number + 1, **changes})
    return found


def _change(name: str, before: Hparams, after: Hparams) -> list[tuple[str, Value | None]]:
    """Return what changes of a hyperparameter between two rounds; a clip pair as its two ends."""
    pair = any(isinstance(one.clip_coef, tuple) for one in (before, after))
    names = CLIP_ENDS if name == "clip_coef" and pair else (name,)
    return [(one, after.get(one)) for one in names if before.get(one) != after.get(one)]


def _algorithm(
    config: RunConfig, schedule: Schedule, first: Hparams, size: Size
) -> AlgorithmConfig:
    """Return the group `algorithm`: the initial values, and the prompts of a step.

    One agent takes as many prompts as the winner in its last round; several together take as many
    as all agents of the run. A schedule of lr ends at the same share of the training.
    """
    own, population = config.algorithm, config.population
    # Only where they are searched has an agent its own; else they are None.
    searched = (*_NAMED, "max_output_tokens")
    values = {name: getattr(first, name) for name in (*AgentFields.model_fields, *searched)}
    given = {name: one for name, one in values.items() if name not in searched or one is not None}
    if size.agents == 1:
        prompts = schedule.prompts_per_step(schedule.rounds[-1])
    else:
        prompts = population.size * (own.prompts_per_step or DEFAULT_PROMPTS) / size.agents
    if own.lr_schedule is not None:
        planned = population.rounds * population.steps_per_round
        steps = round(own.lr_schedule.steps * size.rounds * size.steps / planned)
        schedule_of_lr = own.lr_schedule.replace(steps=max(1, steps))
        if first.warmup_proportion is not None:
            schedule_of_lr = schedule_of_lr.replace(warmup_proportion=first.warmup_proportion)
        given["lr_schedule"] = schedule_of_lr
    return own.replace(**given, prompts_per_step=max(1, round(prompts)))


def _model(
    model: ModelConfig, first: Hparams, searched: Sequence[str], name: str | None
) -> ModelConfig:
    """Return the group `model`: rank and alpha of the first round; trust goes to one model only."""
    lora = _lora(model.lora, first)
    if "lora.target_modules" not in searched:
        lora = _with_layers(lora, first)
    if name is None:
        return model.replace(lora=lora)
    if model.adapter is not None:
        raise ConfigError(
            f"--model: expected a run whose agents start from their base, got model.adapter "
            f"{model.adapter}, which fits only {model.name}; leave --model out, and set model.name "
            "and model.adapter in the recipe"
        )
    return model.replace(name=name, lora=lora, trust_remote_code=False)


def _with_layers(lora: LoraSettings, first: Hparams) -> LoraSettings:
    """Return settings with the set of layers of the first round, which is no longer searched."""
    name, sets = first.lora_target_modules, lora.target_sets
    targets = lora.target_modules if name is None else sets[name]
    return lora.replace(target_modules=targets, target_sets={})


def _lora(lora: LoraSettings, first: Hparams) -> LoraSettings:
    if first.lora_r is None and first.lora_alpha is None:
        return lora
    rank, alpha = first.lora_r or lora.r, first.lora_alpha
    if alpha is None and lora.alpha is not None:
        # As in training, alpha follows the rank unless the scale divides by its square root.
        alpha = lora.alpha if lora.use_rslora else lora.alpha * rank / lora.r
    elif alpha is None and lora.use_rslora:
        alpha = lora.rank_alpha.alpha
    return lora.replace(r=rank, alpha=alpha)


def _env(config: RunConfig, first: Hparams, searched: Sequence[str]) -> EnvConfig:
    """Return the group `env`, with the winner's prompt and its reward weights."""
    env, changes = config.env, dict[str, Any]()
    if first.prompt is not None and env.prompts is not None and "prompt" not in searched:
        changes["prompts"] = {first.prompt: env.prompts[first.prompt]}
    if first.reward_weights:
        changes["reward_weights"] = _weights(config) | first.reward_weights
    return env.replace(**changes) if changes else env


def _weights(config: RunConfig) -> dict[str, float]:
    """Return the weights of `env.reward_weights` by the names of the reward functions."""
    own = config.env.reward_weights
    if not isinstance(own, list):
        return dict(own or {})
    if is_multi_turn(config.env.kind):
        raise RunDirError(
            "env.reward_weights: expected a mapping of names to weights, since the recipe has "
            f"weights by name, got a list, {own}; write the settings of this run by hand"
        )
    task = build_task(config.env, config.seed, find_function)
    return {reward.name: reward.weight for reward in task.rewards}


def _evolve(
    evolve: EvolveConfig, line: Sequence[Hparams], ranges: dict[str, RLParameter], agents: int
) -> EvolveConfig:
    """Return the group `evolve`. One agent has no others to be compared with."""
    if agents == 1:
        entries = _entries(line, ranges)
        return evolve.replace(
            selection=NoSelection(),
            exploration=ScheduleExploration(rounds=entries) if entries else NoExploration(),
            hyperparameters=ranges,
            archive=False,  # going back to it would halve lr, and miss entries of the schedule
            fitness=evolve.fitness.replace(objectives=[], reward=evolve.fitness.counted),
        )
    selection, exploration = evolve.selection, evolve.exploration
    if isinstance(selection, NoSelection) or (
        isinstance(selection, TournamentSelection) and selection.size > agents
    ):
        selection = TournamentSelection()
    if isinstance(selection, ParetoSelection) and selection.size > agents:
        selection = ParetoSelection()
    if isinstance(exploration, ScheduleExploration):
        exploration = Mutations()
    return evolve.replace(selection=selection, exploration=exploration, hyperparameters=ranges)

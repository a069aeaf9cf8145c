"""What no single field can see: settings that contradict each other, and settings without effect."""

from __future__ import annotations

from evo_grpo.config.base import Problem
from evo_grpo.config.evolution import EvolveConfig, HyperparameterRange
from evo_grpo.config.groups import AlgorithmConfig, EnvConfig, PopulationConfig
from evo_grpo.errors import ConfigError
from evo_grpo.hparams import Hparams

CLIPS = ("clip_coef", "clip_low", "clip_high")


def contradictions(
    env: EnvConfig, population: PopulationConfig, algorithm: AlgorithmConfig, evolve: EvolveConfig
) -> list[Problem]:
    """Return every contradiction between groups, with its YAML path."""
    return [
        *_env(env),
        *_selection(population, evolve),
        *_lengths(algorithm),
        *_ranges(algorithm, evolve),
    ]


def dead_settings(
    population: PopulationConfig, algorithm: AlgorithmConfig, evolve: EvolveConfig
) -> list[str]:
    """Return one sentence for each setting that is allowed and cannot have the effect it promises."""
    ranges = evolve.hyperparameters
    found: list[str] = []
    clips = [name for name in CLIPS if name in ranges]
    if clips and _always_on_policy(algorithm, evolve):
        found.append(
            f"evolve.hyperparameters.{clips[0]} cannot act: with algorithm.update_epochs 1 and one batch per step "
            "the ratio is exactly 1; set update_epochs: 2, or a batch_size below the rows of a step"
        )
    found += [
        f"evolve.hyperparameters.{name} never moves: its min and max are both {given.min:g}"
        for name, given in ranges.items()
        if given.min == given.max
    ]
    if population.size > 1 and not ranges:
        found.append(
            "evolve.hyperparameters is empty: all agents train with the same values and nothing mutates; "
            "give ranges, for instance lr: {min: 1e-4, max: 1e-2}"
        )
    if population.size > 1 and population.rounds == 1 and evolve.selection.kind != "none":
        found.append(
            "population.rounds is 1: selection and mutation happen between rounds, so there will be none"
        )
    return found


def _env(env: EnvConfig) -> list[Problem]:
    found: list[Problem] = []
    if env.kind == "dataset" and env.train is None:
        text = "missing; env.kind dataset needs a file of rows to learn from (CSV, JSON, JSONL or Parquet)"
        found.append(Problem(("env", "train"), text))
    if env.kind == "dataset" and env.reward is None:
        text = 'missing; env.kind dataset needs a reward function, for instance "my_rewards:exact"'
        found.append(Problem(("env", "reward"), text))
    if env.prompt is not None and env.conversation is not None:
        text = "expected prompt or conversation, got both; remove one"
        found.append(Problem(("env", "conversation"), text))
    if env.reward_weights is not None:
        functions = [env.reward] if isinstance(env.reward, str) else env.reward or []
        if len(functions) != len(env.reward_weights):
            text = (
                f"expected one weight per function of env.reward ({len(functions)}), "
                f"got {len(env.reward_weights)}"
            )
            found.append(Problem(("env", "reward_weights"), text))
    return found


def _selection(population: PopulationConfig, evolve: EvolveConfig) -> list[Problem]:
    selection = evolve.selection
    if selection.kind != "tournament":
        return []
    if population.size == 1:
        text = (
            "a tournament needs a population of at least 2, got 1; "
            "raise it, or set evolve.selection.kind: none"
        )
        return [Problem(("population", "size"), text)]
    if selection.size > population.size:
        text = f"expected at most population.size ({population.size}), got {selection.size}"
        return [Problem(("evolve", "selection", "size"), text)]
    return []


def _lengths(algorithm: AlgorithmConfig) -> list[Problem]:
    found: list[Problem] = []
    longest, context = algorithm.max_output_tokens, algorithm.max_model_len
    if longest is not None and algorithm.min_output_tokens > longest:
        text = f"expected at most algorithm.max_output_tokens ({longest}), got {algorithm.min_output_tokens}"
        found.append(Problem(("algorithm", "min_output_tokens"), text))
    if longest is not None and context is not None and longest >= context:
        text = (
            f"expected less than algorithm.max_model_len ({context}), so that a prompt fits too, "
            f"got {longest}"
        )
        found.append(Problem(("algorithm", "max_output_tokens"), text))
    return found


def _ranges(algorithm: AlgorithmConfig, evolve: EvolveConfig) -> list[Problem]:
    base = algorithm.hparams()
    found: list[Problem] = []
    for name, given in evolve.hyperparameters.items():
        ends = [problem for end in ("min", "max") if (problem := _end(base, name, given, end))]
        found += ends or _outside(base, name, given)
    low, high = (evolve.hyperparameters.get(name) for name in ("clip_low", "clip_high"))
    if low is not None and high is not None and low.min >= high.max:
        text = f"expected min below clip_high's max, got {low.min:g} >= {high.max:g}"
        found.append(Problem(("evolve", "hyperparameters", "clip_low"), text))
    return found


def _end(base: Hparams, name: str, given: HyperparameterRange, end: str) -> Problem | None:
    """Try an end of a range as a value: an agent may get it, in the middle of a run."""
    value: float = getattr(given, end)
    if name in ("clip_low", "clip_high"):
        return None  # whether a bound is right depends on the other one, which moves too
    try:
        # A range of clip_coef is that of the distance from 1, also where the base has a pair.
        base.with_value(name, int(value) if isinstance(getattr(base, name), int) else value)
    except ConfigError as error:
        # The message begins with the name of the value, which the path already says.
        text = str(error).partition(": ")[2]
        return Problem(("evolve", "hyperparameters", name, end), text)
    return None


def _outside(base: Hparams, name: str, given: HyperparameterRange) -> list[Problem]:
    """Say which of algorithm's values lies outside of its own range."""
    for value in _values(base, name):
        if not given.min - 1e-12 <= value <= given.max + 1e-12:
            setting = "clip_coef" if name in CLIPS else name
            text = (
                f"{value:g} lies outside of evolve.hyperparameters.{name}, expected [{given.min:g}, {given.max:g}]; "
                "move the value or widen the range"
            )
            return [Problem(("algorithm", setting), text)]
    return []


def _values(base: Hparams, name: str) -> list[float]:
    if name == "clip_coef" and isinstance(base.clip_coef, tuple):
        low, high = base.clip_coef
        return [1 - low, high - 1]
    value = base.get(name)
    # batch_size: None takes all rows, which no range contradicts.
    return [] if value is None else [value]  # pyright: ignore[reportUnnecessaryComparison]


def _always_on_policy(algorithm: AlgorithmConfig, evolve: EvolveConfig) -> bool:
    """Whether every optimizer step sees the policy that sampled its rows."""
    ranges = evolve.hyperparameters
    if algorithm.update_epochs > 1 or "update_epochs" in ranges:
        return False
    if "batch_size" in ranges or "group_size" in ranges:
        most = ranges["group_size"].max if "group_size" in ranges else algorithm.group_size
        rows = algorithm.prompts_per_step * most
        least = ranges["batch_size"].min if "batch_size" in ranges else algorithm.batch_size
        return least is None or least >= rows
    rows = algorithm.prompts_per_step * algorithm.group_size
    return algorithm.batch_size is None or algorithm.batch_size >= rows

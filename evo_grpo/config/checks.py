"""What no single field can see: settings that contradict each other, and those without effect."""

from __future__ import annotations

from collections.abc import Iterator

from evo_grpo.config.base import Problem
from evo_grpo.config.evolution import CLIPS, EvolveConfig, HyperparameterRange
from evo_grpo.config.groups import AlgorithmConfig, EnvConfig, PopulationConfig
from evo_grpo.errors import ConfigError
from evo_grpo.hparams import MUTABLE, Hparams

ROUNDING = 1e-12
"""Slack of a range: 1 - 0.8 is not quite 0.2."""


def contradictions(
    env: EnvConfig, population: PopulationConfig, algorithm: AlgorithmConfig, evolve: EvolveConfig
) -> Iterator[Problem]:
    """Yield every contradiction between settings, with its YAML path."""
    yield from _env(env)
    yield from _selection(population, evolve)
    yield from _lengths(algorithm)
    yield from _ranges(algorithm.hparams(), evolve)


def dead_settings(
    population: PopulationConfig, algorithm: AlgorithmConfig, evolve: EvolveConfig
) -> Iterator[str]:
    """Yield a sentence for each allowed setting that cannot have the effect it promises."""
    ranges = evolve.hyperparameters
    clips = [name for name in CLIPS if name in ranges]
    if clips and _always_on_policy(algorithm, evolve):
        yield (
            f"evolve.hyperparameters.{clips[0]} cannot act: with algorithm.update_epochs 1 and all "
            "rows of a step in one batch the probability ratio is exactly 1; set update_epochs: 2, "
            "or a batch_size below the rows of a step"
        )
    for name, given in ranges.items():
        if given.min == given.max:
            yield f"evolve.hyperparameters.{name} never moves: min and max are both {given.min:g}"
    if population.size > 1 and not ranges:
        yield (
            "evolve.hyperparameters is empty: all agents train with the same values and nothing "
            "mutates; give ranges, for instance lr: {min: 1e-4, max: 1e-2}"
        )
    if population.size > 1 and population.rounds == 1 and evolve.selection.kind != "none":
        yield (
            "population.rounds is 1: selection and mutation happen between rounds, so there will "
            "be none"
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
    if env.reward_weights is not None:
        wanted = len([env.reward] if isinstance(env.reward, str) else env.reward or [])
        got = len(env.reward_weights)
        if wanted != got:
            text = f"expected one weight per function of env.reward ({wanted}), got {got}"
            yield Problem(("env", "reward_weights"), text)


def _selection(population: PopulationConfig, evolve: EvolveConfig) -> Iterator[Problem]:
    selection = evolve.selection
    if selection.kind != "tournament":
        return
    if population.size == 1:
        text = (
            "expected at least 2 agents for a tournament, got 1; raise it, or set "
            "evolve.selection.kind: none"
        )
        yield Problem(("population", "size"), text)
    elif selection.size > population.size:
        text = f"expected at most population.size ({population.size}), got {selection.size}"
        yield Problem(("evolve", "selection", "size"), text)


def _lengths(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    longest, context = algorithm.max_output_tokens, algorithm.max_model_len
    shortest = algorithm.min_output_tokens
    if longest is not None and shortest > longest:
        text = f"expected at most algorithm.max_output_tokens ({longest}), got {shortest}"
        yield Problem(("algorithm", "min_output_tokens"), text)
    if longest is not None and context is not None and longest >= context:
        text = (
            f"expected less than algorithm.max_model_len ({context}), so that a prompt fits too, "
            f"got {longest}"
        )
        yield Problem(("algorithm", "max_output_tokens"), text)


def _ranges(base: Hparams, evolve: EvolveConfig) -> Iterator[Problem]:
    for name, given in evolve.hyperparameters.items():
        wrong_ends = list(_ends(base, name, given))
        yield from wrong_ends or _outside(base, name, given)
    low, high = (evolve.hyperparameters.get(name) for name in ("clip_low", "clip_high"))
    if low is not None and high is not None and low.min >= high.max:
        text = f"expected min below the max of clip_high, got {low.min:g} >= {high.max:g}"
        yield Problem(("evolve", "hyperparameters", "clip_low"), text)


def _ends(base: Hparams, name: str, given: HyperparameterRange) -> Iterator[Problem]:
    """Try both ends of a range as values: an agent may get them in the middle of a run."""
    if name in ("clip_low", "clip_high"):
        return  # whether a bound is right depends on the other one, which moves too
    for end, value in (("min", given.min), ("max", given.max)):
        if name == "clip_coef" and value == 0 and end == "min":
            text = "expected > 0, got 0"
            yield Problem(("evolve", "hyperparameters", name, end), text)
            continue
        try:
            base.with_value(name, MUTABLE[name](value))
        except ConfigError as error:
            # The message begins with the name of the value, which the path already says.
            text = str(error).partition(": ")[2]
            yield Problem(("evolve", "hyperparameters", name, end), text)


def _outside(base: Hparams, name: str, given: HyperparameterRange) -> Iterator[Problem]:
    """Find a value of `algorithm` that lies outside of its own range."""
    for value in _values(base, name):
        if not given.min - ROUNDING <= value <= given.max + ROUNDING:
            text = (
                f"expected a value inside evolve.hyperparameters.{name} "
                f"[{given.min:g}, {given.max:g}], got {value:g}; move it, or widen the range"
            )
            yield Problem(("algorithm", "clip_coef" if name in CLIPS else name), text)


def _values(base: Hparams, name: str) -> list[float]:
    if name == "clip_coef" and isinstance(base.clip_coef, tuple):
        low, high = base.clip_coef
        return [1 - low, high - 1]  # the range of clip_coef is that of the distance from 1
    if name == "batch_size":
        return [] if base.batch_size is None else [base.batch_size]  # None takes all rows
    return [base.get(name)]


def _always_on_policy(algorithm: AlgorithmConfig, evolve: EvolveConfig) -> bool:
    """Whether every optimizer step of every agent sees the policy that sampled its rows."""
    ranges = evolve.hyperparameters
    epochs = ranges["update_epochs"].max if "update_epochs" in ranges else algorithm.update_epochs
    group = ranges["group_size"].max if "group_size" in ranges else algorithm.group_size
    batch = ranges["batch_size"].min if "batch_size" in ranges else algorithm.batch_size
    one_batch = batch is None or batch >= algorithm.prompts_per_step * group
    return epochs == 1 and one_batch

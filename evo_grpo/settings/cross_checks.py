"""What no single field can see: settings that contradict each other, and those without effect."""

from __future__ import annotations

from collections.abc import Iterator

from evo_grpo.errors import ConfigError
from evo_grpo.schema.hparams import MUTABLE, Hparams, HyperparameterConfig, RLParameter
from evo_grpo.schema.search_space import CLIPS, dead_clip, outside
from evo_grpo.settings.evolve import EvolveConfig, HyperparameterRange
from evo_grpo.settings.group import Problem
from evo_grpo.settings.groups import AlgorithmConfig, EnvConfig, PopulationConfig


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
    prompts = algorithm.prompts_per_step
    if (clip := dead_clip(algorithm.hparams(), evolve.hp_config(), prompts)) is not None:
        yield (
            f"evolve.hyperparameters.{clip} cannot act: with algorithm.update_epochs 1 and all "
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
    range_of = HyperparameterConfig(**{name: RLParameter(min=given.min, max=given.max)})
    for found in outside(base, range_of):
        text = (
            f"expected a value inside evolve.hyperparameters.{name} "
            f"[{given.min:g}, {given.max:g}], got {found.value:g}; move it, or widen the range"
        )
        yield Problem(("algorithm", "clip_coef" if name in CLIPS else name), text)

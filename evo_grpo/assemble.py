"""From a config to what a run needs: the shared base, N agents, the environment, the schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig

from evo_grpo.cohort.cohort import Cohort
from evo_grpo.cohort.state import DEFAULT_OUTPUT_TOKENS, CohortOptions
from evo_grpo.envs.episodes.gym import MultiTurnGym
from evo_grpo.envs.protocol import Environment
from evo_grpo.envs.registry import build_multi_turn, build_task, is_multi_turn
from evo_grpo.envs.single_turn import ReasoningGym
from evo_grpo.envs.task import Task
from evo_grpo.evolve.mutate import Mutations, sample_hparams
from evo_grpo.evolve.select import NoSelection, Selector, TournamentSelection
from evo_grpo.learner.options import LearnOptions
from evo_grpo.model.base import SharedBase
from evo_grpo.objective.advantages import ADV_NORM_TO_SCALE
from evo_grpo.objective.losses import LossConfig
from evo_grpo.round import Schedule
from evo_grpo.seeding import derive, generator
from evo_grpo.settings import RunConfig


@dataclass(frozen=True)
class Prepared:
    """Everything a run needs, built from its config."""

    cohort: Cohort
    env: Environment[Any]
    schedule: Schedule
    slots: tuple[int, ...]


def prepare(config: RunConfig, task: Task | None = None) -> Prepared:
    """Build what a config describes: shared base, agents, environment and schedule.

    Args:
        config: What to run.
        task: The single-turn task of `config.env` where it was built already.

    Returns:
        The parts, before the first round.
    """
    if config.engine.threads is not None:
        torch.set_num_threads(config.engine.threads)
    make = _environment(config, task)
    base = SharedBase.load(
        config.model.name, device=config.engine.device, dtype=config.engine.dtype
    )
    env = make(base)
    limit = config.algorithm.max_model_len or base.context_length
    if limit:
        env.limit_context(limit)
    cohort = Cohort(
        base,
        _lora(config),
        _options(config, env.max_output_tokens or DEFAULT_OUTPUT_TOKENS),
        hp_config=config.evolve.hp_config(),
        seed=config.seed,
    )
    first = config.algorithm.hparams()
    draw = config.population.init == "sample"
    slots: list[int] = []
    for index in range(config.population.size):
        rng = generator(derive(config.seed, "init", index))
        slots.append(
            cohort.add(
                sample_hparams(first, cohort.hp_config, rng) if draw and index else first
            ).slot
        )
    return Prepared(cohort, env, _schedule(config), tuple(slots))


def _environment(config: RunConfig, task: Task | None) -> Callable[[SharedBase], Environment[Any]]:
    """Build what does not need the base yet, so that bad input shows before a model loads."""
    size, seed = config.algorithm.prompts_per_step, derive(config.seed, "env")
    if task is None and is_multi_turn(config.env.kind):
        factory = build_multi_turn(config.env, config.seed)
        return lambda base: MultiTurnGym(
            factory,
            base.tokenizer,
            max_turns=config.env.max_turns,
            batch_size=size,
            seed=seed,
            max_output_tokens=config.algorithm.max_output_tokens or DEFAULT_OUTPUT_TOKENS,
            name=config.env.kind,
        )
    built = task if task is not None else build_task(config.env, config.seed)
    return lambda base: ReasoningGym.from_task(built, base.tokenizer, size, seed)


def _lora(config: RunConfig) -> LoraConfig:
    lora = config.model.lora
    alpha = lora.alpha if lora.alpha is not None else 2 * lora.r
    return LoraConfig(
        r=lora.r,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType] -- PEFT types it as int and takes floats
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )


def _options(config: RunConfig, hint: int) -> CohortOptions:
    algorithm, engine = config.algorithm, config.engine
    longest = algorithm.max_output_tokens or hint
    loss_type: Any = algorithm.loss_type or algorithm.kind
    return CohortOptions(
        learn=LearnOptions(
            loss=LossConfig(loss_type=loss_type, max_completion_length=longest),
            token_budget=engine.max_tokens_per_microbatch,
            gradient_checkpointing=engine.gradient_checkpointing,
        ),
        adv_scale=ADV_NORM_TO_SCALE[algorithm.adv_norm],
        max_output_tokens=longest,
        min_output_tokens=algorithm.min_output_tokens,
        max_model_len=algorithm.max_model_len,
    )


def _schedule(config: RunConfig) -> Schedule:
    evolve, size = config.evolve, config.population.size
    selection = evolve.selection
    selectors: dict[str, Selector] = {"none": NoSelection()}
    if selection.kind == "tournament":
        selectors["tournament"] = TournamentSelection(
            tournament_size=selection.size,
            elitism=selection.elitism,
            population_size=size,
            eval_loop=evolve.fitness.window,
        )
    return Schedule(
        rounds=config.population.rounds,
        steps_per_round=config.population.steps_per_round,
        prompts_per_step=config.algorithm.prompts_per_step,
        selector=selectors[selection.kind],
        mutations=Mutations(
            no_mutation=evolve.mutation.no_mutation,
            rl_hp=evolve.mutation.rl_hp,
            mutate_elite=evolve.mutation.mutate_elite,
        ),
        eval_prompts=evolve.fitness.prompts,
        eval_samples=evolve.fitness.samples,
        eval_temperature=evolve.fitness.temperature,
        inherit_optimizer=evolve.inherit_optimizer,
        completions=config.record.completions,
    )

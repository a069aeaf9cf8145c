"""finetune_llm_reasoning and finetune_llm_multiturn: train agents in one call.

Both play the same rounds as `run(config)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from evo_grpo.api.agilerl.finetune.training import Budget, FinetuneSettings, split_by_base, train
from evo_grpo.api.population import Population
from evo_grpo.envs.episodes.gym import MultiTurnGym
from evo_grpo.envs.episodes.multi_turn import MultiTurnEnv, TokenObservationWrapper
from evo_grpo.envs.protocol import Environment
from evo_grpo.envs.single_turn import ReasoningGym
from evo_grpo.errors import ConfigError
from evo_grpo.schema.validation import whole
from evo_grpo.seeding import derive

PopT = TypeVar("PopT")

DEFAULT_MAX_STEPS = 32768
"""Completions of a multi-turn call without max_steps."""


def finetune_llm_reasoning(
    pop: PopT,
    env: ReasoningGym | None = None,
    *,
    env_fn: Callable[[], ReasoningGym] | None = None,
    **settings: Any,
) -> PopT:
    """Finetune agents on prompts with a reward: one turn each.

    Args:
        pop: One agent, a list of agents, or a Population. Agents of one base train together, in
            the same forward passes; those with bases of their own train one base after the other.
        env: Prompts and rewards; all agents get the same ones.
        env_fn: Makes the environment, instead of `env`.
        **settings: See `FinetuneSettings`; without max_steps and num_epochs it is one pass over
            the train rows.

    Returns:
        `pop` itself, trained.

    Raises:
        ConfigError: For a wrong argument.
        RunFailedError: When no agent is left that can be ranked.
    """
    chosen = FinetuneSettings.of(settings)
    if (env is None) == (env_fn is None):
        raise ConfigError("env: expected exactly one of env= and env_fn=")
    prompts = env if env is not None else env_fn() if env_fn is not None else None
    if not isinstance(prompts, ReasoningGym):
        raise ConfigError(
            f"env: expected a ReasoningGym, got {type(prompts).__name__}; episodes of several "
            "turns are for finetune_llm_multiturn"
        )
    steps = None
    if chosen.num_epochs is not None or chosen.max_steps is None:
        size = chosen.prompts_per_step or prompts.batch_size
        steps = math.ceil((chosen.num_epochs or 1) * len(prompts.task.splits["train"]) / size)
    return _finetune(pop, lambda _: prompts, chosen, steps)


def finetune_llm_multiturn(
    pop: PopT,
    env_factory: Callable[[], MultiTurnEnv | TokenObservationWrapper],
    max_turns: int,
    **settings: Any,
) -> PopT:
    """Finetune agents on episodes of many turns; the reward is the episode's cumulative one.

    Args:
        pop: As for `finetune_llm_reasoning`.
        env_factory: Makes a new environment at each call: a `TokenObservationWrapper`, or a bare
            `MultiTurnEnv` when the agents have a tokenizer.
        max_turns: Completions after which an episode is over, at most the wrapper's.
        **settings: See `FinetuneSettings`. `prompts_per_step` counts episode seeds; without it
            they are as many as give `batch_size` rows in groups of `group_size`, of the first
            agent. `max_steps` is 32,768 where it is left out.

    Returns:
        `pop` itself, trained.

    Raises:
        ConfigError: For a wrong argument.
        RunFailedError: When every episode of a step was dropped, or no agent can be ranked.
    """
    chosen = FinetuneSettings.of({"evaluation_interval": 50, "eval_prompts": 32, **settings})
    if chosen.num_epochs is not None:
        raise ConfigError("num_epochs: episodes have no epochs; give max_steps instead")
    whole(1).check("max_turns", max_turns)

    def environment(team: Population[Any]) -> MultiTurnGym:
        first = team.cohort.agents[team.slots[0]].hparams
        rows = first.batch_size or 4 * first.group_size
        return MultiTurnGym(
            env_factory,
            team.cohort.base.tokenizer,
            max_turns=max_turns,
            batch_size=max(1, math.ceil(rows / first.group_size)),
            seed=derive(team.cohort.seed, "env"),
        )

    return _finetune(pop, environment, chosen, None)


def save_llm_checkpoint(agent: Any, path: str | Path) -> None:  # noqa: ANN401 -- GRPO, GSPO or CISPO
    """Write an agent to a folder; `PeftModel.from_pretrained(base, path / "actor")` loads it.

    Args:
        agent: The agent.
        path: The folder.
    """
    agent.save_checkpoint(path)


def _finetune(
    pop: PopT,
    environment: Callable[[Population[Any]], Environment[Any]],
    settings: FinetuneSettings,
    steps: int | None,
) -> PopT:
    """Train the agents of one base after those of another, each with its share of the budget."""
    teams = split_by_base(pop)
    if len(teams) > 1 and settings.tournament is not None:
        raise ConfigError(
            f"tournament: the agents are over {len(teams)} different bases, so none can be "
            "copied over another; make them over one with GRPO.population(size=...) or "
            "agent.clone()"
        )
    size = sum(len(team) for team in teams)
    counted = settings.max_steps or DEFAULT_MAX_STEPS
    # Each base numbers its agents from 0; in the names of checkpoints they follow one another.
    first = 0
    for team in teams:
        env = environment(team)
        completions = None if steps else math.ceil(counted * len(team) / size)
        count = max(team.slots) + 1
        try:
            train(team, env, settings, Budget(completions, steps, settings.max_reward), first=first)
        finally:
            if isinstance(env, MultiTurnGym):
                env.close()
        first += count
    if settings.save_elite is not False and settings.elite_path is not None:
        best = max((agent for team in teams for agent in team), key=_last_fitness)
        save_llm_checkpoint(best, settings.elite_path)
    return pop


def _last_fitness(agent: Any) -> float:  # noqa: ANN401 -- GRPO, GSPO or CISPO
    history = agent.state.history
    return history[-1].mean if history else -math.inf

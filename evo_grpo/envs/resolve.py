"""Turn the argument `env`, an object or the name of a task, into an environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from evo_grpo.envs import prompts, protocol, single_turn
from evo_grpo.envs.builtin.dataset import DatasetEnv
from evo_grpo.envs.episodes.dialogue import opening
from evo_grpo.envs.episodes.gym import MultiTurnGym
from evo_grpo.envs.episodes.multi_turn import MultiTurnEnv, TokenObservationWrapper
from evo_grpo.envs.registry import build_multi_turn, build_task, is_multi_turn
from evo_grpo.envs.task import Task
from evo_grpo.errors import ConfigError
from evo_grpo.schema.validation import shown
from evo_grpo.seeding import derive
from evo_grpo.settings import EnvConfig
from evo_grpo.settings.algorithm import DEFAULT_PROMPTS


def resolve_environment(
    env: object,
    *,
    tokenizer: prompts.Tokenizer | None,
    seed: int,
    max_output_tokens: int | None,
    batch_size: int | None = None,
) -> protocol.Environment[Any]:
    """Return `env`, or build the environment that it names or describes.

    Args:
        env: An environment of `evo_grpo`, which is returned unchanged; the name of a task such as
            "sums"; the settings of a task, as in YAML's `env`; a `DatasetEnv`; or a
            `TokenObservationWrapper` or `MultiTurnEnv`, which then plays one episode at a time. A
            `MultiTurnEnv` gets the default of `env.max_turns`.
        tokenizer: The tokenizer of the base model; None is refused unless `env` has its own.
        seed: Seed of the data and of the order of prompts in a new environment.
        max_output_tokens: Tokens of one completion in a new environment.
        batch_size: P, prompts or episode seeds per step of a new environment; None is 4.
    """
    environment: Any = env
    if isinstance(env, TokenObservationWrapper):
        return MultiTurnGym.of(env)
    if hasattr(environment, "begin") and hasattr(environment, "prompts"):
        return environment
    settings = named_task(env)
    if settings is None and not isinstance(env, DatasetEnv | MultiTurnEnv):
        raise ConfigError(
            "env: expected a DatasetEnv, a ReasoningGym, a MultiTurnGym, an environment with "
            f"reset(seed) and step(action), or a task's name, got {shown(env)}"
        )
    if tokenizer is None:
        label = type(env).__name__ if settings is None else repr(settings.kind)
        raise ConfigError(
            f"env: {label} needs the model's tokenizer; build the agents with the name of a "
            "model or with tokenizer=, or pass an environment that has one"
        )
    size = batch_size or DEFAULT_PROMPTS
    if settings is not None:
        return environment_of(settings, seed, size, max_output_tokens)(tokenizer)
    if isinstance(env, DatasetEnv):
        return single_turn.ReasoningGym.from_task(
            env.task(seed), tokenizer, size, derive(seed, "env")
        )
    turns = EnvConfig.model_fields["max_turns"].default
    return MultiTurnGym.of(
        TokenObservationWrapper(environment, tokenizer, turns, max_output_tokens=max_output_tokens)
    )


def named_task(env: object) -> EnvConfig | None:
    """Return the settings of the task that `env` names or describes; None for any other object."""
    if isinstance(env, str):
        return EnvConfig(kind=env)
    if isinstance(env, Mapping):
        return EnvConfig(**cast("Mapping[str, Any]", env))
    return env if isinstance(env, EnvConfig) else None


def environment_of(
    config: EnvConfig,
    seed: int,
    batch_size: int,
    max_output_tokens: int | None,
    task: Task | None = None,
) -> Callable[[prompts.Tokenizer], protocol.Environment[Any]]:
    """Build a task, and return a function that makes its environment from a tokenizer.

    Errors in the settings and the data are thus raised before a model is loaded. `batch_size` is P,
    the prompts or episode seeds per step. `max_output_tokens` limits a completion in an environment
    of several turns. `task` is the single-turn task, if it is built already.
    """
    order = derive(seed, "env")
    if task is None and is_multi_turn(config.kind):
        factory = build_multi_turn(config, seed)
        return lambda tokenizer: MultiTurnGym(
            factory,
            tokenizer,
            max_turns=config.max_turns,
            batch_size=batch_size,
            seed=order,
            max_output_tokens=max_output_tokens,
            conversation_template=opening(config.system_prompt),
            chat_template_kwargs=config.chat_template_kwargs,
            name=config.kind,
            reward_timeout=config.reward_timeout,
        )
    built = build_task(config, seed) if task is None else task
    return lambda tokenizer: single_turn.ReasoningGym.from_task(built, tokenizer, batch_size, order)

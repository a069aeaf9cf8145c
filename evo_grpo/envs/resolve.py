"""From what a caller passes as `env` to an environment: an object, or a task's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from evo_grpo.envs.episodes.gym import MultiTurnGym
from evo_grpo.envs.episodes.multi_turn import MultiTurnEnv, TokenObservationWrapper
from evo_grpo.envs.protocol import Environment
from evo_grpo.envs.registry import build_multi_turn, build_task, is_multi_turn
from evo_grpo.envs.single_turn import ReasoningGym
from evo_grpo.errors import ConfigError
from evo_grpo.seeding import derive
from evo_grpo.settings import EnvConfig
from evo_grpo.settings.algorithm import DEFAULT_PROMPTS
from evo_grpo.validation import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # for annotations only: it loads torch


def resolve_environment(
    env: object,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
    max_output_tokens: int | None,
    batch_size: int | None = None,
) -> Environment[Any]:
    """Return the environment that a caller means.

    Args:
        env: An environment of `evo_grpo`, returned as it is; a `TokenObservationWrapper` or a bare
            `MultiTurnEnv`, which plays one episode after the other, a bare one with the default
            `env.max_turns` of a configuration; a task's name such as "sums"; or the settings of a
            task, as YAML's `env` has them.
        tokenizer: The base model's, None where it has none.
        seed: Seed of the data and of the order of prompts, where `env` is a name.
        max_output_tokens: Tokens of one completion, where an environment is made here.
        batch_size: P, prompts or episode seeds of a step, where an environment is made here; None
            is 4.

    Raises:
        ConfigError: It is something else, or needs a tokenizer and there is none.
    """
    if (named := named_task(env)) is not None:
        return _named(named, tokenizer, seed, max_output_tokens, batch_size)
    if isinstance(env, TokenObservationWrapper):
        return MultiTurnGym.of(env)
    made: Any = env
    if hasattr(made, "begin") and hasattr(made, "prompts"):
        return made
    if isinstance(env, MultiTurnEnv):
        return MultiTurnGym.of(_wrapped(env, tokenizer, max_output_tokens))
    raise ConfigError(
        "env: expected a ReasoningGym, a MultiTurnGym, an environment with reset(seed) and "
        f"step(action), or a task's name, got {shown(env)}"
    )


def named_task(env: object) -> EnvConfig | None:
    """Return the settings of a task that is given by name or by settings, None for an object."""
    if isinstance(env, str):
        return EnvConfig(kind=env)
    if isinstance(env, Mapping):
        return EnvConfig(**cast("Mapping[str, Any]", env))
    return env if isinstance(env, EnvConfig) else None


def _named(
    config: EnvConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
    max_output_tokens: int | None,
    batch_size: int | None,
) -> Environment[Any]:
    if tokenizer is None:
        raise _no_tokenizer(f"env={config.kind!r}: a task by name")
    order, size = derive(seed, "env"), batch_size or DEFAULT_PROMPTS
    if not is_multi_turn(config.kind):
        return ReasoningGym.from_task(build_task(config, seed), tokenizer, size, order)
    return MultiTurnGym(
        build_multi_turn(config, seed),
        tokenizer,
        max_turns=config.max_turns,
        batch_size=size,
        seed=order,
        max_output_tokens=max_output_tokens,
        name=config.kind,
        reward_timeout=config.reward_timeout,
    )


def _wrapped(
    env: MultiTurnEnv,
    tokenizer: PreTrainedTokenizerBase | None,
    max_output_tokens: int | None,
) -> TokenObservationWrapper:
    if tokenizer is None:
        raise _no_tokenizer(f"env: {type(env).__name__}, a bare environment,")
    max_turns = EnvConfig.model_fields["max_turns"].default
    return TokenObservationWrapper(env, tokenizer, max_turns, max_output_tokens=max_output_tokens)


def _no_tokenizer(what: str) -> ConfigError:
    return ConfigError(
        f"{what} needs the model's tokenizer; build the agents with the name of a model or with "
        "tokenizer=, or pass an environment that has one"
    )

"""What `test` and `train` check before they play: the environment, and what may mutate."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from evo_grpo.cohort.cohort import Cohort
from evo_grpo.envs.episodes.gym import MultiTurnGym
from evo_grpo.envs.episodes.multi_turn import MultiTurnEnv, TokenObservationWrapper
from evo_grpo.envs.protocol import Environment
from evo_grpo.envs.registry import build_multi_turn, build_task, is_multi_turn
from evo_grpo.envs.single_turn import ReasoningGym
from evo_grpo.errors import ConfigError
from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.explore.protocol import Explorer
from evo_grpo.schema.search_space import dead_clip, warn_if_nothing_mutates
from evo_grpo.seeding import derive
from evo_grpo.settings import EnvConfig
from evo_grpo.validation import shown

#: Prompts, or episode seeds, of a step in an environment that is given by its name.
BATCH_SIZE = 4


def environment_of(cohort: Cohort, env: object) -> Environment[Any]:
    """Return what agents can play, suited to them.

    Args:
        cohort: The agents.
        env: An environment of `evo_grpo`; a `TokenObservationWrapper` or a bare `MultiTurnEnv`,
            which plays one episode after the other, a bare one with as many turns at the most as
            `env.max_turns` of a configuration has by default; or a task's name such as "sums".

    Raises:
        ConfigError: It is something else, or needs a tokenizer that the agents do not have.
    """
    made: Any = env
    if isinstance(env, str):
        made = _by_name(cohort, env)
    elif isinstance(env, TokenObservationWrapper):
        made = MultiTurnGym.of(env)
    elif not _is_ours(env) and isinstance(env, MultiTurnEnv):
        made = MultiTurnGym.of(_wrapped(cohort, env))
    if not _is_ours(made):
        raise ConfigError(
            "env: expected a ReasoningGym, a MultiTurnGym, an environment with reset(seed) and "
            f"step(action), or a task's name, got {shown(made)}"
        )
    cohort.suit(made)
    return made


def warn_of_what_cannot_mutate(
    cohort: Cohort, slots: Sequence[int], explorer: Explorer | None, prompts: int
) -> None:
    """Warn, as a configuration does, of ranges and mutations that cannot have an effect.

    Args:
        cohort: The agents.
        slots: Which.
        explorer: What the caller asked for, None for nothing in particular.
        prompts: Prompts of a GRPO step.
    """
    hp_config = cohort.hp_config
    clips = {dead_clip(cohort.agents[slot].hparams, hp_config, prompts) for slot in slots}
    if None not in clips and clips:
        warnings.warn(
            f"hp_config: {clips.pop()} cannot act: with update_epochs=1 and all rows of a step in "
            "one batch the probability ratio is exactly 1; set update_epochs=2, or a batch_size "
            "below the rows of a step",
            UserWarning,
            stacklevel=3,
        )
    if isinstance(explorer, Mutations):
        warn_if_nothing_mutates(explorer.rl_hp, hp_config)


def _is_ours(env: object) -> bool:
    return hasattr(env, "play") and hasattr(env, "prompts")


def _by_name(cohort: Cohort, name: str) -> Environment[Any]:
    tokenizer, seed = cohort.base.tokenizer, cohort.seed
    if tokenizer is None:
        raise _no_tokenizer(f"env={name!r}: a task by name")
    config = EnvConfig(kind=name)
    if not is_multi_turn(name):
        task = build_task(config, seed)
        return ReasoningGym.from_task(task, tokenizer, BATCH_SIZE, derive(seed, "env"))
    return MultiTurnGym(
        build_multi_turn(config, seed),
        tokenizer,
        max_turns=config.max_turns,
        batch_size=BATCH_SIZE,
        seed=derive(seed, "env"),
        max_output_tokens=cohort.max_output_tokens,
        name=name,
    )


def _wrapped(cohort: Cohort, env: MultiTurnEnv) -> TokenObservationWrapper:
    if cohort.base.tokenizer is None:
        raise _no_tokenizer(f"env: {type(env).__name__}, a bare environment,")
    return TokenObservationWrapper(
        env,
        cohort.base.tokenizer,
        EnvConfig.model_fields["max_turns"].default,
        max_output_tokens=cohort.max_output_tokens,
    )


def _no_tokenizer(what: str) -> ConfigError:
    return ConfigError(
        f"{what} needs the model's tokenizer; build the agents with model_name= or tokenizer=, or "
        "pass an environment that has one"
    )

"""The environment that a method of `GRPO` or `Population` is given, made to fit the agents."""

from __future__ import annotations

from typing import Any

from evo_grpo.envs.protocol import Environment
from evo_grpo.envs.resolve import resolve_environment
from evo_grpo.population.cohort.cohort import Cohort


def environment_for(cohort: Cohort, env: object) -> Environment[Any]:
    """Resolve `env` with the cohort's tokenizer and seed, and fit it to the model's context.

    Raises:
        ConfigError: It is no environment and no task's name, or needs a tokenizer that the agents
            do not have.
        PromptTooLongError: A prompt leaves no room for a completion.
    """
    made = resolve_environment(
        env,
        tokenizer=cohort.base.tokenizer,
        seed=cohort.seed,
        max_output_tokens=cohort.max_output_tokens,
        batch_size=cohort.settings.algorithm.prompts_per_step,
    )
    cohort.suit(made)
    return made

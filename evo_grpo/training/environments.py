"""Resolution of the `env` argument of methods of `GRPO` and `Population`."""

from __future__ import annotations

from typing import Any

from evo_grpo.envs.protocol import Environment
from evo_grpo.envs.resolve import resolve_environment
from evo_grpo.population.cohort.cohort import Cohort


def environment_for(cohort: Cohort, env: object) -> Environment[Any]:
    """Build an environment with the cohort's tokenizer and seed, limited to the model's context.

    Raises:
        ConfigError: `env` is neither an environment nor the name of a task, or it needs a tokenizer
            and the agents have none.
        PromptTooLongError: A prompt leaves no room for a completion.
    """
    made = resolve_environment(
        env,
        tokenizer=cohort.base.tokenizer,
        seed=cohort.seed,
        max_output_tokens=cohort.max_output_tokens,
        batch_size=cohort.settings.algorithm.prompts_per_step,
    )
    cohort.adapt_to(made)
    return made

"""Environments of a cohort: the `env` argument of methods, and the answers of judges in a run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from evo_grpo.envs.protocol import Environment
from evo_grpo.envs.resolve import resolve_environment
from evo_grpo.envs.single_turn import ReasoningGym
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.ranks.team import Team
from evo_grpo.record.names import JUDGED


def environment_for(cohort: Cohort, env: object) -> Environment[Any]:
    """Build an environment with the cohort's tokenizer and seed, limited to the model's context.

    Raises:
        ConfigError: `env` is neither an environment nor the name of a task, or the agents lack the
            tokenizer that it needs.
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


def record_rewards(env: object, path: Path, team: Team, *, writes: bool, shared: bool) -> None:
    """Keep judges' answers in a run folder, and ask each question once over all ranks.

    `writes` is whether this rank writes the folder's records, `shared` whether all ranks see it.
    """
    if not isinstance(env, ReasoningGym):
        return
    if writes or shared:
        env.record_rewards(path / JUDGED, team.rank)
    if (board := team.board()) is not None:
        env.share_rewards(board, known=writes and not shared)


def spent_on_rewards(env: object, team: Team, *, writes: bool) -> dict[str, float]:
    """Keep all answers of judges, and return their cost in all processes."""
    spent = Counter[str]()
    if isinstance(env, ReasoningGym):
        part = env.spent_on_rewards(), env.unrecorded_rewards()
        for cost, unrecorded in team.gather(part):
            spent.update(cost)
            if writes:
                env.keep_rewards(unrecorded)
    return dict(spent)

"""Fitness of every agent on shared prompts, with shared draws, in one generation call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evo_grpo.envs.single_turn import ReasoningGym
from evo_grpo.grpo.cohort import Cohort
from evo_grpo.records import Score
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.samples import Group, Prompt
from evo_grpo.seeding import derive


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation measured for one policy.

    Attributes:
        score: Its fitness.
        groups: The completions behind it.
        rewards: (B,) weighted reward per completion, NaN where every reward function abstained.
    """

    score: Score
    groups: tuple[Group, ...]
    rewards: np.ndarray


def evaluate(
    cohort: Cohort,
    env: ReasoningGym,
    slots: Sequence[int | None],
    prompts: Sequence[Prompt],
    *,
    samples: int,
    temperature: float,
    stream: Sequence[str | int],
) -> list[Evaluation]:
    """Sample and score many policies on the same prompts with the same draws.

    Args:
        cohort: The agents.
        env: Scores the completions.
        slots: Which agents; None is the base model without an adapter.
        prompts: P prompts, the same for all.
        samples: Completions per prompt.
        temperature: The same for all, whatever the agents train with; no top-k or top-p.
        stream: Path of the random stream, shared by all policies.

    Returns:
        One evaluation per entry of `slots`.
    """
    sampling = Sampling(
        temperature=temperature,
        max_output_tokens=cohort.max_output_tokens,
        min_output_tokens=cohort.options.min_output_tokens,
    )
    seed = derive(cohort.seed, *stream)
    requests = [
        RolloutRequest(
            -1 if s is None else s,
            None if s is None else cohort.agents[s].adapter,
            prompts,
            samples,
            sampling,
            seed,
        )
        for s in slots
    ]
    results: list[Evaluation] = []
    for groups in cohort.engine.rollout(requests):
        rewards = weighted(env.score(groups), env.weights)
        results.append(Evaluation(summarise(rewards, len(prompts)), tuple(groups), rewards))
    return results


def weighted(rewards: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Sum reward functions.

    Args:
        rewards: (B, K), NaN = abstain.
        weights: (K,).

    Returns:
        (B,) float64: sum over the functions that did not abstain, NaN where all did.
    """
    total = np.nansum(rewards * weights, axis=1)
    total[np.isnan(rewards).all(axis=1)] = np.nan
    return total


def summarise(rewards: np.ndarray, prompts: int) -> Score:
    """Mean over prompts and the standard error of that mean.

    Args:
        rewards: (P * G,) in prompt order, NaN = abstained.
        prompts: P.

    Returns:
        The score; samples of one prompt are averaged before the error is taken, since they are not
        independent. With a single prompt the error is taken over its samples.
    """
    table = rewards.reshape(prompts, -1)
    known = ~np.isnan(table)
    counts = known.sum(axis=1)
    sums = np.where(known, table, 0.0).sum(axis=1)
    per_prompt = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    units = per_prompt[counts > 0] if prompts > 1 else table[known]
    if len(units) == 0:
        return Score(mean=float("nan"), se=float("nan"), n=0)
    se = float(units.std(ddof=1) / np.sqrt(len(units))) if len(units) > 1 else 0.0
    return Score(
        mean=float(np.nanmean(per_prompt)),
        se=se,
        n=int((counts > 0).sum()),
        per_prompt=tuple(float(v) for v in per_prompt),
    )

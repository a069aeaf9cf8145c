"""Evaluates every agent on the same prompts, with the same draws, in one generation call.

Racing evaluates again only agents that the first evaluation cannot separate (`undecided`), as Maron
and Moore (1997) and Birattari et al. (2002) do, with the paired test of `evolve.compare`. Because
all agents answer the same prompts, few agents need a second evaluation.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from evo_grpo.envs.protocol import Environment, Experience, StartT, starts_under
from evo_grpo.envs.rewards.weights import fitness_rewards, reward_names
from evo_grpo.evolve.compare import compare
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.cohort.sampler import PopulationSampler
from evo_grpo.population.turns import Turns, alone, played, take_turns
from evo_grpo.settings import FitnessConfig
from evo_grpo.settings.evolve import TOKENS, FitnessReward, ObjectiveConfig
from evo_grpo.types import Objective, Prompt, RewardScore, Score, Slot

RACE_LEVEL = 0.1
"""Two agents count as separated if the p-value of a paired test is at most this level."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation of one policy.

    Attributes:
        experience: The policy's completions or episodes; for an agent of another rank, without
            texts and tokens.
        rewards: (B,) weighted rewards, NaN where every reward function abstained or the episode was
            dropped; all NaN if a log-prob of the policy is not finite.
        units: For each start, the number of its prompt; equal prompts have the same number.
        tokens: Number of tokens that were sampled.
        looks: Number of evaluations that were merged into this one; 0 for rewards of training.
    """

    score: Score
    experience: Experience
    rewards: np.ndarray
    units: tuple[int, ...] = ()
    tokens: int = 0
    looks: int = 1


def evaluating(  # noqa: PLR0913 -- what is measured, and how, one argument each
    cohort: Cohort,
    env: Environment[StartT],
    slots: Sequence[int | None],
    prompts: Sequence[StartT],
    *,
    samples: int,
    temperature: float,
    stream: Sequence[str | int],
    reward: FitnessReward = None,
    further: Sequence[ObjectiveConfig] = (),
) -> Turns[list[Evaluation]]:
    """Evaluate many policies on the same P starts, with the same draws.

    Starts are prompts, rendered by each policy's template, or seeds of episodes. A slot of None is
    the base model without an adapter. All policies draw `samples` completions or episodes per start
    with `temperature` (0 is greedy), without top-k or top-p. `stream` is the path of the shared
    random stream, `reward` selects the rewards in fitness (`evolve.fitness.reward`), and `further`
    are the other objectives to measure.
    """
    sampler = PopulationSampler.compared(
        cohort, slots, samples=samples, temperature=temperature, stream=stream
    )
    prompt_names = (
        None if slot is None else cohort.agents[Slot(slot)].hparams.prompt for slot in slots
    )
    starts = [starts_under(env, name, prompts) for name in prompt_names]
    begin = partial(cohort.begin, env, starts, sampler.group_sizes)
    results, units = list[Evaluation](), units_of(env, prompts)
    for experience in (yield from played(env, begin, sampler.sample)):
        rewards = weighted(*fitness_rewards(env, experience.rewards, reward))
        if any(math.isnan(value) for t in experience.trajectories for value in t.logprobs or ()):
            # NaN logits cannot select a token, so these completions do not come from the policy.
            rewards = np.full_like(rewards, np.nan)
        score = summarise(rewards, units)
        score = replace(score, rewards=by_function(reward_names(env), experience.rewards, units))
        if further:
            objectives = (measured(env, experience, objective, units) for objective in further)
            score = replace(score, further=tuple(objectives))
        results.append(Evaluation(score, experience, rewards, units, experience.tokens))
    return results


#: `evaluating`, run to its end: policies share one generation call and wait for their rewards.
evaluate = alone(evaluating)


def measured(
    env: Environment[StartT],
    experience: Experience,
    objective: ObjectiveConfig,
    units: Sequence[int],
) -> Objective:
    """Return the score of an objective for one policy's experience; for `units` see `summarise`."""
    if objective.name == TOKENS:
        counts = [math.nan if t.error else t.sampled for t in experience.trajectories]
        values = np.array(counts, dtype=np.float64)
    else:
        values = weighted(*fitness_rewards(env, experience.rewards, objective.name))
    score = summarise(values, units)
    return Objective(objective.name, objective.minimize, score.mean, score.se, score.per_prompt)


def by_function(
    names: Sequence[str], rewards: np.ndarray, units: Sequence[int]
) -> tuple[RewardScore, ...]:
    """Return the score of each reward function; empty if the environment names none.

    `names` has K names, `rewards` (P * G, K) are unweighted; for `units` see `summarise`.
    """
    scores = (summarise(column, units) for column in rewards.T)
    return tuple(
        RewardScore(name, score.mean, score.se, score.n)
        for name, score in zip(names, scores, strict=False)
    )


def evaluate_here(
    cohort: Cohort,
    env: Environment[StartT],
    slots: Sequence[Slot],
    starts: Sequence[StartT],
    fitness: FitnessConfig,
    *,
    stream: Sequence[str | int],
) -> dict[Slot, Evaluation]:
    """Evaluate the agents in `slots` that this rank has, with one generation call per shard."""
    overlap = cohort.overlap.takes_turns(env)
    parts = cohort.parts_here(slots)
    works = [
        evaluating(
            cohort,
            env,
            part,
            starts,
            samples=fitness.per_prompt(fitness.samples),
            temperature=fitness.temperature,
            stream=stream,
            reward=fitness.counted,
            further=fitness.further,
        )
        for part in parts
    ]
    results = take_turns(works, overlap=overlap)
    pairs = zip(parts, results, strict=True)
    return {
        slot: evaluation
        for part, evaluations in pairs
        for slot, evaluation in zip(part, evaluations, strict=True)
    }


def without_texts(result: Evaluation) -> Evaluation:
    """Remove texts and tokens from an evaluation, so that it is small enough to be sent."""
    light = tuple(
        replace(t, prompt="", text="", token_ids=(), mask=(True,) * t.sampled, logprobs=(), row={})
        for t in result.experience.trajectories
    )
    return replace(result, experience=replace(result.experience, trajectories=light))


def undecided(results: Mapping[Slot, Evaluation], keep: int) -> list[Slot]:
    """Return agents at the border of selection, and agents that a test cannot tell from these.

    The border agents are those ranked `keep` and `keep` + 1, or the best agent if all stay.
    """
    scores = {slot: r.score for slot, r in results.items() if np.isfinite(r.score.mean)}
    ranked = sorted(scores, key=lambda slot: (-scores[slot].mean, slot))
    border = ranked[keep - 1 : keep + 1] if keep < len(results) else ranked[:1]
    return [slot for slot in ranked if any(_level(scores[slot], scores[b]) for b in border)]


def _level(first: Score, second: Score) -> bool:
    ahead, behind = compare(first, second), compare(second, first)
    return not (ahead.significant(RACE_LEVEL) or behind.significant(RACE_LEVEL))


def merged(first: Evaluation, second: Evaluation) -> Evaluation:
    """Merge two evaluations on the same prompts into one over the samples of both.

    Experience and reward scores are those of `first`.
    """
    tables = [e.rewards.reshape(len(e.units), -1) for e in (first, second)]
    rewards = np.concatenate(tables, axis=1).reshape(-1)
    earlier, score = first.score, summarise(rewards, first.units)
    first_look = earlier.first_look or earlier.per_prompt
    score = replace(score, first_look=first_look, rewards=earlier.rewards)
    return Evaluation(
        score,
        first.experience,
        rewards,
        first.units,
        first.tokens + second.tokens,
        first.looks + second.looks,
    )


def pass_at(rewards: np.ndarray, units: Sequence[int], k: int, correct: float) -> Score:
    """Return pass@k: the probability that one of k completions of a prompt is correct.

    For c correct among n completions of a prompt, the estimator is 1 - C(n - c, k) / C(n, k) (Chen
    et al. 2021, arXiv:2107.03374); it is averaged over prompts. `rewards` (P * G,) are in prompt
    order; NaN, where all functions abstained, is ignored. `correct` is the least reward of a
    correct completion; for `units` see `summarise`. A prompt with fewer than k rewards is NaN in
    `per_prompt`, and is left out of the mean.
    """
    table = rewards.reshape(len(units), -1)
    # Weighted sums of rewards such as 0.7 + 0.3 are not exact.
    right = np.where(np.isnan(table), False, table >= correct - 1e-9).sum(axis=1)
    counts = (~np.isnan(table)).sum(axis=1)
    values = [
        1 - math.comb(n - c, k) / math.comb(n, k) if n >= k else math.nan
        for n, c in zip(counts.tolist(), right.tolist(), strict=True)
    ]
    return summarise(np.array(values), units)


def why_unranked(name: str, results: Sequence[Evaluation]) -> str:
    """Return a text on why no agent can be ranked: the environment's error, or what to check."""
    errors = Counter(t.error for result in results for t in result.experience.trajectories)
    if errors and not errors[""]:
        reason, times = errors.most_common(1)[0]
        return (
            f"all {errors.total()} episodes of the evaluation in {name!r} were dropped; the "
            f"commonest reason, {times} times: {reason}"
        )
    aside = sum(result.experience.metrics.get("set_aside", 0.0) for result in results)
    if aside:
        return (
            f"{int(aside)} groups of the evaluation in {name!r} were set aside, for a reward was "
            "no number to learn from; mend the reward function"
        )
    return "lower the bounds of lr, or see whether every reward function abstained"


def weighted(rewards: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the weighted sum (B,) float64 of reward functions; NaN where all of them abstained.

    Takes rewards (B, K), NaN where a function abstained, and weights (K,).
    """
    total = np.nansum(rewards * weights, axis=1)
    total[np.isnan(rewards).all(axis=1)] = np.nan
    return total


def equal_starts(starts: Sequence[object]) -> tuple[int, ...]:
    """Number prompts or seeds from 0, equal ones alike; an unhashable start has its own number."""
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(_key(start), len(numbers)) for start in starts)


def _key(start: object) -> object:
    if isinstance(start, Prompt):
        return start.text
    try:
        hash(start)
    except TypeError:
        return "unhashable", id(start)
    return start


def units_of(env: Environment[StartT], starts: Sequence[StartT]) -> tuple[int, ...]:
    """Number starts as `equal_starts` does; in a task of one prompt, number each start separately.

    In general a score estimates the reward on other prompts, so a single prompt is little evidence.
    In a task of one prompt, a score estimates the reward of further answers to that prompt.
    """
    units = equal_starts(starts)
    if max(units) == 0 and not any(equal_starts([starts[0], *env.prompts("train")])):
        return tuple(range(len(starts)))
    return units


def summarise(rewards: np.ndarray, units: Sequence[int]) -> Score:
    """Return the mean of rewards over the different prompts, and the standard error of that mean.

    Answers to one prompt are not independent, whether they are samples of one row or of several
    equal rows. So they are averaged first, and each different prompt counts once. With a single
    prompt the error is computed over its answers; with a single answer it is NaN. `rewards`
    (P * G,) are in the order of the P rows, NaN where all functions abstained; `units` has the
    index of each row's prompt, from 0 to U - 1 (see `units_of`), and `per_prompt` has U entries.
    """
    answers: list[list[float]] = [[] for _ in range(max(units) + 1)]
    for unit, row in zip(units, rewards.reshape(len(units), -1).tolist(), strict=True):
        answers[unit] += (value for value in row if not math.isnan(value))
    # Exact sums: equal rewards in another order give the same mean to the last bit.
    per_prompt = [math.fsum(values) / len(values) if values else math.nan for values in answers]
    means = [value for value in per_prompt if not math.isnan(value)]
    if not means:
        return Score(mean=math.nan, se=math.nan, n=0)
    spread = means if len(answers) > 1 else answers[0]
    se = float(np.std(spread, ddof=1) / math.sqrt(len(spread))) if len(spread) > 1 else math.nan
    mean = math.fsum(means) / len(means)
    return Score(mean=mean, se=se, n=len(means), per_prompt=tuple(per_prompt))

"""Chooses the best agent of a finished run and compares it with the base."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evo_grpo.errors import RunFailedError
from evo_grpo.evolve.claims import TIE_LEVEL, claims
from evo_grpo.evolve.compare import compare
from evo_grpo.population.checkpoints.write import snapshot_agent
from evo_grpo.population.cohort.archive import add_spare_like, may_mix, mix_agents
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.cohort.state import AgentState
from evo_grpo.population.evaluate import Evaluation, evaluate, pass_at
from evo_grpo.record.family import best_ever, founder_of, leading_agent, playing_on
from evo_grpo.record.files import seal, sync_into, writing
from evo_grpo.record.leaderboard import write_csv
from evo_grpo.record.names import BEST, MEAN, SUMMARY
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.record.run_dir import RunDir
from evo_grpo.training.assemble import Prepared, spent_on_rewards
from evo_grpo.types import Member, Mutation, RewardScore, Score, Slot

PRECEDENCE = ("mean", "last", "archive")
"""Kinds of finalists in order; to win, each must be significantly better than the winner so far."""


@dataclass(frozen=True)
class Finalist:
    """A candidate for the best agent of a run.

    Attributes:
        kind: "last" (the best agent of the last round), "archive" (the best agent of the run) or
            "mean" (the mean of the adapters of two survivors that descend from one agent).
        slot: Slot that holds the candidate's weights.
        member: The member in that slot.
        agent: Slot of the agent in the rounds; None for a mean.
        fitness: Fitness in the last round, or the round that the archive is from; NaN for a mean.
        checkpoint: Path of the checkpoint in the run folder; a mean is saved there only if it wins.
    """

    kind: str
    slot: Slot
    member: Member
    agent: Slot | None
    fitness: float
    checkpoint: str | None


def finish(
    folder: RunDir | None,
    prepared: Prepared,
    rounds: Sequence[RoundRecord],
    start: float,
) -> dict[str, Any]:
    """Choose a run's best agent, compare it with the base, and write summary.json.

    Only the ranks that have the finalists evaluate them; all ranks return the summary. `start` is
    the time at which this process began the run, by `time.perf_counter`.
    """
    cohort, summary = prepared.cohort, None
    candidates = finalists(cohort, rounds)
    if cohort.is_local(candidates[0].slot):
        summary = _judged(folder, prepared, rounds, candidates, start)
    spent = spent_on_rewards(prepared.env, cohort.team, writes=folder is not None)
    if summary is not None and spent:
        summary["judge"] = spent
    if folder is not None and summary is not None:
        write_csv(folder.rounds(), folder.path, summary)
        folder.write(SUMMARY, seal(summary, indent=2))
    summary = cohort.team.first(summary)
    assert summary is not None, "the first rank has the finalists"
    return summary


def _judged(
    folder: RunDir | None,
    prepared: Prepared,
    rounds: Sequence[RoundRecord],
    candidates: Sequence[Finalist],
    start: float,
) -> dict[str, Any]:
    """Choose the best finalist, compare it with the base, and return what summary.json holds."""
    choice = choose(prepared, candidates)
    best, files = choice.best, dict[str, str]()
    if best.kind == "mean":
        snapshot = snapshot_agent(prepared.cohort, best.slot)
        if folder is not None:
            with writing(folder.path / MEAN):
                files = snapshot.write(folder.path / MEAN)
                sync_into(folder.path, folder.path / MEAN)
    summary = judge(prepared, rounds, best, time.perf_counter() - start)
    summary["candidates"] = candidates_summary(candidates, choice)
    summary["final_tokens"] = choice.tokens
    rules = dict(prepared.round_settings.population.stop)
    summary["stopped"] = {name: rules.get(name) for name in rounds[-1].stopped}
    summary["files"] = {f"{MEAN}/{name}": digest for name, digest in files.items()}
    return summary


def finalists(cohort: Cohort, rounds: Sequence[RoundRecord]) -> list[Finalist]:
    """Return the candidates for the best agent of a run; a mean of two agents is put in a new slot.

    With several objectives, the only candidate is the agent of the Pareto front with the greatest
    fitness, because a comparison by fitness could choose an agent that another agent dominates.

    Raises:
        RunFailedError: No agent of the last round has a fitness, and there is no archive.
    """
    final = rounds[-1]
    candidates: list[Finalist] = []
    leader = leading_agent(final)
    if leader is not None:
        candidates.append(_finalist("last", leader, cohort.agents[leader.agent], leader.checkpoint))
    best, archive = best_ever(rounds), cohort.archive
    if archive is not None and best is not None and best is not leader:
        candidates.append(_finalist("archive", best, archive, BEST))
    if not candidates:
        raise RunFailedError(
            f"round {final.round + 1}: expected an agent with a finite fitness to compare with "
            "the base, got none; lower the bounds of lr, then start the run anew"
        )
    several = best is not None and best.score is not None and bool(best.score.further)
    if several:
        candidates = candidates[-1:]
    pair = None if several else _relatives(cohort, rounds)
    # The first rank compares the finalists, and judges the best one.
    compared = [finalist.slot for finalist in candidates] + [record.agent for record in pair or ()]
    cohort.move(dict.fromkeys(compared, 0))
    if pair is not None:
        first, second = pair
        born, mutation = final.round + 1, Mutation("mean")
        slot = add_spare_like(cohort, first.agent)
        member = Member(cohort.next_member, slot, first.member, born, mutation, second.member)
        # Do not reserve the id: an extension of the run uses the same ids with or without a mean.
        cohort.agents[slot].member = member
        mix_agents(cohort, (first.agent, second.agent), slot)
        candidates.append(Finalist("mean", slot, member, None, math.nan, MEAN))
    return candidates


def _finalist(
    kind: str, record: AgentRecord, state: AgentState, checkpoint: str | None
) -> Finalist:
    fitness = math.nan if record.score is None else record.score.mean
    return Finalist(kind, state.slot, state.member, record.agent, fitness, checkpoint)


def _relatives(
    cohort: Cohort, rounds: Sequence[RoundRecord]
) -> tuple[AgentRecord, AgentRecord] | None:
    """Return the two best survivors that descend from one agent and whose mean can be taken."""
    staying = playing_on(rounds[-1])
    ranked = sorted(
        (
            a
            for a in rounds[-1].agents
            if a.agent in staying and a.score is not None and math.isfinite(a.score.mean)
        ),
        key=lambda a: (-a.score.mean if a.score else 0.0, a.agent),
    )
    for number, first in enumerate(ranked):
        for second in ranked[number + 1 :]:
            related = founder_of(rounds, first.member) == founder_of(rounds, second.member)
            if related and may_mix(cohort, first.agent, second.agent):
                return first, second
    return None


@dataclass(frozen=True)
class Choice:
    """The result of the final comparison.

    Attributes:
        best: The finalist that won.
        scores: Score of each finalist; None if the finalists were not evaluated.
        tokens: Number of tokens that the finalists generated for the comparison.
    """

    best: Finalist
    scores: Sequence[Score | None]
    tokens: int = 0


def choose(prepared: Prepared, candidates: Sequence[Finalist]) -> Choice:
    """Choose the best finalist by new completions of validation prompts.

    The first finalist is chosen without an evaluation if it is alone or `final_samples` is 0.
    """
    fitness = prepared.round_settings.evolve.fitness
    if len(candidates) == 1 or fitness.final_samples == 0:
        return Choice(candidates[0], [None] * len(candidates))
    results = evaluate(
        prepared.cohort,
        prepared.env,
        [candidate.slot for candidate in candidates],
        prepared.env.prompts("validation", fitness.prompts),
        samples=fitness.per_prompt(fitness.final_samples),
        temperature=fitness.temperature,
        reward=fitness.counted,
        stream=("final",),
    )
    scores = [result.score for result in results]
    tokens = sum(result.experience.tokens for result in results)
    level = prepared.round_settings.evolve.significance
    return Choice(candidates[best_finalist(candidates, scores, level)], scores, tokens)


def best_finalist(
    candidates: Sequence[Finalist], scores: Sequence[Score], level: float | None
) -> int:
    """Return the index of the winning finalist.

    The mean of two survivors wins unless another finalist is significantly better, because a mean
    is nearly always better, but by less than a validation score can show. The last round's best
    agent wins against the archive unless the archive is significantly better, because the archive
    has trained less and was selected as the maximum of many noisy evaluations. A difference is
    significant if its p-value is at most `level`. If `level` is None, the greatest mean score wins.
    """
    order = sorted(range(len(candidates)), key=lambda i: PRECEDENCE.index(candidates[i].kind))
    finite = [i for i in order if math.isfinite(scores[i].mean)] or order[:1]
    if level is None:
        return max(finite, key=lambda i: scores[i].mean)
    best = finite[0]
    for i in finite[1:]:
        if compare(scores[i], scores[best]).significant(level):
            best = i
    return best


def judge(
    prepared: Prepared, rounds: Sequence[RoundRecord], best: Finalist, seconds: float
) -> dict[str, Any]:
    """Compare the base with the best agent on the test split, which no selection has used.

    Returns:
        The content of summary.json, without the candidates. `gain` is the mean reward of the best
        agent minus that of the base. `gain_se` is the paired standard error of `gain`; NaN (null in
        the file) with fewer than two prompts. `passes` has pass@1 and pass@k if
        `evolve.fitness.correct` is set.
    """
    fitness = prepared.round_settings.evolve.fitness
    prompts = prepared.env.prompts("test", fitness.test_prompts)
    samples = fitness.per_prompt(fitness.test_samples)
    results = evaluate(
        prepared.cohort,
        prepared.env,
        [None, best.slot],
        prompts,
        samples=samples,
        temperature=fitness.temperature,
        reward=fitness.counted,
        stream=("test",),
    )
    base, tested = (result.score for result in results)
    ks = sorted({1, samples}) if fitness.correct is not None else []
    correct = fitness.correct or 0.0
    return {
        "split": "test",
        "base": _tested(base),
        "best": {
            **_tested(tested),
            "kind": best.kind,
            "agent": best.agent,
            "member": best.member.id,
            "parents": _parents(best.member),
            "fitness": best.fitness,
            "checkpoint": best.checkpoint,
        },
        "gain": tested.mean - base.mean,
        "gain_se": compare(tested, base).error,
        "passes": [_passes(k, correct, results) for k in ks],
        "rounds": len(rounds),
        "wall_seconds": seconds,
    }


def _tested(score: Score) -> Mapping[str, Any]:
    rewards = {reward.name: _score(reward) for reward in score.rewards}
    return {**_score(score), "per_prompt": score.per_prompt, "rewards": rewards}


def _passes(k: int, correct: float, results: Sequence[Evaluation]) -> dict[str, Any]:
    base, best = (pass_at(result.rewards, result.units, k, correct) for result in results)
    return {
        "k": k,
        "correct": correct,
        "base": _score(base),
        "best": _score(best),
        "gain": best.mean - base.mean,
        "gain_se": compare(best, base).error,
    }


def candidates_summary(candidates: Sequence[Finalist], choice: Choice) -> list[dict[str, Any]]:
    """Return the entries of the finalists in summary.json.

    `tie` is true for a finalist that is not significantly worse than the winner, at `TIE_LEVEL` for
    all tests together. It is None for the winner, and for all finalists if none was evaluated.
    """
    winner, scores = candidates.index(choice.best), [s for s in choice.scores if s is not None]
    signs = claims(scores, winner, TIE_LEVEL) if scores else [None] * len(candidates)
    return [
        {
            "kind": candidate.kind,
            "agent": candidate.agent,
            "member": candidate.member.id,
            "parents": _parents(candidate.member),
            "validation": None if score is None else _score(score),
            "tie": None if candidate is choice.best or sign is None else sign < 1,
        }
        for candidate, score, sign in zip(candidates, choice.scores, signs, strict=True)
    ]


def _parents(member: Member) -> list[int]:
    return [parent for parent in (member.parent, member.second_parent) if parent is not None]


def _score(score: Score | RewardScore) -> Mapping[str, float]:
    return {"mean": score.mean, "se": score.se, "n": score.n}

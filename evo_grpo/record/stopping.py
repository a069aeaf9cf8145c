"""Evaluates the rules of population.stop, which end a run before its last round."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from evo_grpo.evolve.intervals import interval
from evo_grpo.record.records import RoundRecord
from evo_grpo.settings.population import StopConfig
from evo_grpo.types import RewardScore, Score

_WORDS = {
    "fitness": "the fitness of an agent is surely {} or more",
    "rewards": "an agent surely reaches {}",
    "patience": "{} rounds in a row are no better than the best before them",
    "minutes": "{} minutes of training are over",
    "tokens": "{} tokens are sampled",
    "judge_cost": "the judges have cost {}",
    "no_signal": "{} rounds in a row had no group with different rewards to learn from",
}


@dataclass(frozen=True)
class RoundTotals:
    """The values of a round that the rules of population.stop read.

    `tokens` counts training and evaluation, `signal` says whether any agent had a group with
    different rewards, and `judge_cost` counts from the start of the run.
    """

    scores: Sequence[Score | None]
    tokens: int
    seconds: float
    signal: bool = True
    judge_cost: float = 0.0

    @classmethod
    def of(cls, record: RoundRecord) -> RoundTotals:
        """Return the values of a recorded round."""
        has_times = record.started is not None and record.ended is not None
        return cls(
            [agent.score for agent in record.agents],
            sum(agent.tokens for agent in record.agents) + record.evaluation_tokens,
            (record.ended or 0.0) - (record.started or 0.0) if has_times else 0.0,
            has_signal([agent.metrics for agent in record.agents]),
        )

    @property
    def best(self) -> float:
        """The greatest fitness, -inf if no agent has a fitness."""
        means = (score.mean for score in self.scores if score is not None)
        return max(filter(math.isfinite, means), default=-math.inf)


def has_signal(metrics: Sequence[Mapping[str, float]]) -> bool:
    """Return whether any agent had a group with different rewards, by the metrics of the agents."""
    return any(agent_metrics.get("zero_variance", 0.0) < 1 for agent_metrics in metrics)


def rules_that_hold(
    stop: StopConfig, past: Sequence[RoundRecord], last: RoundTotals
) -> tuple[str, ...]:
    """Return the rules that end a run after the round `last`; `past` are the rounds before it.

    A rule that had ended the run before an extension does not end it again.
    """
    lifted = {rule for record in past for rule in record.stopped}
    rounds = [*map(RoundTotals.of, past), last]
    return tuple(rule for rule in _holding(stop, rounds) if rule not in lifted)


def _holding(stop: StopConfig, rounds: Sequence[RoundTotals]) -> Iterator[str]:
    evaluated = [score for score in rounds[-1].scores if score is not None and not score.steps]
    if stop.fitness is not None and any(
        _lower_bound_reaches(score, stop.fitness) for score in evaluated
    ):
        yield "fitness"
    if stop.rewards and any(_reaches(score, stop.rewards) for score in evaluated):
        yield "rewards"
    if stop.patience is not None and _since_best(rounds) >= stop.patience:
        yield "patience"
    if stop.minutes is not None and sum(played.seconds for played in rounds) >= 60 * stop.minutes:
        yield "minutes"
    if stop.tokens is not None and sum(played.tokens for played in rounds) >= stop.tokens:
        yield "tokens"
    if stop.judge_cost is not None and rounds[-1].judge_cost >= stop.judge_cost:
        yield "judge_cost"
    if stop.no_signal is not None and _without_signal(rounds) >= stop.no_signal:
        yield "no_signal"


def _lower_bound_reaches(score: Score | RewardScore, least: float) -> bool:
    """Return whether the lower end of a score's 95% interval over prompts is at least `least`."""
    return interval(score.mean, score.se, score.n)[0] >= least


def _reaches(score: Score, least: Mapping[str, float]) -> bool:
    """Return whether the 95% interval of each reward begins at or above the reward's `least`."""
    scores = {reward_score.name: reward_score for reward_score in score.rewards}
    return all(
        name in scores and _lower_bound_reaches(scores[name], value)
        for name, value in least.items()
    )


def _without_signal(rounds: Sequence[RoundTotals]) -> int:
    """Return the number of latest rounds in a row in which no group had different rewards."""
    return next((n for n, played in enumerate(reversed(rounds)) if played.signal), len(rounds))


def _since_best(rounds: Sequence[RoundTotals]) -> int:
    """Return the number of rounds after the round with the greatest fitness."""
    best = max(range(len(rounds)), key=lambda number: (rounds[number].best, -number))
    return len(rounds) - 1 - best


def why_it_ended(summary: Mapping[str, Any]) -> str:
    """Return a clause that says which rules of population.stop ended a run; "" if none did."""
    rules: Mapping[str, Any] = summary.get("stopped", {})
    words = [_WORDS[name].format(_number(value)) for name, value in rules.items() if name in _WORDS]
    if not words:
        return ""
    return f"population.stop ended it after round {summary['rounds']}: {', and '.join(words)}"


def rules_in_words(stop: StopConfig) -> str:
    """Return the rules of population.stop that are set, in words; "" if none is set."""
    rules = {rule: n for rule in _WORDS if (n := getattr(stop, rule)) not in (None, {})}
    words = [_WORDS[rule].format(_number(n)) for rule, n in rules.items()]
    return ", or ".join(words) + (" (minutes are not repeatable)" if "minutes" in rules else "")


def _number(value: object) -> str:
    if isinstance(value, Mapping):
        rewards = cast("Mapping[str, object]", value).items()
        return " and ".join(f"{_number(least)} in {name}" for name, least in rewards)
    return f"{value:,.12g}" if isinstance(value, int | float) else "?"

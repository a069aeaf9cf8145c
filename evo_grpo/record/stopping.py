"""The rules of population.stop, which end a run before its last round."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evo_grpo.settings.population import StopConfig

if TYPE_CHECKING:
    from evo_grpo.record.records import RoundRecord
    from evo_grpo.types import Score


_WORDS = {
    "fitness": "the best fitness is {} or more",
    "patience": "{} rounds in a row are no better than the best before them",
    "minutes": "{} minutes of training are over",
    "tokens": "{} tokens are sampled",
    "no_signal": "{} rounds in a row had no group with different rewards to learn from",
}


@dataclass(frozen=True)
class Played:
    """The values of a round that the rules read.

    Attributes:
        best: The greatest fitness, -inf where no agent has one.
        tokens: Tokens sampled in training and evaluation.
        seconds: Wall time.
        signal: Whether any agent had a group to learn from.
    """

    best: float
    tokens: int
    seconds: float
    signal: bool = True

    @classmethod
    def of(cls, record: RoundRecord) -> Played:
        """Return the values of a recorded round."""
        known = record.started is not None and record.ended is not None
        return cls(
            best_of([agent.score for agent in record.agents]),
            sum(agent.tokens for agent in record.agents) + record.evaluation_tokens,
            (record.ended or 0.0) - (record.started or 0.0) if known else 0.0,
            has_signal([agent.metrics for agent in record.agents]),
        )


def has_signal(metrics: Sequence[Mapping[str, float]]) -> bool:
    """Return whether any agent had a group with different rewards; `metrics` are one per agent."""
    return any(one.get("zero_variance", 0.0) < 1 for one in metrics)


def best_of(scores: Sequence[Score | None]) -> float:
    """Return the greatest fitness of a round, -inf where no agent has one."""
    means = (score.mean for score in scores if score is not None)
    return max(filter(math.isfinite, means), default=-math.inf)


def rules_that_hold(stop: StopConfig, past: Sequence[RoundRecord], last: Played) -> tuple[str, ...]:
    """Return the rules that end a run after its last round; `past` are the rounds before it.

    A rule that ended the run before it was extended to more rounds does not end it again.
    """
    lifted = {rule for record in past for rule in record.stopped}
    rounds = [*map(Played.of, past), last]
    return tuple(rule for rule in _holding(stop, rounds) if rule not in lifted)


def _holding(stop: StopConfig, rounds: Sequence[Played]) -> Iterator[str]:
    if stop.fitness is not None and rounds[-1].best >= stop.fitness:
        yield "fitness"
    if stop.patience is not None and _since_best(rounds) >= stop.patience:
        yield "patience"
    if stop.minutes is not None and sum(one.seconds for one in rounds) >= 60 * stop.minutes:
        yield "minutes"
    if stop.tokens is not None and sum(one.tokens for one in rounds) >= stop.tokens:
        yield "tokens"
    if stop.no_signal is not None and _without_signal(rounds) >= stop.no_signal:
        yield "no_signal"


def _without_signal(rounds: Sequence[Played]) -> int:
    """Return the number of rounds since the last one with a group to learn from."""
    return next((n for n, one in enumerate(reversed(rounds)) if one.signal), len(rounds))


def _since_best(rounds: Sequence[Played]) -> int:
    """Return the number of rounds since the best one."""
    best = max(range(len(rounds)), key=lambda number: (rounds[number].best, -number))
    return len(rounds) - 1 - best


def why_it_ended(summary: Mapping[str, Any]) -> str:
    """Return the rules that ended a run, in words; an empty string where none did."""
    rules: Mapping[str, Any] = summary.get("stopped", {})
    words = [_WORDS[name].format(_number(value)) for name, value in rules.items() if name in _WORDS]
    if not words:
        return ""
    return f"population.stop ended it after round {summary['rounds']}: {', and '.join(words)}"


def rules_in_words(stop: StopConfig) -> str:
    """Return the rules that are set, in words; an empty string where none is."""
    given = {rule: n for rule in _WORDS if (n := getattr(stop, rule)) is not None}
    words = [_WORDS[rule].format(_number(n)) for rule, n in given.items()]
    return ", or ".join(words) + (" (minutes are not repeatable)" if "minutes" in given else "")


def _number(value: object) -> str:
    return f"{value:,.12g}" if isinstance(value, int | float) else "?"

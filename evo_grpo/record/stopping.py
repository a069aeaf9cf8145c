"""What ends the training of a run before its last round, from the records alone."""

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
}


@dataclass(frozen=True)
class Played:
    """What the rules read of a round; the best fitness is -inf where nobody has one."""

    best: float
    tokens: int
    seconds: float

    @classmethod
    def of(cls, record: RoundRecord) -> Played:
        """Return it for a recorded round."""
        known = record.started is not None and record.ended is not None
        return cls(
            best_of([agent.score for agent in record.agents]),
            sum(agent.tokens for agent in record.agents) + record.evaluation_tokens,
            (record.ended or 0.0) - (record.started or 0.0) if known else 0.0,
        )


def best_of(scores: Sequence[Score | None]) -> float:
    """Return the greatest fitness of a round, -inf where nobody has one."""
    means = (score.mean for score in scores if score is not None)
    return max(filter(math.isfinite, means), default=-math.inf)


def rules_that_hold(stop: StopConfig, past: Sequence[RoundRecord], last: Played) -> tuple[str, ...]:
    """Return the rules by which a run ends with a round, after the ones before it.

    One that had ended the run before it was given more rounds does not end it again.
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


def _since_best(rounds: Sequence[Played]) -> int:
    """Return how many rounds in a row have not been better than the best before them."""
    best = max(range(len(rounds)), key=lambda number: (rounds[number].best, -number))
    return len(rounds) - 1 - best


def why_it_ended(summary: Mapping[str, Any]) -> str:
    """Return by which rules a run ended, in words; an empty string where none ended it."""
    rules: Mapping[str, Any] = summary.get("stopped", {})
    said = [_WORDS[name].format(_number(value)) for name, value in rules.items() if name in _WORDS]
    if not said:
        return ""
    return f"population.stop ended it after round {summary['rounds']}: {', and '.join(said)}"


def rules_in_words(stop: StopConfig) -> str:
    """Return the rules that are set, in words; an empty string where there is none."""
    given = {rule: n for rule in _WORDS if (n := getattr(stop, rule)) is not None}
    words = [_WORDS[rule].format(_number(n)) for rule, n in given.items()]
    return ", or ".join(words) + (" (minutes are not repeatable)" if "minutes" in given else "")


def _number(value: object) -> str:
    return f"{value:,.12g}" if isinstance(value, int | float) else "?"

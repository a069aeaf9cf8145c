"""The speed of a run, and an estimate of its remaining time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from evo_grpo.record.records import RoundRecord
    from evo_grpo.types import Slot

RECENT = 3
"""The number of latest rounds whose mean time estimates the next: rounds may grow or shrink."""
BESIDE_LEARNING = 1.2
"""Time of the first round as a multiple of its training steps, until it has ended."""


@final
class Pace:
    """Estimates the time left from the progress that a run reports, without its test.

    Args:
        clock: Returns seconds.
        whole: Whether the stage "learn" covers the whole run with its test, as in a replay, and not
            the training steps of one round.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, whole: bool = False) -> None:
        self.clock, self.whole = clock, whole
        self.start(0, 0)

    def start(self, rounds: int, first_round: int) -> None:
        """Start a run, or continue it at the 0-based `first_round`."""
        self.rounds, self.done = (1, 0) if self.whole else (rounds, first_round)
        self.tokens_per_second: float | None = None
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._began = self.clock()
        self._first: float | None = None  # estimated seconds of the first round
        self._tokens = 0.0

    def stage(self, name: str, done: int, total: int) -> None:
        """Note the progress of a stage; see `Observer.stage`."""
        if name == "learn" and done:
            spent = self.clock() - self._began
            self._first = spent * total / done * (1 if self.whole else BESIDE_LEARNING)

    def step_done(self, metrics: Mapping[Slot, Mapping[str, float]]) -> None:
        """Note a step of all agents; see `Observer.step_done`."""
        spent = self.clock() - self._began
        self._tokens += sum(own.get("tokens", 0.0) for own in metrics.values())
        if not self._durations and spent > 0:
            self.tokens_per_second = self._tokens / spent

    def round_done(self, record: RoundRecord) -> None:
        """Note a finished round."""
        now = self.clock()
        self._durations.append(now - self._began)
        self._began, self.done = now, record.round + 1
        tokens = sum(agent.tokens for agent in record.agents) + record.evaluation_tokens
        seconds = sum(record.seconds.values())
        self.tokens_per_second = tokens / seconds if seconds else None

    def left(self) -> float | None:
        """Return the estimated remaining seconds; None before there is an estimate."""
        known = self._durations
        each = sum(known) / len(known) if known else self._first
        if self.done >= self.rounds or each is None:
            return None if each is None else 0.0
        # A round that takes longer than estimated adds nothing.
        spent = self.clock() - self._began
        return max(each - spent, 0.0) + each * (self.rounds - self.done - 1)

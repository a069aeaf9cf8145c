"""The speed of a run, and an estimate of its remaining time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Self, final

from evo_grpo.settings.algorithm import DEFAULT_PROMPTS
from evo_grpo.settings.evaluations import count_evaluations

if TYPE_CHECKING:
    from evo_grpo.record.records import RoundRecord
    from evo_grpo.settings import RunConfig
    from evo_grpo.types import Slot

RECENT = 3
"""The number of latest rounds whose mean time estimates the next: rounds may grow or shrink."""
BESIDE_LEARNING = 1.2
"""Time of a round as a multiple of its training steps, where its evaluation is not known."""
EVALUATED = 0.4
"""Time of a completion that is only sampled, as a share of one that is trained on, until it is
measured."""


class Completions(NamedTuple):
    """The completions of a run, or its episodes, at most.

    Attributes:
        round: Those that a round trains on.
        evaluations: Those of the evaluation after each round.
        end: Those of the final comparison and the test.
    """

    round: int
    evaluations: tuple[int, ...]
    end: int

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the completions that a run will sample."""
        population, algorithm, evolve = config.population, config.algorithm, config.evolve
        step = population.size * (algorithm.prompts_per_step or DEFAULT_PROMPTS)
        fitness, counts = evolve.fitness, count_evaluations(population, evolve)
        return cls(
            step * algorithm.group_size * population.steps_per_round,
            tuple(
                (whole * fitness.prompts + few * fitness.in_between) * fitness.samples
                for whole, few in zip(counts.whole, counts.between, strict=True)
            ),
            counts.finalists * fitness.prompts * fitness.final_samples
            + 2 * fitness.test_prompts * fitness.test_samples,
        )


@final
class Pace:
    """Estimates the time left from the progress that a run reports.

    Args:
        clock: Returns seconds.
        whole: Whether the stage "learn" covers the whole run with its test, as in a replay, and not
            the training steps of one round.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, whole: bool = False) -> None:
        self.clock, self.whole = clock, whole
        self.start(0, 0)

    def start(self, rounds: int, first_round: int, work: Completions | None = None) -> None:
        """Start a run, or continue it at the 0-based `first_round`.

        Without `work`, the time of the final comparison and test is left out.
        """
        self.rounds, self.done = (1, 0) if self.whole else (rounds, first_round)
        self.work = None if self.whole else work
        self.tokens_per_second: float | None = None
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._began = self.clock()
        self._expected: float | None = None
        self._training = 0.0  # seconds of a round without its evaluation, where that is known
        self._evaluated: float | None = None  # seconds of a completion that is only sampled
        self._tokens = self._rows = 0.0
        self._first: tuple[float, float] | None = None  # seconds and rows of the first step

    def stage(self, name: str, done: int, total: int) -> None:
        """Note the progress of a stage; see `Observer.stage`."""
        if name == "learn" and done and not self._rows:
            spent = self.clock() - self._began
            self._expected = spent * total / done * (1 if self.whole else BESIDE_LEARNING)

    def step_done(self, metrics: Mapping[Slot, Mapping[str, float]]) -> None:
        """Note a step of all agents; see `Observer.step_done`."""
        spent = self.clock() - self._began
        self._tokens += sum(own.get("tokens", 0.0) for own in metrics.values())
        if spent > 0 and not self._durations:
            self.tokens_per_second = self._tokens / spent
        if self.work is None or self._durations:  # `stage` reports how far the round is
            return
        self._rows += sum(own.get("rows", 0.0) for own in metrics.values())
        if not self._rows:
            return
        if self._first is None:
            self._first = spent, self._rows
        began, before = self._first
        # The first step of a run is slower than the others, so they count alone once there are any.
        more = self._rows - before
        each = (spent - began) / more if more else began / before
        training = spent + each * (self.work.round - self._rows)
        self._evaluated = EVALUATED * each
        self._expected = training + self._evaluated * self._evaluations(self.done)
        self._training = each * self.work.round

    def round_done(self, record: RoundRecord) -> None:
        """Note a finished round."""
        now = self.clock()
        evaluated = record.seconds.get("evaluate", 0.0)
        self._durations.append(now - self._began - (0.0 if self.work is None else evaluated))
        self._training = sum(self._durations) / len(self._durations)
        self._began, self._expected = now, None
        self._tokens = self._rows = 0.0
        self.done = record.round + 1
        tokens = sum(agent.tokens for agent in record.agents) + record.evaluation_tokens
        seconds = sum(record.seconds.values())
        self.tokens_per_second = tokens / seconds if seconds else None
        if self.work is not None and (rows := self._evaluations(record.round)):
            self._evaluated = evaluated / rows

    def left(self) -> float | None:
        """Return the estimated remaining seconds; None before there is an estimate."""
        rounds, spent = self.rounds - self.done, self.clock() - self._began
        if rounds <= 0:
            return max(self._end() - spent, 0.0)
        if self._durations:
            each = self._round(self.done)
        elif self._expected is not None:
            each = self._expected
        else:
            return None
        # A round that takes longer than estimated adds nothing.
        return self._later(each) + max(each - spent, 0.0) + self._end()

    def _later(self, each: float) -> float:
        """Return the seconds of the rounds after the present one, which takes `each` seconds."""
        if self.work is None or self._evaluated is None:
            return (self.rounds - self.done - 1) * each
        return sum(map(self._round, range(self.done + 1, self.rounds)))

    def _round(self, round: int) -> float:
        """Return the seconds of a round: its training, and its evaluation where that is known."""
        if self.work is None or self._evaluated is None:
            return self._training
        return self._training + self._evaluated * self._evaluations(round)

    def _end(self) -> float:
        """Return the seconds of the final comparison and the test."""
        if self.work is None or self._evaluated is None:
            return 0.0
        return self._evaluated * self.work.end

    def _evaluations(self, round: int) -> int:
        assert self.work is not None
        return self.work.evaluations[min(round, len(self.work.evaluations) - 1)]

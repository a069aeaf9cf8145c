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
    from evo_grpo.settings import AlgorithmConfig, EvolveConfig, PopulationConfig
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
    def of(
        cls, population: PopulationConfig, algorithm: AlgorithmConfig, evolve: EvolveConfig
    ) -> Self:
        """Return the completions that a run will sample."""
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


NO_WORK = Completions(0, (0,), 0)


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
        self.work = NO_WORK if self.whole or work is None else work
        self.tokens_per_second: float | None = None
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._began = self.clock()
        self._present: float | None = None  # seconds of the first round
        self._training = 0.0  # seconds of a round without its evaluation, where that is known
        self._evaluated = 0.0  # seconds of a completion that is only sampled
        self._tokens = self._rows = 0.0
        self._first = (0.0, 0.0)  # seconds and rows of the first step

    def stage(self, name: str, done: int, total: int) -> None:
        """Note the progress of a stage; see `Observer.stage`."""
        if name == "learn" and done and not self._rows and not self._durations:
            spent = self.clock() - self._began
            self._present = spent * total / done * (1 if self.whole else BESIDE_LEARNING)
            self._training = self._present

    def step_done(self, metrics: Mapping[Slot, Mapping[str, float]]) -> None:
        """Note a step of all agents; see `Observer.step_done`."""
        if self._durations:
            return
        spent = self.clock() - self._began
        self._tokens += sum(own.get("tokens", 0.0) for own in metrics.values())
        if spent > 0:
            self.tokens_per_second = self._tokens / spent
        if self.work.round:  # otherwise `stage` reports how far the round is
            self._rows += sum(own.get("rows", 0.0) for own in metrics.values())
        if not self._rows:
            return
        if not self._first[1]:
            self._first = spent, self._rows
        # The first step of a run is slower than the others, so they count alone once there are any.
        began, before = self._first
        more = self._rows - before
        each = (spent - began) / more if more else began / before
        self._training, self._evaluated = each * self.work.round, EVALUATED * each
        self._present = spent - each * self._rows + self._round(self.done)

    def round_done(self, record: RoundRecord) -> None:
        """Note a finished round."""
        now, evaluated = self.clock(), record.seconds.get("evaluate", 0.0)
        self._durations.append(now - self._began - (evaluated if self.work.round else 0.0))
        self._training = sum(self._durations) / len(self._durations)
        self._began, self._present, self.done = now, None, record.round + 1
        tokens = sum(agent.tokens for agent in record.agents) + record.evaluation_tokens
        seconds = sum(record.seconds.values())
        self.tokens_per_second = tokens / seconds if seconds else None
        if rows := self._evaluations(record.round):
            self._evaluated = evaluated / rows

    def left(self) -> float | None:
        """Return the estimated remaining seconds; None before there is an estimate."""
        spent, end = self.clock() - self._began, self._evaluated * self.work.end
        if self.done >= self.rounds:
            return max(end - spent, 0.0)
        if self._present is None and not self._durations:
            return None
        each = self._round(self.done) if self._present is None else self._present
        later = sum(map(self._round, range(self.done + 1, self.rounds)))
        # A round that takes longer than estimated adds nothing.
        return max(each - spent, 0.0) + later + end

    def _round(self, round: int) -> float:
        """Return the seconds of a round: its training and its evaluation."""
        return self._training + self._evaluated * self._evaluations(round)

    def _evaluations(self, round: int) -> int:
        return self.work.evaluations[min(round, len(self.work.evaluations) - 1)]

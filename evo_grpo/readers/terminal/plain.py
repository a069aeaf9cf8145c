"""Progress as plain lines, for logs, pipes and terminals that cannot redraw."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import final

from rich.console import Console

from evo_grpo.readers.terminal.console import say
from evo_grpo.readers.terminal.formatting import (
    clock,
    direction,
    evolution,
    round_line,
    shown_names,
)
from evo_grpo.readers.terminal.pace import Completions, Pace
from evo_grpo.record import columns
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.record.wording import hyperparameter, number
from evo_grpo.schema.shown import short_name
from evo_grpo.types import Slot

LONG = 60.0
"""Seconds left after the first step from which on they are printed."""
SECONDS_BETWEEN_LINES = 30.0
"""Seconds between the lines of a long round, which show in a log that the run is alive."""


@final
class PlainLines:
    """Prints a block of lines after every round."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.rounds = 0
        self.names: list[str] = []
        self.pace = Pace()
        self.estimated = False  # whether the time left was printed before the first round's end
        self.last_line = time.monotonic()

    def start(
        self,
        title: str,
        rounds: int,
        first_round: int,
        hyperparameters: Sequence[str],
        work: Completions | None = None,
    ) -> None:
        """Print the title; `LiveTable.start` has the arguments."""
        self.rounds = rounds
        self.names = shown_names(hyperparameters)
        self.pace.start(rounds, first_round, work)
        self.estimated = False
        self._line(title)

    def stage(self, round: int, name: str, done: int, total: int) -> None:
        """Print a line if the last one is older than `SECONDS_BETWEEN_LINES`; see `Observer`."""
        self.pace.stage(name, done, total)
        if time.monotonic() - self.last_line >= SECONDS_BETWEEN_LINES:
            self._line(f"  round {round + 1}/{self.rounds}: {name} {done}/{total}{self._eta()}")

    def step_done(self, round: int, step: int, metrics: Mapping[Slot, Mapping[str, float]]) -> None:
        """Print the speed and the time left of a long run after its first step."""
        self.pace.step_done(metrics)
        left, speed = self.pace.left(), self.pace.tokens_per_second
        if not self.estimated and left is not None and left >= LONG and speed is not None:
            where = f"  round {round + 1}/{self.rounds}: step {step + 1}"
            self._line(f"{where}  {speed:,.0f} tok/s{self._eta()}")
        self.estimated = True

    def round_done(self, record: RoundRecord) -> None:
        """Print the round, its agents, the decisions about them, and the mutations."""
        self.pace.round_done(record)
        line, speed = round_line(record, self.rounds), self.pace.tokens_per_second
        if speed is not None:
            line += f"  {speed:,.0f} tok/s"
        self._line(line + self._eta())
        for agent in record.agents:
            self._line("  " + self._agent(agent))
        for decision in record.decisions:
            self._line(f"  {decision.sentence}")
        if changes := evolution(record):
            self._line("  " + "  ".join(f"{name} {text}" for name, text in changes.items()))

    def close(self) -> None:
        """Do nothing: every line is printed already."""

    def _eta(self) -> str:
        """Return the estimated remaining time, an empty string where it is unknown or 0."""
        left = self.pace.left()
        return f"  ETA {clock(left)}" if left else ""

    def _agent(self, agent: AgentRecord) -> str:
        score = agent.score
        measured = agent.metrics
        if score is not None and score.steps:  # its fitness is the reward of its training
            fitness = "-"
        else:
            fitness = "failed" if score is None else f"{number(score.mean)} ± {number(score.se)}"
        goals = () if score is None else score.further
        parts = [
            f"agent {agent.agent:<2} fitness {fitness:<13}",
            *(f"{one.name} {number(one.mean)} ± {number(one.se)}" for one in goals),
            f"reward {number(measured.get('reward'))}",
            f"kl {number(columns.kl(agent), 4)}",
            f"zero-var {number(measured.get('zero_variance'), 2)}",
        ]
        for name in self.names:
            moved = direction(agent.mutation.changes, name)
            parts.append(
                f"{short_name(name)} {hyperparameter(agent.hparams, name)}"
                + (f" ({moved})" if moved else "")
            )
        if agent.reason:
            parts.append(agent.reason)
        return "  ".join(parts)

    def _line(self, text: str) -> None:
        say(self.console, text, wrap=True)
        self.last_line = time.monotonic()

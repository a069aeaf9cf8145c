"""Progress as plain lines, for logs, pipes and terminals that cannot redraw."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from rich.console import Console

from evo_grpo.cli.terminal.text import (
    TITLES,
    direction,
    evolution_line,
    number,
    round_line,
    shown_names,
    value_of,
)
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.settings import RunConfig

SECONDS_BETWEEN_STAGES = 30.0
"""A round may take minutes: now and then a line says that it goes on. Short rounds print none."""


@final
class PlainLines:
    """Prints a block of lines after every round.

    Args:
        console: Where to.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.rounds = 0
        self.names: list[str] = []
        self.spoke = time.monotonic()

    def started(
        self, run_dir: Path | None, rounds: int, first_round: int, settings: object
    ) -> None:
        """Print what begins, or goes on; see `Observer`."""
        self.rounds = rounds
        self.names = shown_names(settings)
        self._line(heading(settings, run_dir, first_round))

    def stage(self, round: int, name: str, done: int, total: int) -> None:
        """Print a line when there has been none for a while; see `Observer`."""
        if time.monotonic() - self.spoke >= SECONDS_BETWEEN_STAGES:
            self._line(f"  round {round + 1}/{self.rounds}: {name} {done}/{total}")

    def round_done(self, record: RoundRecord) -> None:
        """Print the round, its agents, and what selection and mutation made of them."""
        self._line(round_line(record, self.rounds))
        for agent in record.agents:
            self._line("  " + self._agent(agent))
        if evolution := evolution_line(record):
            self._line("  " + evolution)

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Print nothing: the command prints the result."""

    def close(self) -> None:
        """Do nothing: every line is out."""

    def _agent(self, agent: AgentRecord) -> str:
        score = agent.score
        fitness = "failed" if score is None else f"{number(score.mean)} +- {number(score.se)}"
        parts = [f"agent {agent.agent:<2} fitness {fitness:<14}"]
        for name, key, digits in (
            ("reward", "reward", 3),
            ("kl", "kl", 4),
            ("zero-var", "zero_variance", 2),
        ):
            parts.append(f"{name} {number(agent.metrics.get(key), digits)}")
        for name in self.names:
            moved = direction(agent.mutation.changes, name)
            parts.append(
                f"{TITLES.get(name, name)} {value_of(agent.hparams, name)}"
                + (f" ({moved})" if moved else "")
            )
        if agent.reason:
            parts.append(agent.reason)
        return "  ".join(parts)

    def _line(self, text: str) -> None:
        # Not wrapped: a log is searched line by line.
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self.spoke = time.monotonic()


def heading(config: object, run_dir: Path | None, first_round: int) -> str:
    """Return the first line of a run; it says more of one from a configuration."""
    if not isinstance(config, RunConfig):
        return str(run_dir or "training")
    population = config.population
    start = f", going on after round {first_round}" if first_round else ""
    return (
        f"{run_dir}: {config.model.name} on {config.env.kind}, {population.size} agents, "
        f"{population.rounds} rounds of {population.steps_per_round} steps{start}"
    )

"""Whole rounds of the default run, timed by phase; `round` and `evolve` report them."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from common import ROOT

from evo_grpo import settings as configuration
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.round import Round, next_slots, play_round
from evo_grpo.population.steps import RunWriter
from evo_grpo.record.observer import Observer
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.run_dir import RunDir
from evo_grpo.training.assemble import prepare
from evo_grpo.training.writer import FolderWriter
from evo_grpo.types import Slot

DEFAULT = ROOT / "evo_grpo" / "settings" / "templates" / "sums" / "population.yaml"


class TimedWriter(RunWriter):
    """Measures how long the training thread waits for what is written.

    Args:
        writer: Writes it.
    """

    def __init__(self, writer: RunWriter) -> None:
        """Start at zero."""
        self.writer = writer
        self.seconds = {"checkpoint": 0.0, "commit": 0.0}

    def checkpoint(self, cohort: Cohort, round: int, slot: Slot) -> str | None:
        """Save one agent, timed."""
        start = time.perf_counter()
        saved = self.writer.checkpoint(cohort, round, slot)
        self.seconds["checkpoint"] += time.perf_counter() - start
        return saved

    def step(self, round: int, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows of a step, timed."""
        start = time.perf_counter()
        self.writer.step(round, step, rows)
        self.seconds["commit"] += time.perf_counter() - start

    def commit(self, record: RoundRecord, completions: Sequence[Mapping[str, Any]]) -> None:
        """Write the round, timed."""
        start = time.perf_counter()
        self.writer.commit(record, completions)
        self.seconds["commit"] += time.perf_counter() - start


def play(
    folder: Path,
    rounds: int,
    overrides: Sequence[str] = (),
    around: Callable[[int], AbstractContextManager[object]] = nullcontext,
) -> list[dict[str, float]]:
    """Play rounds of the default run.

    Args:
        folder: An empty folder for the run.
        rounds: Rounds that are reported; one more is played first, to warm up.
        overrides: Other settings, as for `evo-grpo run --set`.
        around: Makes a context in which a round is played, by the number of the round.

    Returns:
        One line per round: seconds per phase, `checkpoint` and `commit` as the training thread
        waits for them, and the whole round.
    """
    # All agents to the end: a round of 8 is what is timed.
    settings = [*overrides, f"population.rounds={rounds + 2}", "population.sizes=constant"]
    config = configuration.load(DEFAULT, settings)
    prepared = prepare(config)
    lines: list[dict[str, float]] = []
    text = configuration.to_yaml(config)
    with (
        RunDir.create(folder / "run", config.name, text, force=False) as run,
        FolderWriter(run, keep="all") as folder_writer,
    ):
        writer = TimedWriter(folder_writer)
        slots = prepared.slots
        for number in range(rounds + 1):
            writer.seconds = dict.fromkeys(writer.seconds, 0.0)
            start = time.perf_counter()
            with around(number):
                parts = prepared.cohort, prepared.env, prepared.round_settings, slots
                record = play_round(Round(*parts, number, writer, Observer()))
            slots = next_slots(record)
            whole = time.perf_counter() - start
            lines.append({"round": number, **record.seconds, **writer.seconds, "whole": whole})
    return lines[1:]

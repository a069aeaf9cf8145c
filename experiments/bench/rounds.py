"""Whole rounds of the default run, timed by phase; `round` and `evolve` report them."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import ROOT

from evo_grpo import settings as configuration
from evo_grpo.assemble import prepare
from evo_grpo.cohort.cohort import Cohort
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.observer import Silent
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.run_dir import RunDir
from evo_grpo.round import play_round
from evo_grpo.run_writer import FolderKeeper
from evo_grpo.types import Slot

DEFAULT = ROOT / "evo_grpo" / "config" / "population.yaml"


class TimedKeeper(FolderKeeper):
    """Counts how long the training thread waits for what is written."""

    def __init__(self, folder: RunDir, lineage: Lineage | None) -> None:
        """Start at zero."""
        super().__init__(folder, lineage, keep_last=False)
        self.seconds = {"checkpoint": 0.0, "commit": 0.0}

    def checkpoint(self, cohort: Cohort, round: int, slot: Slot) -> tuple[str | None, str | None]:
        """Save one agent, timed."""
        start = time.perf_counter()
        done = super().checkpoint(cohort, round, slot)
        self.seconds["checkpoint"] += time.perf_counter() - start
        return done

    def commit(self, record: RoundRecord, completions: Sequence[Mapping[str, Any]]) -> None:
        """Write the round, timed."""
        start = time.perf_counter()
        super().commit(record, completions)
        self.seconds["commit"] += time.perf_counter() - start


def play(folder: Path, rounds: int, overrides: Sequence[str] = ()) -> list[dict[str, float]]:
    """Play rounds of the default run.

    Args:
        folder: An empty folder for the run.
        rounds: Rounds that are reported; one more is played first, to warm up.
        overrides: Other settings, as for `evo-grpo run --set`.

    Returns:
        One line per round: seconds per phase, `checkpoint` and `commit` as the training thread
        waits for them, and the whole round.
    """
    settings = [*overrides, f"population.rounds={rounds + 2}"]
    config = configuration.load(DEFAULT, settings)
    prepared = prepare(config)
    lines: list[dict[str, float]] = []
    text = configuration.to_yaml(config)
    with RunDir.create(folder / "run", config.name, text, force=False) as run:
        lineage = Lineage(run.journal, config.name, config.evolve.hp_config())
        with TimedKeeper(run, lineage) as keeper:
            for number in range(rounds + 1):
                keeper.seconds = dict.fromkeys(keeper.seconds, 0.0)
                start = time.perf_counter()
                record = play_round(
                    prepared.cohort,
                    prepared.env,
                    prepared.round_settings,
                    prepared.slots,
                    number,
                    keeper=keeper,
                    observer=Silent(),
                )
                whole = time.perf_counter() - start
                lines.append({"round": number, **record.seconds, **keeper.seconds, "whole": whole})
    return lines[1:]

"""What a run tells whoever watches it: the loop calls, and no observer changes a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, final

from evo_grpo.record.records import RoundRecord
from evo_grpo.settings import RunConfig


class Observer(Protocol):
    """Follows a run. All rounds are 0-based, as in the records."""

    def started(self, run_dir: Path, rounds: int, first_round: int, settings: RunConfig) -> None:
        """Say that a run begins, or goes on.

        Args:
            run_dir: Where it writes.
            rounds: Rounds of the whole run.
            first_round: The round it begins with; after a stop, the one after the last finished.
            settings: The resolved configuration.
        """
        ...

    def stage(self, round: int, name: str, done: int, total: int) -> None:
        """Say how far a round is.

        Args:
            round: The round.
            name: generate, reward, learn, evaluate, evolve, checkpoint or test.
            done: Parts of the stage that are done, in [0, total].
            total: Parts of the stage, >= 1.
        """
        ...

    def round_done(self, record: RoundRecord) -> None:
        """Say that a round is finished and on disk."""
        ...

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Say that the run is finished; the summary is what summary.json holds."""
        ...


@final
class Silent:
    """An observer that says nothing."""

    def started(self, run_dir: Path, rounds: int, first_round: int, settings: RunConfig) -> None:
        """Do nothing."""

    def stage(self, round: int, name: str, done: int, total: int) -> None:
        """Do nothing."""

    def round_done(self, record: RoundRecord) -> None:
        """Do nothing."""

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Do nothing."""

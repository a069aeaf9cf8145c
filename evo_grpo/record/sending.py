"""The trials of a run for a database outside of its folder, from what is recorded.

rounds.jsonl and summary.json are the truth; a database gets from there what it lacks. So nothing is
lost where it is gone for a while, and nothing is there twice: each trial is added at most once (see
`database.NumberedStorage`), and after every failure is read what is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

from evo_grpo.record.folder import parse_rounds
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.names import ROUNDS
from evo_grpo.record.study import RunStudy
from evo_grpo.record.summary import read_summary
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.types import Member, Mutation, Score, Slot

if TYPE_CHECKING:
    from evo_grpo.record.database import DatabaseStudy
    from evo_grpo.record.records import RoundRecord


@final
class Sender:
    """Adds to the study of a run what is recorded and not there yet.

    Args:
        folder: The run folder, which is only read.
        url: The database.
        study: The study of the run.
        hp_config: The hyperparameters that mutate and their bounds.

    Attributes:
        study: The study; another one once that of the run turned out to be a copy's.
        rounds: Rounds whose trials are there.
        notes: What a person should hear of it, to be taken out.
    """

    def __init__(
        self, folder: Path, url: str, study: RunStudy, hp_config: HyperparameterConfig
    ) -> None:
        self.url = url
        self.study = study
        self.rounds = 0
        self._added = 0
        self._folder = folder
        self._hp_config = hp_config
        self.notes: list[str] = []
        self._sent = 0
        self._compared = 0
        self._last: RoundRecord | None = None
        self._open: tuple[DatabaseStudy, Lineage] | None = None

    @property
    def added(self) -> int:
        """Trials that were added."""
        opened = self._open  # which the thread that sends may close at any time
        return self._added + (0 if opened is None else opened[1].added)

    def __enter__(self) -> Self:
        """Return the sender."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the database."""
        self.close()

    def send(self, end: int, *, go_on: Callable[[], bool] = lambda: True) -> bool:
        """Add the trials of all rounds up to a byte of rounds.jsonl; then of the mean, if one won.

        Args:
            end: The length of the finished rounds.
            go_on: Asked before each round.

        Returns:
            Whether all are there; False where `go_on` said no.

        Raises:
            Unreachable: The database is gone or refuses; to be sent again later, after `close`.
            EngineUnavailable: Its driver is not installed.
        """
        lineage = self._lineage(end)
        records, length = parse_rounds(
            self._folder / ROUNDS, start=self._sent, first=self.rounds, end=end
        )
        for record in records:
            if not go_on():
                return False
            if not self._record(lineage, record):
                self._leave_study()
                return self.send(end, go_on=go_on)
            self.rounds, self._last = record.round + 1, record
        self._sent += length
        self._record_mean(lineage)
        return True

    def close(self) -> None:
        """Close the database; the next `send` looks anew what is there."""
        opened, self._open, self._last = self._open, None, None
        self.rounds = self._sent = 0
        if opened is not None:
            study, lineage = opened
            self._added += lineage.added
            study.close()

    def _lineage(self, end: int) -> Lineage:
        from evo_grpo.record.database import open_url  # with Optuna, which takes a second

        if self._open is None:
            study = open_url(self.url, self.study.name, self.study.attributes)
            self._open = study, Lineage(study, hp_config=self._hp_config)
            rounds, _ = parse_rounds(self._folder / ROUNDS, end=end)
            if self._open[1].contradicts(rounds):
                self._leave_study()
                return self._lineage(end)
            self._compared = len(rounds)
        return self._open[1]

    def _record(self, lineage: Lineage, record: RoundRecord) -> bool:
        """Add the trials of a round; returns False where the study has others of that round."""
        # Looked at before, so that no trial of this run comes among those of another, and after,
        # where the other was faster.
        missing, added = lineage.missing(record), lineage.added
        known = record.round < self._compared or missing == len(record.agents)
        if not known and lineage.contradicts([record]):
            return False
        lineage.record(record)
        return lineage.added - added == missing or not lineage.contradicts([record])

    def _record_mean(self, lineage: Lineage) -> None:
        """Add the trial of the mean of two survivors, where that is what the run ended with."""
        last = self._last
        summary = None if last is None else read_summary(self._folder)
        if last is None or summary is None or summary["rounds"] != self.rounds:
            return
        if (found := _mean_of(summary, last)) is not None:
            member, score = found
            lineage.record_mean(member, last, score)

    def _leave_study(self) -> None:
        """Begin another study: a copy of the run has gone on otherwise in that of its id."""
        left = self.study
        self.close()
        self.study = replace(left, id=left.new_id())
        self.notes.append(
            f"record.storage: study {left.name} has other trials than this run has recorded: a "
            f"copy of its folder went on there. Its own study is {self.study.name} from now on"
        )


def _mean_of(summary: Mapping[str, Any], last: RoundRecord) -> tuple[Member, Score] | None:
    """Return the mean of two survivors that a run ended with, and its score on validation."""
    best = summary["best"]
    scores = [one["validation"] for one in summary["candidates"] if one["kind"] == "mean"]
    if best["kind"] != "mean" or not scores or scores[0] is None:
        return None
    first, second = best["parents"]
    mean, error = (
        math.nan if scores[0][name] is None else scores[0][name] for name in ("mean", "se")
    )
    # It never had a slot that anybody could ask for.
    member = Member(best["member"], Slot(-1), first, last.round + 1, Mutation("mean"), second)
    return member, Score(mean, error, scores[0]["n"])

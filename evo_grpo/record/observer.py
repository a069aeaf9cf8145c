"""Follow a run: subclass `Observer` and override the methods that matter."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from evo_grpo.errors import ConfigError
from evo_grpo.schema.validation import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from evo_grpo.record.records import RoundRecord
    from evo_grpo.types import Slot


class Observer:
    """Follows a run; every method does nothing until a subclass overrides it.

    The training thread calls the methods and waits for them. An observer cannot change a run; an
    exception that it raises ends the run, which can be resumed. Rounds are 0-based, as in the
    records.

    For example:

        class Printer(Observer):
            def round_done(self, record):
                print(record.round, max(a.score.mean for a in record.agents if a.score))
    """

    def started(
        self, run_dir: Path | None, rounds: int, first_round: int, settings: object
    ) -> None:
        """A run begins, or goes on.

        Args:
            run_dir: The run folder, None where nothing is written.
            rounds: Rounds of the whole run, those before a resume too.
            first_round: The round it begins with; after a stop, the one after the last finished.
            settings: The `RunConfig` of a run from a configuration, None where nothing is written.
        """

    def stage(self, round: int, name: str, done: int, total: int) -> None:
        """A round has come to a stage.

        Args:
            round: The round.
            name: learn, evaluate, or test.
            done: Finished parts of the stage, in [0, total].
            total: Parts of the stage, >= 1.
        """

    def step_done(self, round: int, step: int, metrics: Mapping[Slot, Mapping[str, float]]) -> None:
        """All agents have taken a GRPO step.

        In a run of several processes the first one hears of the steps of a round at its end, when
        the others have told of theirs.

        Args:
            round: The round.
            step: The step in the round, 0-based.
            metrics: What it measured, by slot; names and units as `evo_grpo.record.vocabulary`
                has them, NaN where there was nothing to measure. Not to be changed.
        """

    def round_done(self, record: RoundRecord) -> None:
        """A round is over; its files may still be on their way to disk.

        Args:
            record: The round as rounds.jsonl holds it, without `files`: they are being written.
        """

    def note(self, text: str) -> None:
        """Something happened that belongs to no round: the run is paused, a request is refused.

        Args:
            text: A sentence.
        """

    def finished(self, summary: Mapping[str, Any]) -> None:
        """The run is finished.

        Args:
            summary: What summary.json holds.
        """


_METHODS = tuple(name for name in vars(Observer) if not name.startswith("_"))


def check_observer(observer: object) -> None:
    """Refuse what cannot follow a run, before the run begins.

    Raises:
        ConfigError: It lacks a method of `Observer`.
    """
    missing = [name for name in _METHODS if not callable(getattr(observer, name, None))]
    if missing:
        raise ConfigError(
            f"observer: expected an evo_grpo.Observer, got {shown(observer)} without "
            f"{', '.join(missing)}; subclass evo_grpo.Observer and override what you need"
        )


class Several(Observer):
    """Passes each call on to several observers, in their order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        for name in _METHODS:
            setattr(self, name, partial(_call, [getattr(one, name) for one in observers]))


def _call(methods: Sequence[Callable[..., None]], *values: object, **named: object) -> None:
    for method in methods:
        method(*values, **named)

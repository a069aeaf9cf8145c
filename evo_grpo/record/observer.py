"""The base class of observers, which are called while a run trains."""

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
    """Base class of observers of a run. All methods do nothing; override those you need.

    The methods run in the training thread, so training waits for them. An observer cannot change a
    run; an exception that it raises ends the run, which can be resumed. Rounds are 0-based, as in
    the records.

    For example:

        class Printer(Observer):
            def round_done(self, record):
                print(record.round, max(a.score.mean for a in record.agents if a.score))
    """

    def started(
        self, run_dir: Path | None, rounds: int, first_round: int, settings: object
    ) -> None:
        """Called when a run starts or continues.

        Args:
            run_dir: The run folder, None if nothing is written.
            rounds: Rounds of the whole run, including those before a resume.
            first_round: The first round to be played; after a resume, the round after the last
                finished one.
            settings: The `RunConfig` of the run, None if nothing is written.
        """

    def stage(self, round: int, name: str, done: int, total: int) -> None:
        """Called when a stage of a round starts or advances: `done` of `total` parts are finished.

        `name` is "learn", "evaluate" or "test".
        """

    def step_done(self, round: int, step: int, metrics: Mapping[Slot, Mapping[str, float]]) -> None:
        """Called after all agents took a GRPO step.

        In a run of several processes, the calls for the steps of a round come at its end, after
        the processes have exchanged their metrics.

        Args:
            round: The round.
            step: The step in the round, 0-based.
            metrics: Metrics by slot and name, with the names and units of
                `evo_grpo.record.vocabulary`; NaN if there was nothing to measure. Do not modify.
        """

    def round_done(self, record: RoundRecord) -> None:
        """Called when a round has ended; `record.files` is empty: files may not be written yet."""

    def note(self, text: str) -> None:
        """Called for events outside of rounds, such as a pause; `text` is a sentence."""

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Called when the run has finished; `summary` is the content of summary.json."""


_METHODS = tuple(name for name in vars(Observer) if not name.startswith("_"))


def check_observer(observer: object) -> None:
    """Raise ConfigError if an object lacks a method of `Observer`; called before a run begins."""
    missing = [name for name in _METHODS if not callable(getattr(observer, name, None))]
    if missing:
        raise ConfigError(
            f"observer: expected an evo_grpo.Observer, got {shown(observer)} without "
            f"{', '.join(missing)}; subclass evo_grpo.Observer and override what you need"
        )


class ObserverList(Observer):
    """An observer that passes each call on to several observers, in their order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        for name in _METHODS:
            setattr(self, name, partial(_call, [getattr(observer, name) for observer in observers]))


def _call(methods: Sequence[Callable[..., None]], *values: object, **named: object) -> None:
    for method in methods:
        method(*values, **named)

"""What a run folder says of its run: settings, what it was made of, finished rounds, its end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evo_grpo import settings as configuration
from evo_grpo.inputs import (
    ROUNDS as PLANNED,
)
from evo_grpo.inputs import (
    Inputs,
    changed_settings,
    check_whole,
    inputs_of,
    may_change,
    read_inputs_of,
)
from evo_grpo.record.folder import parse_rounds
from evo_grpo.record.names import (
    CONFIG,
    INPUTS,
    LEADERBOARD,
    RECORDED_IN_PYTHON,
    ROUNDS,
    SUMMARY,
)
from evo_grpo.record.plain import is_plain, read_plain
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.retention import Retention
from evo_grpo.record.summary import read_summary
from evo_grpo.settings import RunConfig
from evo_grpo.verifying.findings import Findings

_RETENTION = "record.checkpoints"


@dataclass(frozen=True)
class Records:
    """What a run folder says of its run.

    Attributes:
        folder: The run folder.
        config: The settings in force: those of population.yaml, but what inputs.json has of
            `record`, which may have been changed for a resume that is yet to come.
        inputs: What the run was made of; None where it was stopped before it recorded that.
        rounds: The finished rounds, first to last.
        summary: How the run ended, None before.
        finished: Whether there is an end, be it a damaged one: a plain resume changes nothing then.
        leaderboard: What leaderboard.csv held before the rounds were read.
    """

    folder: Path
    config: RunConfig
    inputs: Inputs | None
    rounds: Sequence[RoundRecord]
    summary: Mapping[str, Any] | None
    finished: bool
    leaderboard: bytes | None

    @property
    def planned(self) -> int:
        """Rounds that the run is to have."""
        recorded = 0 if self.inputs is None else self.inputs.settings[PLANNED]
        return max(recorded, self.config.population.rounds)

    @property
    def policies(self) -> list[tuple[int, Retention]]:
        """Which checkpoints were kept, each time with the rounds up to which; see `retention`."""
        changes = () if self.inputs is None else self.inputs.changes
        # None where a later version filled it in: what came before kept everything.
        earlier = [
            (one["round"], one["from"])
            for one in changes
            if one["name"] == _RETENTION and one["from"] is not None
        ]
        return [*earlier, (len(self.rounds), self.config.record.checkpoints)]

    @property
    def extended_here(self) -> bool:
        """Whether the run was given more rounds after its last one, and has played none since."""
        played = len(self.rounds)
        changes = _changes_of_rounds(self.inputs, played)
        ended = bool(self.rounds) and bool(self.rounds[-1].stopped)
        return any(ended or one.get("from") == played for one in changes)


def read_records(folder: Path, found: Findings) -> Records | None:
    """Read what a run folder says of its run.

    Args:
        folder: The run folder.
        found: Gets what is wrong with it.

    Returns:
        None where too much is wrong to look any further.
    """
    # Before the rounds: beside a run that goes on it may be behind them by one, but not ahead.
    table = folder / LEADERBOARD
    leaderboard = found.read(lambda: read_plain(table)) if is_plain(table) else None
    finished = os.path.lexists(folder / SUMMARY)
    summary = found.read(lambda: read_summary(folder))
    config = found.read(lambda: configuration.load(folder / CONFIG))
    rounds = _read_rounds(folder, found, finished=finished)
    if rounds is None:
        return None
    inputs: Inputs | None = None
    if rounds or finished or os.path.lexists(folder / INPUTS):
        inputs = found.read(lambda: read_inputs_of(folder))
        if inputs is None:
            return None
    else:
        found.notes.append(f"{folder / INPUTS}: the run was stopped before it was written")
    if config is None:
        return None
    if inputs is not None:
        _compare_settings(folder, config, inputs, len(rounds), found, finished=finished)
        config = _in_force(config, inputs)
    return Records(folder, config, inputs, rounds, summary, finished, leaderboard)


def _read_rounds(folder: Path, found: Findings, *, finished: bool) -> Sequence[RoundRecord] | None:
    file = folder / ROUNDS
    read = found.read(lambda: (parse_rounds(file), file.stat().st_size))
    if read is None:
        return None
    (rounds, length), size = read
    found.rounds = len(rounds)
    if size > length:
        found.tell(
            f"{file}: ends in {size - length} bytes of a line that was torn", mended=not finished
        )
    return rounds


def _compare_settings(
    folder: Path, config: RunConfig, inputs: Inputs, played: int, found: Findings, *, finished: bool
) -> None:
    """Compare population.yaml with the settings that were recorded."""
    text = read_plain(folder / CONFIG).decode("utf-8", errors="replace")
    if text.startswith(RECORDED_IN_PYTHON):
        return
    found.read(lambda: check_whole(folder, inputs))
    changed = {name: (then, now) for name, then, now in changed_settings(inputs, inputs_of(config))}
    if PLANNED in changed:
        _compare_planned(folder, *changed.pop(PLANNED), inputs, played, found)
    refused = sorted(name for name in changed if finished or not may_change(name))
    if refused:
        found.damage.append(
            f"{folder / CONFIG}: expected the settings that {INPUTS} records, got others for "
            f"{', '.join(refused[:3])}"
        )
    elif changed:
        found.notes.append(
            f"{folder / CONFIG}: has another {' and another '.join(sorted(changed))} than "
            f"{INPUTS}; a resume goes on with it and records it"
        )


def _compare_planned(
    folder: Path, recorded: int, given: int, inputs: Inputs, played: int, found: Findings
) -> None:
    """Tell an extension that was stopped between its two files from other numbers of rounds."""
    begun = any(one.get("from") == given for one in _changes_of_rounds(inputs, played))
    so = "a resume goes on with that" if begun else "put it back, and give --rounds to a resume"
    found.tell(
        f"{folder / CONFIG}: {PLANNED} is {given}, and {recorded} in {INPUTS}; {so}", mended=begun
    )


def _changes_of_rounds(inputs: Inputs | None, played: int) -> list[Mapping[str, Any]]:
    """Return the changes of the number of rounds since the last round."""
    changes = () if inputs is None else inputs.changes
    return [one for one in changes if one["name"] == PLANNED and one["round"] == played]


def _in_force(config: RunConfig, inputs: Inputs) -> RunConfig:
    names = {name: f"record.{name}" for name in type(config.record).model_fields}
    recorded = {
        name: inputs.settings[path] for name, path in names.items() if path in inputs.settings
    }
    return config.replace(record=config.record.replace(**recorded))

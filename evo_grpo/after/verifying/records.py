"""Reads the records of a run folder: settings, inputs, finished rounds, summary."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evo_grpo.after.verifying.findings import Findings
from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.record.config import read_config
from evo_grpo.record.folder import config_text, parse_rounds
from evo_grpo.record.names import CONFIG, INPUTS, RECORDED_IN_PYTHON, ROUNDS, SUMMARY
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.retention import Retention
from evo_grpo.record.summary import read_summary
from evo_grpo.settings import RunConfig
from evo_grpo.training.inputs.differences import changed_settings, check_whole, may_change
from evo_grpo.training.inputs.recorded_inputs import ROUNDS as PLANNED
from evo_grpo.training.inputs.recorded_inputs import Inputs, read_inputs_of, settings_of

_RETENTION = "record.checkpoints"


@dataclass(frozen=True)
class Records:
    """The records of a run folder.

    `config` are the settings in force: those of population.yaml, with the group `record` of
    inputs.json, since population.yaml may have been changed for the next resume. `inputs` is None
    where the run was stopped before it recorded them. `finished` is true if there is a summary,
    even a damaged one: a plain resume changes nothing then.
    """

    folder: Path
    config: RunConfig
    inputs: Inputs | None
    rounds: Sequence[RoundRecord]
    summary: Mapping[str, Any] | None
    finished: bool

    @property
    def planned(self) -> int:
        """Planned number of rounds."""
        recorded = 0 if self.inputs is None else self.inputs.settings[PLANNED]
        return max(recorded, self.config.population.rounds)

    @property
    def policies(self) -> list[tuple[int, Retention]]:
        """Retention policies, each with the number of rounds up to which it held."""
        changes = () if self.inputs is None else self.inputs.changes
        # None if the run began with a version that kept every checkpoint.
        earlier = [
            (one["round"], one["from"])
            for one in changes
            if one["name"] == _RETENTION and one["from"] is not None
        ]
        return [*earlier, (len(self.rounds), self.config.record.checkpoints)]

    @property
    def extended_here(self) -> bool:
        """Whether the run was extended after its last round, and has played none since."""
        return self.inputs is not None and self.inputs.is_extended(self.rounds)


def read_records(folder: Path, found: Findings) -> Records | None:
    """Read the records of a run folder; None if they are too damaged for further checks."""
    finished = os.path.lexists(folder / SUMMARY)
    summary = found.read(lambda: read_summary(folder))
    config = found.read(lambda: read_config(folder))
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
        settings, recorded = config, inputs
        config = found.read(lambda: _in_force(folder, settings, recorded))
        if config is None:
            return None
    return Records(folder, config, inputs, rounds, summary, finished)


def _read_rounds(folder: Path, found: Findings, *, finished: bool) -> Sequence[RoundRecord] | None:
    file = folder / ROUNDS
    read = found.read(lambda: (parse_rounds(file), file.stat().st_size))
    if read is None:
        return None
    (rounds, length, _), size = read
    found.rounds = len(rounds)
    if size > length:
        found.report(
            f"{file}: ends in {size - length} bytes of an incomplete line", repaired=not finished
        )
    return rounds


def _compare_settings(
    folder: Path, config: RunConfig, inputs: Inputs, played: int, found: Findings, *, finished: bool
) -> None:
    """Compare population.yaml with the recorded settings."""
    if config_text(folder).startswith(RECORDED_IN_PYTHON):
        return
    found.read(lambda: check_whole(folder, inputs))
    present = settings_of(config)
    changed = {name: (then, now) for name, then, now in changed_settings(inputs, present)}
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
            f"{folder / CONFIG}: {' and '.join(sorted(changed))} differ from {INPUTS}; a resume "
            "uses and records the new values"
        )


def _compare_planned(
    folder: Path, recorded: int, given: int, inputs: Inputs, played: int, found: Findings
) -> None:
    """Report a changed number of rounds: a note where an extension was stopped, else damage."""
    begun = any(one.get("from") == given for one in inputs.changes_of_rounds(played))
    so = "a resume uses it" if begun else "restore it, and give --rounds to a resume"
    found.report(
        f"{folder / CONFIG}: {PLANNED} is {given}, and {recorded} in {INPUTS}; {so}", repaired=begun
    )


def _in_force(folder: Path, config: RunConfig, inputs: Inputs) -> RunConfig:
    """Return the settings with the group `record` of inputs.json."""
    names = {name: f"record.{name}" for name in type(config.record).model_fields}
    recorded = {
        name: inputs.settings[path] for name, path in names.items() if path in inputs.settings
    }
    try:
        return config.replace(record=config.record.replace(**recorded))
    except ConfigError as error:
        raise CheckpointError(
            f"{folder / INPUTS}: expected valid settings of the group record, but {error}; restore "
            "the file"
        ) from error

"""A run goes on, or something trains beside it, with what it was made of; what changed is kept."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from evo_grpo.errors import CheckpointError
from evo_grpo.evolve.steer import ON_AGENTS
from evo_grpo.inputs.differences import FILLED_IN, ROUNDING, ROUNDS, differences
from evo_grpo.inputs.made_of import Inputs, inputs_of, read_inputs_of
from evo_grpo.record.names import INPUTS
from evo_grpo.record.run_dir import RunDir
from evo_grpo.settings import RunConfig
from evo_grpo.types import Steering
from evo_grpo.validation import shown


def record_inputs(folder: RunDir, config: RunConfig) -> None:
    """Record what a run is made of, where its folder does not know it yet.

    Raises:
        CheckpointError: The record is gone although rounds were played.
    """
    if os.path.lexists(folder.path / INPUTS):
        return
    if folder.rounds():
        raise CheckpointError(
            f"{folder.path / INPUTS}: expected the record of what the run was made of, got no "
            "file; put it back as it was"
        )
    folder.write_inputs(asdict(replace(inputs_of(config), id=uuid4().hex)))


def run_id(folder: RunDir, *, anew: bool = False) -> str:
    """Return the id by which a run is known outside of its folder; a copy of the folder has it too.

    Args:
        folder: The open run folder. One of an earlier version gets an id now, and keeps it.
        anew: Give the run another id.

    Raises:
        CheckpointError: inputs.json is missing or damaged.
    """
    known = read_inputs_of(folder.path)
    if anew or not known.id:
        known = replace(known, id=uuid4().hex)
        folder.write_inputs(asdict(known))
    return known.id


@dataclass(frozen=True)
class Changed:
    """What a run goes on with in place of what it was begun with.

    Attributes:
        before: What it was made of.
        now: What it is made of from now on, with all changes so far.
        notes: A sentence for each thing with which the rounds that follow may differ from those of
            a run that was never stopped.
    """

    before: Inputs
    now: Inputs
    notes: Sequence[str]


def compare_inputs(
    folder: RunDir, config: RunConfig, *, rounds: int | None, allow: Iterable[str] = ()
) -> Changed:
    """Compare what a run was made of with what it would go on with; nothing is written.

    Args:
        folder: The open run folder.
        config: Its settings as population.yaml has them, with `rounds` for population.rounds.
        rounds: What the caller asks for; population.rounds may change by this alone.
        allow: Names of files that may have changed.

    Raises:
        ConfigError: Something else has changed; it names all of it. Before the first round is
            finished, files may.
        CheckpointError: The record is gone or damaged.
    """
    record_inputs(folder, config)
    found, played = differences(folder.path, config), len(folder.rounds())
    found.refuse(
        f"resume {folder.path}",
        allow,
        rounds=rounds is not None,
        files=played > 0,  # before the first round, nothing was made with a file as it was
    )
    changes = [
        {"round": played, "name": name, "from": before, "to": after}
        for name, before, after in (*found.settings, *found.files, *found.software)
    ]
    changes += [
        {"round": played, "name": name, "from": None, "to": value, FILLED_IN: True}
        for name, value in found.new()
    ]
    ended = any(record.is_end for record in folder.rounds()[-1:])
    if rounds is not None and ended and all(one["name"] != ROUNDS for one in changes):
        # A rule ended it before the rounds that it was to have from the start: it gets those.
        changes.append({"round": played, "name": ROUNDS, "from": rounds, "to": rounds})
    inexact = [one for one in found.settings if one[0] in ROUNDING] + found.software
    notes = [
        f"{name} was {shown(before)} and is {shown(after)}: the rounds that follow may differ in "
        "rounding from those of a run that was never stopped"
        for name, before, after in inexact
    ]
    now = replace(found.now, changes=(*found.then.changes, *changes), id=found.then.id)
    return Changed(found.then, now, notes)


def check_inputs(
    folder: Path, config: RunConfig, *, command: str, allow: Iterable[str] = ()
) -> None:
    """Refuse to train beside a run with something else than it was made of.

    The folder is only read. What a resume may change may be different here too, and is not
    recorded.

    Args:
        folder: The run folder.
        config: Its settings as population.yaml has them.
        command: The command of `evo-grpo` that asks, for the remedy.
        allow: Names of files that may have changed.

    Raises:
        ConfigError: Something else has changed; it names all of it.
        CheckpointError: The record is gone or damaged.
    """
    differences(folder, config).refuse(command, allow)


def record_changes(folder: RunDir, changed: Changed) -> None:
    """Record what a run is made of from now on, where something has changed."""
    if changed.now != changed.before:
        folder.write_inputs(asdict(changed.now))


def begun_extension(folder: RunDir) -> int | None:
    """Return for how many rounds a run was extended, where no round has been played since.

    Args:
        folder: The open run folder.

    Returns:
        Rounds of the whole run; None where none were added since its last round.

    Raises:
        CheckpointError: inputs.json is damaged.
    """
    changes = _changes_of_rounds(folder)
    return int(changes[-1]["to"]) if changes else None


def was_the_end(folder: RunDir) -> bool:
    """Return whether the last round was played as the last one of a run that has more by now.

    Args:
        folder: The open run folder, which records the rounds that it is to have.
    """
    rounds = folder.rounds()
    # What a person asks of agents is carried out on a plan: one was made before a kill.
    if not rounds or any(_on_agent(one) for one in rounds[-1].steering):
        return False
    ended = bool(rounds[-1].stopped)
    return any(ended or change["from"] == len(rounds) for change in _changes_of_rounds(folder))


def _changes_of_rounds(folder: RunDir) -> list[Mapping[str, Any]]:
    """Return the changes of the number of rounds since the last round."""
    if not os.path.lexists(folder.path / INPUTS):
        return []
    changes, played = read_inputs_of(folder.path).changes, len(folder.rounds())
    return [one for one in changes if one["name"] == ROUNDS and one["round"] == played]


def _on_agent(one: Steering) -> bool:
    return one.request.op in ON_AGENTS and not one.refused

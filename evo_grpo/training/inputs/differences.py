"""Compares the present inputs of a run with the recorded ones, and records permitted changes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from evo_grpo.envs.describing import DIGEST, ENVIRONMENT
from evo_grpo.errors import CheckpointError, ConfigError, RunDirError
from evo_grpo.places import as_option
from evo_grpo.printable import shorten
from evo_grpo.record.config import read_settings
from evo_grpo.record.files import seal, to_line
from evo_grpo.record.names import CONFIG, INPUTS
from evo_grpo.record.run_dir import RunDir
from evo_grpo.schema.problems import Problem, Problems
from evo_grpo.schema.validation import shown
from evo_grpo.settings import RunConfig, StopConfig
from evo_grpo.settings.engine import ENGINES
from evo_grpo.settings.yaml import REMOVED, from_dict, with_parts
from evo_grpo.training.inputs.recorded_inputs import (
    DATA,
    ROUNDS,
    Inputs,
    flat,
    inputs_of,
    read_inputs_of,
)

_HONOURED = (
    *("record.completions", "record.metrics", "record.checkpoints"),
    *("record.optuna", "record.storage", "record.trackers", "engine.memory"),
    "engine.offload_adapters",
    *(f"engine.{name}.{own}" for name, kind in ENGINES.items() for own in kind.adjustable),
    *("env.reward_timeout", "env.reward_failures", "env.reward_errors", "env.isolate"),
    "env.max_data_gb",
    *(f"population.stop.{rule}" for rule in StopConfig.model_fields),
)
"""Settings that may change between two rounds without an effect on the results."""
ROUNDING = (
    *("engine.threads", "engine.device", "engine.compile", "engine.kernels"),
    *("engine.max_tokens_per_microbatch", "engine.max_rows_per_microbatch"),
    *("engine.max_decode_rows", "engine.base", "engine.zero"),
)
"""Settings that may change between two rounds and affect the rounding of later rounds."""
FILLED_IN = "filled_in"
"""Key that marks a setting added by a newer evo-grpo at its default, which is not a change."""

Change = tuple[str, Any, Any]
"""Name of a setting, file or package, its recorded value, and its present value."""


@dataclass(frozen=True)
class Differences:
    """Differences between recorded and present inputs.

    `objects` are parts of Python objects; None if no objects were given.
    """

    folder: Path
    then: Inputs
    now: Inputs
    settings: list[Change]
    files: list[Change]
    software: list[Change]
    objects: list[Change] | None = None

    def new(self) -> list[tuple[str, Any]]:
        """Return the settings that the record lacks, with the values that this version fills in."""
        known = {*self.then.settings, *(name for name, _, _ in self.settings)}
        return [(name, value) for name, value in self.now.settings.items() if name not in known]

    def refuse(
        self, command: str, allow: Iterable[str], *, rounds: bool = False, files: bool = True
    ) -> None:
        """Refuse all changes that are not permitted, each by name.

        The remedy in the message repeats `command`. Files, and parts of Python objects, named in
        `allow` may have changed; without `files`, all may. With `rounds`, population.rounds may
        have changed.

        Raises:
            ConfigError: An input has a forbidden change, or `allow` names a file that the run does
                not read.
        """
        allowed = set(allow)
        _check_allowed(allowed, self.then)
        refused = [
            _refused_setting(*one)
            for one in self.settings
            if not may_change(one[0])
            and not (rounds and one[0] == ROUNDS)
            and not self._is_moved(*one)
        ]
        changed = {
            name: after
            for name, _, after in self.files
            # A file that is read only because another file changed is covered by that file.
            if files and name not in allowed and name in self.then.files and name in self.now.files
        }
        there = {name for name, after in changed.items() if after is not None}
        parts = [one for one in self.objects or () if files and one[0] not in allowed]
        # The parts of an environment of another class are other parts.
        parts = [one for one in parts if one[0] == ENVIRONMENT] or parts
        wanted = sorted(allowed | there | {name for name, _, after in parts if after is not None})
        if self.objects is None:
            command = f"evo-grpo {command}{as_option()}" + "".join(
                f" --allow {name!r}" for name in wanted
            )
        else:
            command = f"allow={wanted}"
        refused += [
            _refused_file(name, after, command, self.then.places.get(name))
            for name, after in changed.items()
        ]
        refused += [_refused_part(*one, command) for one in parts]
        if refused:
            raise Problems(
                *(Problem((), text) for text in refused),
                source=f"{self.folder}: the run was begun with something else",
            )

    def _is_moved(self, name: str, before: object, after: object) -> bool:
        """Return whether a setting names a data set at a new path; its content is compared."""
        if name not in DATA or not isinstance(before, str) or not isinstance(after, str):
            return False
        # The suffix determines the format in which a file is read.
        same_ending = Path(before).suffix.lower() == Path(after).suffix.lower()
        return same_ending and self.then.files.get(name) is not None


def differences(
    folder: Path, config: RunConfig, objects: Mapping[str, str] | None = None
) -> Differences:
    """Return the differences between the recorded inputs of a run and its present ones.

    `objects` are the parts of the Python objects that are given now; None compares none.

    Raises:
        ConfigError: population.yaml lacks a setting.
        CheckpointError: The record is missing or damaged.
    """
    then, now = read_inputs_of(folder), inputs_of(config)
    check_whole(folder, then)
    return Differences(
        folder,
        then,
        now,
        changed_settings(then, now.settings),
        list(_changed(then.files, now.files)),
        list(_changed(then.software, now.software)),
        # A part that the recording version did not have cannot be compared.
        None if objects is None else [c for c in _changed(then.objects, objects) if c[1]],
    )


def changed_settings(then: Inputs, now: Mapping[str, Any]) -> list[Change]:
    """Return the settings that differ from the record: name, recorded value, present value.

    A setting that the recording version of evo-grpo did not have counts as unchanged if it has this
    version's default.
    """
    return list(_changed(_filled_in(then.settings) or then.settings, now))


def may_change(name: str) -> bool:
    """Return whether a setting may change between two rounds; a resume records such a change."""
    return name in _HONOURED or name in ROUNDING


def check_whole(folder: Path, then: Inputs) -> None:
    """Refuse a population.yaml that lacks a setting, which would silently take its default."""
    left = dict(flat(read_settings(folder)))
    # A setting that a newer version filled in was never written to population.yaml.
    later = {one["name"] for one in then.changes if FILLED_IN in one}
    missing = [name for name in then.settings if name not in {*left, *later}]
    if missing:
        raise ConfigError(
            f"{folder / CONFIG}: expected every setting of the run, got none of "
            f"{', '.join(missing[:3])}{' and others' * (len(missing) > 3)}; put the file back"
        )


def record_inputs(
    folder: RunDir, config: RunConfig, objects: Mapping[str, str] | None = None
) -> None:
    """Record the inputs of a run if its folder has no record yet.

    `objects` are the parts of the Python objects that the run was given.

    Raises:
        CheckpointError: The record is missing although rounds were played.
    """
    if os.path.lexists(folder.path / INPUTS):
        return
    if folder.rounds():
        raise CheckpointError(
            f"{folder.path / INPUTS}: expected the record of what the run was made of, got no "
            "file; put it back as it was"
        )
    inputs = replace(inputs_of(config), id=uuid4().hex, objects=objects or {})
    folder.write(INPUTS, seal(asdict(inputs)))


@dataclass(frozen=True)
class Changed:
    """The changed inputs with which a run continues.

    Attributes:
        before: The recorded inputs.
        now: The inputs from now on, with all changes so far.
        config: The settings from now on.
        extended: Whether the caller asked for a number of rounds other than in population.yaml.
        notes: A sentence for each change that may make the following rounds differ from those of an
            uninterrupted run.
    """

    before: Inputs
    now: Inputs
    config: RunConfig
    extended: bool
    notes: Sequence[str]


def compare_inputs(
    folder: RunDir,
    config: RunConfig,
    *,
    rounds: int | None,
    allow: Iterable[str] = (),
    objects: Mapping[str, str] | None = None,
) -> Changed:
    """Compare the recorded inputs of a run with those it would continue with.

    The settings are those of population.yaml, with the caller's `rounds` as population.rounds;
    population.rounds cannot change in any other way. Files, and parts of Python objects, named in
    `allow` may have changed. Nothing is written, except the record of a run that has none yet.

    Raises:
        ConfigError: Other inputs have changed; the message names all of them. Files may change
            before the first round is finished.
        CheckpointError: The record is missing or damaged.
        RunDirError: A version of evo-grpo began the run that decided otherwise.
    """
    record_inputs(folder, config, objects)
    found, played = differences(folder.path, config, objects), len(folder.rounds())
    _refuse_removed(folder.path, found.then)
    found.refuse(
        f"resume {folder.path}",
        allow,
        rounds=rounds is not None,
        files=played > 0,  # before the first round is finished, no result depends on a file
    )
    changes = [
        {"round": played, "name": name, "from": before, "to": after}
        for name, before, after in (
            *(*found.settings, *found.files),
            *(*found.software, *(found.objects or ())),
        )
    ]
    changes += [
        {"round": played, "name": name, "from": None, "to": value, FILLED_IN: True}
        for name, value in found.new()
    ]
    ended = any(record.is_end for record in folder.rounds()[-1:])
    if rounds is not None and ended and all(one["name"] != ROUNDS for one in changes):
        # A rule ended the run before its planned number of rounds: play the remaining ones.
        changes.append({"round": played, "name": ROUNDS, "from": rounds, "to": rounds})
    inexact = [one for one in found.settings if one[0] in ROUNDING] + found.software
    notes = [
        f"{name} was {shown(before)} and is {shown(after)}: the rounds that follow may differ in "
        "rounding from those of a run that was never stopped"
        for name, before, after in inexact
    ]
    # The places stay those of the start of the run.
    now = replace(
        found.now,
        changes=(*found.then.changes, *changes),
        id=found.then.id,
        places=found.then.places,
        objects=found.then.objects if objects is None else objects,
    )
    return Changed(found.then, now, config, rounds is not None, notes)


def check_inputs(
    folder: Path,
    config: RunConfig,
    *,
    command: str,
    allow: Iterable[str] = (),
    objects: Mapping[str, str] | None = None,
) -> None:
    """Refuse to train beside a run with inputs other than the recorded ones.

    The folder is only read. Changes that a resume permits are permitted too, and are not recorded.

    Raises:
        ConfigError: Other inputs have changed; the message names all of them.
        CheckpointError: The record is missing or damaged.
    """
    differences(folder, config, objects).refuse(command, allow)


def record_changes(folder: RunDir, changed: Changed) -> None:
    """Record the inputs that a run has from now on, if any has changed."""
    if changed.now != changed.before:
        folder.write(INPUTS, seal(asdict(changed.now)))


def begun_extension(folder: RunDir) -> int | None:
    """Return the number of rounds that a run was extended to, None if it has played one since."""
    if not os.path.lexists(folder.path / INPUTS):
        return None
    changes = read_inputs_of(folder.path).changes_of_rounds(len(folder.rounds()))
    return int(changes[-1]["to"]) if changes else None


def _check_allowed(allowed: set[str], then: Inputs) -> None:
    known = {*then.files, *then.objects}
    if unknown := sorted(allowed - known):
        names = ", ".join(sorted(known)) or "none, for this run reads no file of yours"
        raise ConfigError(
            f"allow: expected names of files that the run reads ({names}), got {unknown[0]!r}"
        )


def _refuse_removed(folder: Path, then: Inputs) -> None:
    """Refuse to go on with a run whose settings are not all here: it would go on otherwise."""
    if gone := [name for name in map(".".join, REMOVED) if name in then.settings]:
        raise RunDirError(
            f"{folder}: expected a run that this version began, got one of an earlier version, "
            f"with {', '.join(gone)}; finish it with evo-grpo "
            f"{then.software.get('evo-grpo')}, which began it, or start another run"
        )


def _refused_setting(name: str, before: object, after: object) -> str:
    changed = f"{name} was {shown(before)} and is {shown(after)}"
    if name == ROUNDS:
        return f"{changed}; put it back, and give --rounds {after} to evo-grpo resume"
    return f"{changed}; put it back in {CONFIG}, or start another run"


def _refused_file(name: str, after: str | None, command: str, place: str | None) -> str:
    begun = "" if place is None else f" (the run was begun with {place})"
    if after is None:
        return (
            f"the file of {name} is not there{begun}; put it back, go on from the folder in which "
            "the run was begun, or name the folder that has it with --code"
        )
    return (
        f"the file of {name} has changed{begun}; put it back as it was, or go on with the new one: "
        f"{command}"
    )


def _refused_part(name: str, before: str, after: str | None, command: str) -> str:
    """Return the sentence about a changed part of a Python object."""
    if after is None or name == ENVIRONMENT:
        now = "missing" if after is None else _part(after)
        return (
            f"{name} was {_part(before)} and is {now}; give the object that the run was begun "
            "with, or start another run with Population.train"
        )
    if before.startswith(DIGEST):
        found = f"{name} has changed (sha256 {_part(before)}, now {_part(after)})"
    else:
        found = f"{name} was {_part(before)} and is {_part(after)}"
    return f"{found}; give what the run was begun with, or go on with this: {command}"


def _part(value: str) -> str:
    return shorten(value.removeprefix(DIGEST)[:12] if value.startswith(DIGEST) else value)


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    for name in (*before, *(name for name in after if name not in before)):
        both = name in before and name in after
        if not both or _canonical(before[name]) != _canonical(after[name]):
            yield name, before.get(name), after.get(name)


def _canonical(value: object) -> str:
    """Return a value as JSON, which distinguishes `true`, 1 and 1.0."""
    return to_line(value, sort_keys=True)


def _filled_in(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return recorded settings with this version's defaults, None if this version refuses them."""
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        *groups, last = name.split(".")
        place = nested
        for group in groups:
            place = place.setdefault(group, {})
            if not isinstance(place, dict):  # a key chosen by the user contains a dot
                return dict(settings)
        place[last] = value
    try:
        return dict(flat(from_dict(with_parts(nested)).model_dump(mode="json")))
    except ConfigError:
        return None

"""What of a run is not as it was, and which of it may be so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from evo_grpo.errors import ConfigError
from evo_grpo.inputs.made_of import DATA, Inputs, flat, inputs_of, read_inputs_of
from evo_grpo.record.files import to_line
from evo_grpo.record.folder import config_text
from evo_grpo.record.names import CONFIG
from evo_grpo.schema.problems import Problem, Problems
from evo_grpo.settings import RunConfig, StopConfig
from evo_grpo.settings.yaml import from_dict, parse
from evo_grpo.validation import shown

ROUNDS = "population.rounds"
_HONOURED = (
    *("record.completions", "record.metrics", "record.checkpoints"),
    *("record.optuna", "record.storage", "record.trackers"),
    *("env.reward_timeout", "env.reward_failures", "env.reward_errors", "env.isolate"),
    *(f"population.stop.{rule}" for rule in StopConfig.model_fields),
)
"""Settings that may change between two rounds, and change nothing in those that were played."""
ROUNDING = (
    *("engine.threads", "engine.device", "engine.compile"),
    *("engine.max_tokens_per_microbatch", "engine.max_rows_per_microbatch"),
    *("engine.max_decode_rows", "engine.base", "engine.zero"),
)
"""Settings that may change, and change the rounding of the rounds that follow."""
FILLED_IN = "filled_in"
"""What marks a change that is none: a setting of a later evo-grpo, at what that fills in."""

Change = tuple[str, Any, Any]
"""Name of what has changed, what it was, what it is."""


@dataclass(frozen=True)
class Differences:
    """What is not as it was.

    Attributes:
        folder: The run folder.
        then: What the run was made of.
        now: What it is made of.
        unknown: Settings of the run that this version does not know.
        settings: The settings that changed.
        files: The files.
        software: The versions, the processor, the threads.
    """

    folder: Path
    then: Inputs
    now: Inputs
    unknown: set[str]
    settings: list[Change]
    files: list[Change]
    software: list[Change]

    def new(self) -> list[tuple[str, Any]]:
        """Return the settings that the record does not have, at what this version fills in."""
        known = {*self.then.settings, *(name for name, _, _ in self.settings)}
        return [(name, value) for name, value in self.now.settings.items() if name not in known]

    def refuse(
        self, command: str, allow: Iterable[str], *, rounds: bool = False, files: bool = True
    ) -> None:
        """Refuse what has changed and may not, all of it by name.

        Args:
            command: The command that asks, for the remedy.
            allow: Names of files that may.
            rounds: Whether population.rounds may.
            files: Whether to look at files.

        Raises:
            ConfigError: Something has, or there is no file of such a name.
        """
        allowed = set(allow)
        _check_allowed(allowed, self.then)
        refused = [
            self._refused_setting(*one)
            for one in self.settings
            if not may_change(one[0])
            and not (rounds and one[0] == ROUNDS)
            and not self._is_moved(*one)
        ]
        changed = {
            name: after
            for name, _, after in self.files
            # One that is read only since another one changed goes with that one.
            if files and name not in allowed and name in self.then.files and name in self.now.files
        }
        there = {name for name, after in changed.items() if after is not None}
        command += "".join(f" --allow {name!r}" for name in sorted(allowed | there))
        refused += [_refused_file(name, after, command) for name, after in changed.items()]
        if refused:
            raise Problems(
                *(Problem((), text) for text in refused),
                source=f"{self.folder}: the run was begun with something else",
            )

    def _is_moved(self, name: str, before: object, after: object) -> bool:
        """Return whether a setting names a data set at another path, whose content is compared."""
        if name not in DATA or not isinstance(before, str) or not isinstance(after, str):
            return False
        # By its ending a file is read as what it is.
        same_ending = Path(before).suffix.lower() == Path(after).suffix.lower()
        return same_ending and self.then.files.get(name) is not None

    def _refused_setting(self, name: str, before: object, after: object) -> str:
        if name in self.unknown:
            ours, theirs = self.now.software["evo-grpo"], self.then.software.get("evo-grpo")
            return (
                f"{name} was {shown(before)}, and this version, {ours}, does not know it; go on "
                f"with evo-grpo {theirs}, which the run was begun with"
            )
        changed = f"{name} was {shown(before)} and is {shown(after)}"
        if name == ROUNDS:
            return f"{changed}; put it back, and give --rounds {after} to evo-grpo resume"
        return f"{changed}; put it back in {CONFIG}, or start another run"


def differences(folder: Path, config: RunConfig) -> Differences:
    """Return what is not as it was.

    Args:
        folder: The run folder.
        config: Its settings as population.yaml has them.

    Raises:
        ConfigError: population.yaml has lost a part.
        CheckpointError: The record is gone or damaged.
    """
    then, now = read_inputs_of(folder), inputs_of(config)
    # Another version may have had other settings; where this one refuses none, it knows them all.
    known = _filled_in(then.settings) is not None
    unknown = set[str]() if known else set(then.settings) - set(now.settings)
    check_whole(folder, then, unknown)
    return Differences(
        folder,
        then,
        now,
        unknown,
        changed_settings(then, now),
        list(_changed(then.files, now.files)),
        list(_changed(then.software, now.software)),
    )


def changed_settings(then: Inputs, now: Inputs) -> list[Change]:
    """Return the settings that are not as recorded: name, what it was, what it is.

    A setting that the evo-grpo of the record did not have counts as unchanged where it is at what
    this one fills in.

    Args:
        then: What the run was made of.
        now: What it is made of.
    """
    return list(_changed(_filled_in(then.settings) or then.settings, now.settings))


def may_change(name: str) -> bool:
    """Return whether a setting may change between two rounds, which a resume records."""
    return name in _HONOURED or name in ROUNDING


def check_whole(folder: Path, then: Inputs, unknown: Iterable[str] = ()) -> None:
    """Refuse settings that lost a part, which would count as that part's defaults.

    Args:
        folder: The run folder.
        then: What it records.
        unknown: Settings that this version does not know, which may be missing.

    Raises:
        ConfigError: population.yaml lacks a setting; it names the first ones.
    """
    there = parse(config_text(folder), str(folder / CONFIG))
    left = dict(flat(cast("dict[str, Any]", there))) if isinstance(there, dict) else {}
    # Those that a later version filled in were never written there.
    later = {one["name"] for one in then.changes if FILLED_IN in one}
    missing = [name for name in then.settings if name not in {*left, *unknown, *later}]
    if missing:
        raise ConfigError(
            f"{folder / CONFIG}: expected every setting of the run, got none of "
            f"{', '.join(missing[:3])}{' and others' * (len(missing) > 3)}; put the file back"
        )


def _check_allowed(allowed: set[str], then: Inputs) -> None:
    if unknown := sorted(allowed - set(then.files)):
        names = ", ".join(sorted(then.files)) or "none, for this run reads no file of yours"
        raise ConfigError(
            f"allow: expected names of files that the run reads ({names}), got {unknown[0]!r}"
        )


def _refused_file(name: str, after: str | None, command: str) -> str:
    if after is None:
        return (
            f"the file of {name} is not there; put it back, or go on from the folder in which the "
            "run was begun"
        )
    return (
        f"the file of {name} has changed; put it back as it was, or go on with the new one: "
        f"evo-grpo {command}"
    )


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    for name in (*before, *(name for name in after if name not in before)):
        both = name in before and name in after
        if not both or _canonical(before[name]) != _canonical(after[name]):
            yield name, before.get(name), after.get(name)


def _canonical(value: object) -> str:
    """Return a value as JSON, in which `true`, 1 and 1.0 are three things."""
    return to_line(value, sort_keys=True)


def _filled_in(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return recorded settings with what this version fills in, None where it refuses them."""
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        *groups, last = name.split(".")
        place = nested
        for group in groups:
            place = place.setdefault(group, {})
            if not isinstance(place, dict):  # keys of the user's with dots in them
                return dict(settings)
        place[last] = value
    try:
        return dict(flat(from_dict(nested).model_dump(mode="json")))
    except ConfigError:
        return None

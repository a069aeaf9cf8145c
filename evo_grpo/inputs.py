"""What a run was made of: its settings, the files that it reads, and the software that played it.

A folder records it when its run begins. A resume compares: what has changed is refused by name, or
honoured and recorded by name where the rounds that are left can follow it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter

from evo_grpo.envs.finding import defining_files
from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.record.digests import sha256_of
from evo_grpo.record.files import to_line
from evo_grpo.record.folder import config_text, read_sealed
from evo_grpo.record.names import CONFIG, INPUTS
from evo_grpo.record.run_dir import RunDir
from evo_grpo.schema.problems import Problem, Problems
from evo_grpo.schema.validated import validated
from evo_grpo.settings import RunConfig
from evo_grpo.settings.yaml import from_dict, parse
from evo_grpo.validation import shown

FORMAT = 1
"""Version of inputs.json."""
ROUNDS = "population.rounds"
_HONOURED = (
    *("record.completions", "record.checkpoints", "record.optuna"),
    *("env.reward_timeout", "env.reward_failures", "env.reward_errors", "env.isolate"),
)
"""Settings that may change between two rounds, and change nothing in those that were played."""
_ROUNDING = (
    *("engine.threads", "engine.device", "engine.compile"),
    *("engine.max_tokens_per_microbatch", "engine.max_rows_per_microbatch"),
    "engine.max_decode_rows",
)
"""Settings that may change, and change the rounding of the rounds that follow."""
_MAY_CHANGE = {*_HONOURED, *_ROUNDING}
_DATA = ("env.train", "env.validation", "env.test")
"""Settings that name a file, whose content counts, wherever it lies."""
_PACKAGES = ("evo-grpo", "torch", "transformers", "peft", "numpy")
_CODE = ("gem", "textarena", "reasoning_gym", "verifiers")
"""Families whose names are those of a package's own environments."""

Change = tuple[str, Any, Any]
"""Name of what has changed, what it was, what it is."""


@dataclass(frozen=True)
class Inputs:
    """What a run was made of.

    Attributes:
        settings: The resolved settings by dotted path, as JSON has them.
        files: SHA-256 of each file of the user's that it reads, by the setting that names it: data
            sets, and the modules of rewards, environments and strategies, with those that they
            import them from; None where the file could not be found.
        software: Versions of what computes, the processor, and the number of threads.
        changes: What has changed since, each with the round from which on it acts; without `from`
            what a later evo-grpo filled in.
        format: Version of this record.
    """

    settings: Mapping[str, Any]
    files: Mapping[str, str | None]
    software: Mapping[str, str]
    changes: Sequence[Mapping[str, Any]] = field(default_factory=tuple[Mapping[str, Any], ...])
    format: int = FORMAT


_SCHEMA = TypeAdapter(Inputs)


def inputs_of(config: RunConfig) -> Inputs:
    """Return what a run is made of, as it is now; no code of the user's runs.

    Args:
        config: Its settings; paths in it are relative to the current directory.
    """
    files = {name: None if file is None else sha256_of(file) for name, file in _files(config)}
    return Inputs(dict(_flat(config.model_dump(mode="json"))), files, _software(config))


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
    folder.write_inputs(asdict(inputs_of(config)))


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
    played, changeable = len(folder.rounds()), {*_MAY_CHANGE}
    if rounds is not None:
        changeable.add(ROUNDS)
    found = _differences(folder.path, config)
    # Before the first round is finished, nothing was made with a file as it was.
    found.refuse(f"resume {folder.path}", changeable, allow, files=played > 0)
    changes = [
        {"round": played, "name": name, "from": before, "to": after}
        for name, before, after in (*found.settings, *found.files, *found.software)
    ]
    # Without "from", for there was no such setting.
    changes += [{"round": played, "name": name, "to": value} for name, value in found.new()]
    inexact = [one for one in found.settings if one[0] in _ROUNDING] + found.software
    notes = [
        f"{name} was {shown(before)} and is {shown(after)}: the rounds that follow may differ in "
        "rounding from those of a run that was never stopped"
        for name, before, after in inexact
    ]
    now = replace(found.now, changes=(*found.then.changes, *changes))
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
    _differences(folder, config).refuse(command, _MAY_CHANGE, allow, files=True)


def changed_settings(then: Inputs, now: Inputs) -> list[Change]:
    """Return the settings that are not as recorded: name, what it was, what it is.

    A setting that the evo-grpo of the record did not have counts as unchanged where it is at what
    this one fills in.

    Args:
        then: What the run was made of.
        now: What it is made of.
    """
    return list(_changed(_filled_in(then.settings) or then.settings, now.settings))


def record_changes(folder: RunDir, changed: Changed) -> None:
    """Record what a run is made of from now on, where something has changed."""
    if changed.now != changed.before:
        folder.write_inputs(asdict(changed.now))


def read_inputs_of(folder: Path) -> Inputs:
    """Return what a folder records of what its run was made of.

    Raises:
        CheckpointError: There is no such record, or it is damaged.
    """
    file, data = folder / INPUTS, read_sealed(folder / INPUTS, "what the run was made of")
    try:
        if data is None:
            raise ValueError("there is no file")
        if data.get("format") != FORMAT:
            raise ValueError(f"format: expected {FORMAT}, got {shown(data.get('format'))}")
        return validated(_SCHEMA, data)
    except ValueError as error:
        raise CheckpointError(
            f"{file}: expected the record of what the run was made of, but {error}; put the file "
            "back as it was"
        ) from error


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
    played = len(folder.rounds())
    return any(change["from"] == played for change in _changes_of_rounds(folder))


def _changes_of_rounds(folder: RunDir) -> list[Mapping[str, Any]]:
    """Return the changes of the number of rounds since the last round."""
    if not os.path.lexists(folder.path / INPUTS):
        return []
    changes, played = read_inputs_of(folder.path).changes, len(folder.rounds())
    return [one for one in changes if one["name"] == ROUNDS and one["round"] == played]


def may_change(name: str) -> bool:
    """Return whether a setting may change between two rounds, which a resume records."""
    return name in _MAY_CHANGE


@dataclass(frozen=True)
class _Differences:
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
        self, command: str, changeable: set[str], allow: Iterable[str], *, files: bool
    ) -> None:
        """Refuse what has changed and may not, all of it by name.

        Args:
            command: The command that asks, for the remedy.
            changeable: Settings that may.
            allow: Names of files that may.
            files: Whether to look at files.
        """
        allowed = set(allow)
        _check_allowed(allowed, self.then)
        refused = [
            self._refused_setting(*one)
            for one in self.settings
            if one[0] not in changeable and not self._is_moved(*one)
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
        if name not in _DATA or not isinstance(before, str) or not isinstance(after, str):
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


def _differences(folder: Path, config: RunConfig) -> _Differences:
    """Return what is not as it was.

    Raises:
        ConfigError: population.yaml has lost a part.
        CheckpointError: The record is gone or damaged.
    """
    then, now = read_inputs_of(folder), inputs_of(config)
    # Another version may have had other settings; where this one refuses none, it knows them all.
    known = _filled_in(then.settings) is not None
    unknown = set[str]() if known else set(then.settings) - set(now.settings)
    check_whole(folder, then, unknown)
    return _Differences(
        folder,
        then,
        now,
        unknown,
        changed_settings(then, now),
        list(_changed(then.files, now.files)),
        list(_changed(then.software, now.software)),
    )


def check_whole(folder: Path, then: Inputs, unknown: Collection[str] = ()) -> None:
    """Refuse settings that lost a part, which would count as that part's defaults.

    Args:
        folder: The run folder.
        then: What it records.
        unknown: Settings of the run that this version does not know.

    Raises:
        ConfigError: population.yaml lacks a setting; it names the first ones.
    """
    there = parse(config_text(folder), str(folder / CONFIG))
    left = dict(_flat(cast("dict[str, Any]", there))) if isinstance(there, dict) else {}
    # Those that a later version filled in were never written there.
    later = {one["name"] for one in then.changes if "from" not in one}
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
        return dict(_flat(from_dict(nested).model_dump(mode="json")))
    except ConfigError:
        return None


def _flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        path = f"{above}{name}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}.")
        else:
            yield path, value


def _files(config: RunConfig) -> Iterator[tuple[str, Path | None]]:
    """Yield setting and file of everything of the user's that a run reads."""
    env = config.env
    for name in _DATA:
        given = getattr(env, name.removeprefix("env."))
        if given is not None:
            yield name, Path(given)
    rewards = [env.reward] if isinstance(env.reward, str) else env.reward or []
    named = [("env.reward", reward) for reward in rewards]
    family, _, rest = env.kind.partition(":")
    if family not in _CODE and ":" in rest:
        named.append(("env.kind", rest))
    strategies = {name: getattr(config.evolve, name).kind for name in ("selection", "exploration")}
    named += [(f"evolve.{name}", kind) for name, kind in strategies.items() if ":" in kind]
    for setting, code in named:
        own = code.partition(":")[0]
        for module, file in defining_files(code).items():
            yield f"{setting}: {code}" + (f" ({module})" if module != own else ""), file


def _software(config: RunConfig) -> dict[str, str]:
    found = {"python": platform.python_version(), "processor": _processor()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from the sources
            found[name] = "unknown"
    threads = config.engine.threads
    found["threads"] = str(threads or os.environ.get("OMP_NUM_THREADS") or os.cpu_count())
    return found


def _processor() -> str:
    """Return the processor's name, by which the same program may round otherwise."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()

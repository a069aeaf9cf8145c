"""Decides with which inputs a run continues, by comparing present and recorded inputs."""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from evo_grpo import settings as configuration
from evo_grpo.envs.describing import DIGEST
from evo_grpo.errors import CheckpointError, ConfigError, RunDirError
from evo_grpo.places import as_option
from evo_grpo.population.ranks.team import Team
from evo_grpo.record import folder as run_folder
from evo_grpo.record.files import seal
from evo_grpo.record.names import BASELINE, CONFIG, INPUTS
from evo_grpo.record.run_dir import RunDir
from evo_grpo.record.study import check_storage
from evo_grpo.record.summary import read_summary
from evo_grpo.schema.problems import Problem, Problems
from evo_grpo.schema.validation import shown, whole
from evo_grpo.settings import RunConfig, StopConfig
from evo_grpo.settings.engine import ENGINES
from evo_grpo.settings.yaml import REMOVED, from_dict, with_current_keys
from evo_grpo.training import recorded_inputs
from evo_grpo.training.shortages import check_ranks

_ADJUSTABLE = (
    *("record.completions", "record.metrics", "record.checkpoints"),
    *("record.optuna", "record.storage", "record.trackers", "engine.memory"),
    "engine.offload_adapters",
    *(f"engine.{name}.{setting}" for name, kind in ENGINES.items() for setting in kind.adjustable),
    *("env.reward_timeout", "env.reward_failures", "env.reward_errors", "env.isolate"),
    "env.max_data_gb",
    *(f"population.stop.{rule}" for rule in StopConfig.model_fields),
)
"""Settings that may change between two rounds without an effect on the results."""
ROUNDING = (
    *("engine.threads", "engine.device", "engine.kernels"),
    *("engine.max_tokens_per_microbatch", "engine.max_rows_per_microbatch"),
    *("engine.max_decode_rows", "engine.base", "engine.zero"),
    "engine.compile",  # of runs that an earlier version began
)
"""Settings that may change between two rounds and affect the rounding of later rounds."""


class Change(NamedTuple):
    """A difference between recorded and present inputs; None stands for a missing value.

    `kind` is the attribute of `Inputs` that differs; `name` is the setting, the file, the package
    or the part of a Python object.
    """

    kind: str
    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Changed:
    """The inputs with which a run continues, and the inputs that its folder records.

    Attributes:
        before: The recorded inputs.
        now: The inputs from now on, with all changes so far.
        config: The settings from now on.
        extended: Whether the caller, or an extension that began before, sets the number of rounds
            in `config`, and not population.yaml.
        notes: A sentence for each change that may affect the rounding of the following rounds.
    """

    before: recorded_inputs.Inputs
    now: recorded_inputs.Inputs
    config: RunConfig
    extended: bool
    notes: Sequence[str]


def continued_inputs(
    opened: RunDir, rounds: int | None, allow: Sequence[str], team: Team
) -> Changed | None:
    """Return the inputs with which a run continues, unrecorded; None if the run is finished."""
    if is_finished(opened, rounds):
        return None
    return changed_inputs(opened, _recorded_config(opened), rounds, allow, team)


def is_finished(opened: RunDir, rounds: int | None) -> bool:
    """Return whether a run has ended, and neither `rounds` nor a begun extension asks for more."""
    summary = read_summary(opened.path)
    if summary is None or begun_extension(opened) is not None:
        return False
    return rounds in (None, summary["rounds"])


def changed_inputs(
    opened: RunDir,
    config: RunConfig,
    rounds: int | None,
    allow: Sequence[str],
    team: Team,
    objects: Mapping[str, str] | None = None,
) -> Changed:
    """Return the inputs with which a run continues; warn of changes that may affect rounding."""
    played, extension = opened.rounds(), begun_extension(opened)
    if not played:
        check_storage(config.record.storage)
    if rounds is not None:
        _check_rounds(opened, rounds, extension or config.population.rounds)
    planned = extension if rounds is None else rounds
    if planned is not None:
        config = config.replace(population=config.population.replace(rounds=planned))
    check_ranks(config, team)
    changes = compare_inputs(opened, config, rounds=planned, allow=allow, objects=objects)
    for note in changes.notes:
        warnings.warn(note, UserWarning, stacklevel=2)
    return changes


def record_changed(opened: RunDir, changes: Changed) -> None:
    """Record changed inputs; for an extension, also change population.yaml and reopen the run."""
    # Record the inputs first: if the process stops after this call, a resume continues with them.
    record_changes(opened, changes)
    if changes.extended:
        text = run_folder.with_objects(
            configuration.to_yaml(changes.config), run_folder.listed_objects(opened.path)
        )
        opened.write(CONFIG, text)
    if begun_extension(opened) is not None:
        opened.reopen()


def _recorded_config(opened: RunDir) -> RunConfig:
    """Return the settings of a run folder; refuse a folder that cannot be resumed."""
    run_folder.refuse_objects(
        opened.path,
        "so no command can make them; continue it in Python, with env and the other objects as at "
        f"the begin of the run: evo_grpo.Population.resume({str(opened.path)!r}, env=...)",
    )
    refuse_part_of_comparison(opened.path)
    return run_folder.read_config(opened.path)


def refuse_part_of_comparison(folder: Path) -> None:
    """Refuse a run folder that is part of a comparison: only the comparison can continue it."""
    if run_folder.config_text(folder).startswith(BASELINE):
        above = folder.parent.parent
        raise RunDirError(
            f"{folder}: it is part of the comparison of {above} and ends by tokens, not "
            f"by rounds; continue with: evo-grpo resume {above} --compare"
        )


def _check_rounds(opened: RunDir, rounds: int, planned: int) -> None:
    whole(1).check("rounds", rounds)
    played = opened.rounds()
    if rounds <= len(played) and rounds != planned:
        raise ConfigError(
            f"rounds: expected more than the {len(played)} that this run has played, got {rounds}; "
            "rounds that are finished are never dropped"
        )
    ended = played and (len(played) >= planned or played[-1].is_end)
    if ended and rounds > len(played) and played[-1].plan is None:
        raise RunDirError(
            f"{opened.path}: expected a run that ended with a plan for a further round, got none: "
            "an earlier version ended it, or its exploration had nothing more to try; start a new "
            f"run from its best settings, with population.init: {{from: {opened.path}}}"
        )


def record_inputs(
    folder: RunDir, config: RunConfig, objects: Mapping[str, str] | None = None
) -> None:
    """Record the inputs of a run, including `objects`, unless its folder has a record of them.

    Raises CheckpointError if the record is missing although rounds were played.
    """
    if os.path.lexists(folder.path / INPUTS):
        return
    if folder.rounds():
        raise CheckpointError(
            f"{folder.path / INPUTS}: expected the record of what the run was made of, got no "
            "file; put it back as it was"
        )
    inputs = replace(recorded_inputs.inputs_of(config), id=uuid4().hex, objects=objects or {})
    folder.write(INPUTS, seal(asdict(inputs)))


def compare_inputs(
    folder: RunDir,
    config: RunConfig,
    *,
    rounds: int | None,
    allow: Iterable[str] = (),
    objects: Mapping[str, str] | None = None,
) -> Changed:
    """Compare the recorded inputs of a run with its present inputs.

    `config` has the settings of population.yaml, with population.rounds replaced by `rounds` unless
    `rounds` is None. A file or a part of a Python object may have changed if `allow` names it, or
    if no round is finished. If the run has no record of inputs yet, the present ones are recorded.

    Raises:
        ConfigError: Inputs that may not change have changed; the message names all of them.
        RunDirError: The run was begun by a version of evo-grpo with other rules of evolution.
    """
    record_inputs(folder, config, objects)
    recorded, played = recorded_inputs.read_inputs_of(folder.path), folder.rounds()
    # The run would continue by other rules than it began with.
    removed = [n for n in map(".".join, REMOVED) if n in recorded.settings and not may_change(n)]
    if removed:
        raise RunDirError(
            f"{folder.path}: expected a run that this version began, got that of an earlier "
            f"version, with {', '.join(removed)}; finish it with evo-grpo "
            f"{recorded.software.get('evo-grpo')}, which began it, or start another run"
        )
    present, changes = _differences(folder.path, recorded, config, objects)
    refused = [
        change
        for change in changes
        if not _is_harmless(change, recorded, present)
        and not (rounds is not None and change.name == recorded_inputs.ROUNDS)
        # Before the first round is finished, no result depends on a file.
        and (played or change.kind == "settings")
    ]
    command = f"resume {folder.path}" if objects is None else None
    _refuse(folder.path, recorded, refused, allow, command)
    entries = [
        {"round": len(played), "name": change.name, "from": change.before, "to": change.after}
        for change in changes
    ]
    compared = {*recorded.settings, *(change.name for change in changes)}
    entries += [  # settings of a newer version, at their defaults
        {"round": len(played), "name": name, "from": None, "to": value}
        for name, value in present.settings.items()
        if name not in compared
    ]
    ended = any(record.is_end for record in played[-1:])
    if (
        rounds is not None
        and ended
        and all(change.name != recorded_inputs.ROUNDS for change in changes)
    ):
        # A rule ended the run before its planned number of rounds: play the remaining ones.
        entries.append(
            {"round": len(played), "name": recorded_inputs.ROUNDS, "from": rounds, "to": rounds}
        )
    notes = [
        f"{change.name} was {shown(change.before)} and is {shown(change.after)}: the rounds that "
        "follow may differ in rounding from those of a run that was never stopped"
        for change in changes
        if change.name in ROUNDING or change.kind == "software"
    ]
    present = replace(present, changes=(*recorded.changes, *entries))
    return Changed(recorded, present, config, rounds is not None, notes)


def check_inputs(
    folder: Path,
    config: RunConfig,
    *,
    command: str,
    allow: Iterable[str] = (),
    objects: Mapping[str, str] | None = None,
) -> None:
    """Check that a run's present inputs are the recorded ones; write nothing.

    Commands that use a run without continuing it call this. Changes that a resume permits are
    permitted here, too; a ConfigError names all other changes.
    """
    recorded = recorded_inputs.read_inputs_of(folder)
    present, changes = _differences(folder, recorded, config, objects)
    refused = [change for change in changes if not _is_harmless(change, recorded, present)]
    _refuse(folder, recorded, refused, allow, command if objects is None else None)


def record_changes(folder: RunDir, changes: Changed) -> None:
    """Write the inputs that a run has from now on to inputs.json, if any has changed."""
    if changes.now != changes.before:
        folder.write(INPUTS, seal(asdict(changes.now)))


def begun_extension(folder: RunDir) -> int | None:
    """Return a run's new number of rounds if no round of its extension is recorded yet, or None."""
    if not os.path.lexists(folder.path / INPUTS):
        return None
    changes = recorded_inputs.read_inputs_of(folder.path).changes_of_rounds(len(folder.rounds()))
    return int(changes[-1]["to"]) if changes else None


def changed_settings(
    recorded: recorded_inputs.Inputs, now: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Return (name, recorded value, present value) of each setting that differs from the record.

    A setting that is missing in the record counts as unchanged if it has its default.
    """
    return list(recorded_inputs.changed(_filled_in(recorded.settings) or recorded.settings, now))


def check_whole(folder: Path, recorded: recorded_inputs.Inputs) -> None:
    """Refuse a population.yaml that lacks a setting: its default would be taken silently."""
    present = dict(recorded_inputs.flat(run_folder.read_settings(folder)))
    # A setting of a newer version was never written to population.yaml.
    later = {change["name"] for change in recorded.changes if change["from"] is None}
    if missing := [name for name in recorded.settings if name not in {*present, *later}]:
        raise ConfigError(
            f"{folder / CONFIG}: expected every setting of the run, got none of "
            f"{', '.join(missing[:3])}{' and others' * (len(missing) > 3)}; put the file back"
        )


def may_change(name: str) -> bool:
    """Return whether a setting may change between two rounds; a resume records such a change."""
    return name in _ADJUSTABLE or name in ROUNDING


def _differences(
    folder: Path,
    recorded: recorded_inputs.Inputs,
    config: RunConfig,
    objects: Mapping[str, str] | None,
) -> tuple[recorded_inputs.Inputs, list[Change]]:
    """Return a run's present inputs and how they differ from the recorded ones.

    If `objects` is None, Python objects are not compared.
    """
    check_whole(folder, recorded)
    parts = recorded.objects if objects is None else objects
    # The places stay those of the start of the run.
    present = replace(
        recorded_inputs.inputs_of(config), id=recorded.id, places=recorded.places, objects=parts
    )
    changes = [
        Change("settings", *values) for values in changed_settings(recorded, present.settings)
    ]
    for kind in ("files", "software", "objects"):
        differing = recorded_inputs.changed(getattr(recorded, kind), getattr(present, kind))
        changes += [Change(kind, *values) for values in differing]
    # A part that the recording version did not have cannot be compared.
    return present, [change for change in changes if change.kind != "objects" or change.before]


def _is_harmless(
    change: Change, recorded: recorded_inputs.Inputs, now: recorded_inputs.Inputs
) -> bool:
    """Return whether a run may continue with a changed input that `allow` does not name."""
    name, before, after = change.name, change.before, change.after
    if change.kind == "files":  # new or gone: the file that imports it changed too
        return name not in recorded.files or name not in now.files
    if change.kind != "settings" or may_change(name):
        return change.kind != "objects"
    # The content of a data set at a new path is compared; its suffix decides how it is read.
    both_paths = name in recorded_inputs.DATA and isinstance(before, str) and isinstance(after, str)
    same_suffix = both_paths and Path(before).suffix.lower() == Path(after).suffix.lower()
    return same_suffix and recorded.files.get(name) is not None


def _refuse(
    folder: Path,
    recorded: recorded_inputs.Inputs,
    refused: Sequence[Change],
    allow: Iterable[str],
    command: str | None,
) -> None:
    """Raise a ConfigError with a sentence for each change in `refused`, unless `allow` names it.

    The sentence on a file or an object ends with a remedy: `command` with `--allow` options, or
    the argument `allow=` if `command` is None.
    """
    allowed, recorded_names = set(allow), {*recorded.files, *recorded.objects}
    if unknown := sorted(allowed - recorded_names):
        names = ", ".join(sorted(recorded_names)) or "none, for this run reads no file of yours"
        raise ConfigError(
            f"allow: expected names of files that the run reads ({names}), got {unknown[0]!r}"
        )
    refused = [
        change for change in refused if change.kind == "settings" or change.name not in allowed
    ]
    changed_names = {
        change.name for change in refused if change.kind != "settings" and change.after is not None
    }
    names = sorted(allowed | changed_names)
    options = "".join(f" --allow {name!r}" for name in names)
    go_on = f"allow={names}" if command is None else f"evo-grpo {command}{as_option()}{options}"
    sentences = [_sentence(change, go_on, recorded.places.get(change.name)) for change in refused]
    if sentences:
        source = f"{folder}: the run was begun with something else"
        raise Problems(*(Problem((), text) for text in sentences), source=source)


def _sentence(change: Change, go_on: str, place: str | None) -> str:
    name = f"the file of {change.name}" if change.kind == "files" else change.name
    both = f"{name} was {shown(change.before)} and is {shown(change.after)}"
    origin = "" if place is None else f" (the run was begun with {place})"
    if change.name == recorded_inputs.ROUNDS:
        return f"{both}; put it back, and give --rounds {change.after} to evo-grpo resume"
    if change.kind == "settings":
        return f"{both}; put it back in {CONFIG}, or start another run"
    if change.after is None:
        return (
            f"{name} is not there{origin}; put it back, go on from the folder in which the run was "
            "begun, or name the folder that has it with --code"
        )
    text = both
    if change.kind == "files" or str(change.before).startswith(DIGEST):
        text = f"{name} has changed{origin}"
    return f"{text}; put it back as it was, or go on with this: {go_on}"


def _filled_in(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return recorded settings with defaults added; None if this version refuses the settings."""
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        *groups, key = name.split(".")
        place = nested
        for group in groups:
            place = place.setdefault(group, {})
            if not isinstance(place, dict):  # a key chosen by the user contains a dot
                return dict(settings)
        place[key] = value
    try:
        return dict(
            recorded_inputs.flat(from_dict(with_current_keys(nested)).model_dump(mode="json"))
        )
    except ConfigError:
        return None

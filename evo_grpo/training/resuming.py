"""Decides with which inputs a stopped or extended run continues, before anything is recorded."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from evo_grpo import settings as configuration
from evo_grpo.errors import ConfigError, RunDirError
from evo_grpo.population.ranks.team import Team
from evo_grpo.record.folder import (
    config_text,
    listed_objects,
    read_config,
    refuse_objects,
    with_objects,
)
from evo_grpo.record.names import BASELINE, CONFIG
from evo_grpo.record.run_dir import RunDir
from evo_grpo.record.study import check_storage
from evo_grpo.record.summary import read_summary
from evo_grpo.schema.validation import whole
from evo_grpo.settings import RunConfig
from evo_grpo.training.resolve import check_ranks
from evo_grpo.training.resume_check import (
    Changed,
    begun_extension,
    compare_inputs,
    record_changes,
)


def continued_inputs(
    opened: RunDir, rounds: int | None, allow: Sequence[str], team: Team
) -> Changed | None:
    """Return the inputs that a run continues with, None if it is finished; record nothing."""
    if is_finished(opened, rounds):
        return None
    return changed_inputs(opened, _recorded_config(opened), rounds, allow, team)


def is_finished(opened: RunDir, rounds: int | None) -> bool:
    """Return whether a run is finished and `rounds` does not extend it."""
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
    """Return the inputs that an unfinished run continues with, `objects` among them."""
    played, begun = opened.rounds(), begun_extension(opened)
    if not played:
        check_storage(config.record.storage)
    if rounds is not None:
        _check_rounds(opened, rounds, begun or config.population.rounds)
    wanted = begun if rounds is None else rounds
    if wanted is not None:
        config = config.replace(population=config.population.replace(rounds=wanted))
    check_ranks(config, team)
    changed = compare_inputs(opened, config, rounds=wanted, allow=allow, objects=objects)
    for note in changed.notes:
        warnings.warn(note, UserWarning, stacklevel=2)
    return changed


def record_changed(opened: RunDir, changed: Changed) -> None:
    """Record the inputs that a run continues with."""
    # Record the inputs first: if the process stops after this call, a resume continues with them.
    record_changes(opened, changed)
    if changed.extended:
        text = with_objects(configuration.to_yaml(changed.config), listed_objects(opened.path))
        opened.write(CONFIG, text)
    if begun_extension(opened) is not None:
        opened.reopen()


def _recorded_config(opened: RunDir) -> RunConfig:
    """Return the settings of a run folder; refuse a folder that cannot be resumed."""
    refuse_objects(
        opened.path,
        "so no command can make them; continue it in Python, with env and the other objects as at "
        f"the begin of the run: evo_grpo.Population.resume({str(opened.path)!r}, env=...)",
    )
    refuse_part_of_comparison(opened.path)
    return read_config(opened.path)


def refuse_part_of_comparison(folder: Path) -> None:
    """Refuse a population of a comparison, which only the comparison continues."""
    if config_text(folder).startswith(BASELINE):
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

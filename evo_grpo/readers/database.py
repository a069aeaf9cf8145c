"""Where the Optuna study of a run is; `evo_grpo.record.study` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from evo_grpo.errors import ConfigError
from evo_grpo.readers.reader import id_of
from evo_grpo.record.config import read_config
from evo_grpo.record.folder import expect_run
from evo_grpo.record.names import STUDY
from evo_grpo.record.study import OPTUNA, study_name
from evo_grpo.settings import RecordConfig
from evo_grpo.settings.storage import is_url
from evo_grpo.training.inputs.recorded_inputs import read_inputs_of


def study_of(run: str | Path) -> tuple[str, str] | None:
    """Return the name and the storage URL of a run's study, for `optuna.load_study`.

    Args:
        run: The run folder.

    Returns:
        The name and the URL, or None if the study is a journal in the run folder.
    """
    folder = expect_run(run)
    config = read_config(folder)
    storage = config.record.storage
    if storage is None:
        return None
    name = study_name(config.name, read_inputs_of(folder).id)
    if not is_url(storage):
        return name, f"sqlite:///{folder / STUDY}"
    return id_of(folder, OPTUNA) or name, storage


def deliver(run: str | Path, *, storage: str | None = None) -> NoReturn:
    """Removed; use `follow`. This name will be removed in the next release.

    Raises:
        ConfigError: Always; the message has the equivalent call of `follow`.
    """
    if storage is not None:
        RecordConfig(storage=storage)  # raises for a URL with a password, without quoting it
    option, given = ("", "") if storage is None else (f" --storage {storage}", ", storage=...")
    raise ConfigError(
        f'deliver: was removed; call evo_grpo.follow("{run}", to=["{OPTUNA}"]{given}), or on the '
        f"command line: evo-grpo follow {run} --to {OPTUNA}{option}"
    )

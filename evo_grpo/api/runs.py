"""Defines `evo_grpo.run` and `evo_grpo.resume`, which show the progress of a run."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evo_grpo.api.calls import shown_progress
from evo_grpo.errors import EvoGrpoError
from evo_grpo.places import searching
from evo_grpo.population.ranks.ranks import sharing_early_errors
from evo_grpo.population.ranks.team import is_silent_rank
from evo_grpo.record.folder import beside, code_folder
from evo_grpo.record.observer import Observer, ObserverList, check_observer
from evo_grpo.record.view import view_of
from evo_grpo.settings import DoubtfulSetting, RunConfig, WithoutEffect
from evo_grpo.settings.run import doubts_of_run, without_effect_of_run
from evo_grpo.settings.yaml import as_config
from evo_grpo.training.run import resume as continue_run
from evo_grpo.training.run import run as play_run


class RunFolder(type(Path())):
    """The path of a run folder; a notebook displays it as the result of the run."""

    def _repr_html_(self) -> str | None:
        from evo_grpo.readers.report.run_page import as_html

        try:
            return as_html(view_of(Path(self)), f"run folder: {self}")
        except EvoGrpoError:  # shown like any other path
            return None


def run(
    config: RunConfig | str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    force: bool = False,
    observer: Observer | None = None,
    progress: bool | None = None,
) -> Path:
    """Train and evolve a population from its first round to its last.

    Requests of `evo-grpo steer` are carried out between two rounds. After `stop-after-round` the
    function returns before the last round; the folder then has no summary and can be resumed.

    Args:
        config: Settings of the run: a `RunConfig`, the path of a YAML file, or a mapping as in
            such a file, in which `env.train`, `env.validation` and `env.test` may be rows (a list
            of mappings, a pandas frame, a datasets.Dataset or DatasetDict) and `env.reward` may be
            functions. Files and modules that a YAML file names are found in the working folder or
            beside the YAML file.
        out: Run folder; None creates `runs/<name>-<n>`.
        force: Replace an existing run.
        observer: Gets the progress.
        progress: Whether to show progress and the result. None shows them in a terminal or a
            notebook unless there is an observer, True also in a pipe or a file, False nowhere.

    Returns:
        The run folder.

    Raises:
        EvoGrpoError: Any subclass. Most bad input is reported before the first round.
    """
    check_observer(observer or Observer())
    with sharing_early_errors():
        settings = as_config(config)
    place = beside(config)
    if not is_silent_rank():
        for finding in without_effect_of_run(settings):
            warnings.warn(str(finding), WithoutEffect, stacklevel=2)
        for doubt in doubts_of_run(settings):
            warnings.warn(doubt, DoubtfulSetting, stacklevel=2)

    def play(audience: Observer) -> Path:
        with searching(place):
            return play_run(settings, out=out, force=force, observer=audience)

    return _watched(play, progress, observer, settings.model.name)


def resume(
    folder: str | Path,
    *,
    rounds: int | None = None,
    allow: Sequence[str] = (),
    code: str | Path | None = None,
    observer: Observer | None = None,
    progress: bool | None = None,
) -> Path:
    """Continue a stopped run after its last whole round; leave a finished run unchanged.

    Adapter, reference, AdamW moments, hyperparameters and step counts of an agent are read from its
    last checkpoint; its member and history are read from rounds.jsonl. The selection and mutation
    that the last round recorded are then applied. Random streams are derived from the seed, so no
    generator state is stored.

    Args:
        folder: The run folder.
        rounds: Rounds of the whole run, in place of population.rounds. A finished run continues up
            to this number, with the result of a run that had this number from the start. The
            summary keeps the earlier result.
        allow: Files of yours that may have changed since the run began, named as in the error
            message, such as "env.reward: my_rewards:score".
        code: A further folder to search for the files and modules that the run names.
        observer: Gets the progress.
        progress: As for `run`.

    Returns:
        The run folder.

    Raises:
        RunDirError: `Population.train` recorded the run with objects that no file can name.
        ConfigError: The settings or files of the run have changed, or `rounds` is less than the
            finished rounds.
        CheckpointError: A file of the run is missing or was changed.
    """
    check_observer(observer or Observer())

    def play(audience: Observer) -> Path:
        with searching(code_folder(code), is_code=True):
            return continue_run(folder, rounds=rounds, allow=allow, observer=audience)

    return _watched(play, progress, observer, str(folder))


def _watched(
    play: Callable[[Observer], Path], progress: bool | None, observer: Observer | None, loaded: str
) -> RunFolder:
    """Call `play` with an observer that shows the progress and calls `observer`.

    `loaded` is the name of what is loaded first, for the display.
    """
    # Only the process of rank 0 shows the run: others may not see the folder.
    if is_silent_rank() or (progress is None and observer is not None):
        progress = False
    audience = observer or Observer()
    with shown_progress(progress) as screen:
        if screen is None:
            return RunFolder(play(audience))
        screen.loading(loaded)
        path = play(ObserverList((screen, audience)))
        screen.show_ending(view_of(path))
    return RunFolder(path)

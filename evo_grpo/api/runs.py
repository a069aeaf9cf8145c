"""`evo_grpo.run` and `evo_grpo.resume`: a run with its progress on a screen."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evo_grpo.population.ranks.ranks import telling_others
from evo_grpo.population.ranks.team import follows
from evo_grpo.readers.report.notebook import RunFolder
from evo_grpo.record.observer import Observer, Several, check_observer
from evo_grpo.record.view import view_of
from evo_grpo.settings import RunConfig, WithoutEffect
from evo_grpo.settings.run import without_effect_of_run
from evo_grpo.training.run import as_config
from evo_grpo.training.run import resume as continue_run
from evo_grpo.training.run import run as play_run


def run(
    config: RunConfig | str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    force: bool = False,
    observer: Observer | None = None,
    progress: bool | None = None,
) -> Path:
    """Train and evolve a population from its first round to its last.

    `evo-grpo steer` sends requests to the run folder, which are carried out between two rounds;
    after `stop-after-round` the function returns before the end, with a folder that can be resumed
    and has no summary.

    Args:
        config: What to run: a `RunConfig`, the path of a YAML file, or a mapping as in such a file.
        out: Run folder; None makes a fresh `runs/<name>-<n>`.
        force: Replace a run that is already there.
        observer: Follows the progress.
        progress: Show progress and the result; None does in a terminal and in a notebook where no
            observer follows, True also in a pipe or a file, False nowhere.

    Returns:
        The run folder.

    Raises:
        EvoGrpoError: Any subclass; bad input is found before the first round where it can be.
    """
    check_observer(observer or Observer())
    with telling_others():
        settings = as_config(config)
    for finding in () if follows() else without_effect_of_run(settings):
        warnings.warn(str(finding), WithoutEffect, stacklevel=2)

    def play(audience: Observer) -> Path:
        return play_run(settings, out=out, force=force, observer=audience)

    return _watched(play, progress, observer, settings.model.name)


def resume(
    folder: str | Path,
    *,
    rounds: int | None = None,
    allow: Sequence[str] = (),
    observer: Observer | None = None,
    progress: bool | None = None,
) -> Path:
    """Continue a stopped run after its last whole round; a finished run is left as it is.

    An agent's adapter, reference, AdamW moments, hyperparameters and step counts come from its last
    checkpoint; its member and history from rounds.jsonl. The last round's recorded selection and
    mutation are then applied. No generator state is stored: random streams follow from the seed.

    Args:
        folder: The run folder.
        rounds: Rounds of the whole run, in place of population.rounds; a finished run continues
            with them, as if it had had so many from the start. Its end so far is kept in the
            summary.
        allow: Files of yours that may have changed since the run began, by the names that the error
            gives which a change raises without this, such as "env.reward: my_rewards:score".
        observer: Follows the progress.
        progress: As for `run`.

    Returns:
        The run folder.

    Raises:
        RunDirError: `Population.train` recorded it with objects that no file can name.
        ConfigError: What the run is made of has changed, or `rounds` are fewer than were played.
        CheckpointError: A file of the run is missing or was changed.
    """
    check_observer(observer or Observer())

    def play(audience: Observer) -> Path:
        return continue_run(folder, rounds=rounds, allow=allow, observer=audience)

    return _watched(play, progress, observer, str(folder))


def _watched(
    play: Callable[[Observer], Path], progress: bool | None, observer: Observer | None, loaded: str
) -> RunFolder:
    """Play a run with an observer for the screen, and that of the caller."""
    # The first rank shows the run for all: another one may not even see the folder.
    if follows() or progress is False or (progress is None and observer is not None):
        return RunFolder(play(observer or Observer()))
    from evo_grpo.readers.terminal import (
        progress as terminal,  # rich, which a silent call does without
    )

    with terminal.progress(anywhere=progress is True) as screen:
        screen.loading(loaded)
        path = play(Several((screen, observer or Observer())))
        screen.show_ending(view_of(path))
    return RunFolder(path)

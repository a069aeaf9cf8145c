"""A copy of the study of a run, made from its records and kept up with them.

A copy, and not the study itself: optuna-dashboard can rename and delete studies, tell trials and
write attributes, and keeps notes and figures as attributes of the study. In the run's own each
of them would differ from the rounds, so that `verify` finds damage and a resume writes the study
anew, without the notes. A copy needs no password of a server either, and also shows runs that keep
no trials.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from evo_grpo import settings as configuration
from evo_grpo.dashboard.notes import study_note, trial_note
from evo_grpo.errors import EngineUnavailable
from evo_grpo.record.folder import expect_run, parse_rounds
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.names import CONFIG, JOURNAL, ROUNDS
from evo_grpo.report.figures.lineage import plot_lineage
from evo_grpo.studies import study_of

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import InMemoryStorage

    from evo_grpo.record.records import RoundRecord

FIGURE = "lineage"
"""Id of the figure in the dashboard."""


@dataclass(frozen=True)
class _Trial:
    """A finished trial as `save_note` asks for one: `optuna.Trial` would begin to sample."""

    storage: Any
    study: Any
    _trial_id: int


@final
class StudyCopy:
    """The study of a run in memory, with notes and the family tree.

    Args:
        run: The run folder, finished or not.

    Attributes:
        storage: What optuna-dashboard shows.
        rounds: The finished rounds that it holds.

    Raises:
        RunNotFoundError: It is no run folder.
        CheckpointError: Its records are damaged.
        EngineUnavailable: optuna-dashboard or plotly is not installed.
    """

    def __init__(self, run: str | Path) -> None:
        check_dashboard()
        from optuna.storages import InMemoryStorage

        self._folder = expect_run(run)
        config = configuration.load(self._folder / CONFIG)
        self.storage: InMemoryStorage = InMemoryStorage()
        self.rounds: list[RoundRecord] = []
        self._length = 0
        space = config.agents().search_space()
        self._lineage = Lineage(self.storage, self._folder.resolve().name, space)
        self._study: Study = self._lineage.study  # pyright: ignore[reportAttributeAccessIssue] -- that of a storage
        # Untyped, since it need not be there where this is checked.
        self._pages: Any = import_module("optuna_dashboard")
        # What `Study.set_metric_names` does, which warns that it is experimental.
        self.storage.set_study_system_attr(
            self._study._study_id,  # pyright: ignore[reportPrivateUsage] -- as above
            "study:metric_names",
            ["fitness"],
        )
        self._pages.save_note(
            self._study, study_note(self._folder, config, _original(self._folder))
        )
        self.update()

    def update(self) -> bool:
        """Take in the rounds that were finished since; returns whether there were any."""
        path = self._folder / ROUNDS
        found, length = parse_rounds(path, start=self._length, first=len(self.rounds))
        self._length += length
        for record in found:
            before = len(self._study.trials)
            self._lineage.record(record)
            by_agent = {agent.agent: agent for agent in record.agents}
            for trial in self._study.trials[before:]:
                note = trial_note(by_agent[trial.user_attrs["agent"]], record)
                self._pages.save_note(_Trial(self.storage, self._study, trial._trial_id), note)  # pyright: ignore[reportArgumentType, reportPrivateUsage] -- as it uses them
            self.rounds.append(record)
        if found:
            # A panel of the dashboard has a height of its own, and room below.
            tree = plot_lineage(self.rounds).update_layout(
                title="Family tree",
                height=None,
                margin={"t": 60},
                legend={"yanchor": "top", "y": -0.3},
            )
            self._pages.save_plotly_graph_object(self._study, tree, graph_object_id=FIGURE)
        return bool(found)


def check_dashboard() -> None:
    """Refuse where a package that a dashboard needs is missing.

    Raises:
        EngineUnavailable: It says what to install.
    """
    from importlib.util import find_spec

    missing = [name for name in ("optuna_dashboard", "plotly") if find_spec(name) is None]
    if missing:
        raise EngineUnavailable(
            f"dashboard: {' and '.join(missing)} cannot be imported here; "
            'pip install "evo-grpo[dashboard]"'
        )


def _original(folder: Path) -> str:
    found = study_of(folder)
    if found is not None:
        return f"{found[1]} ({found[0]})"
    return str(folder / JOURNAL) if (folder / JOURNAL).is_file() else ""

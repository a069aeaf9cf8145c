"""A copy of the study of a run in memory, read from its log.

A copy, and not the study itself: optuna-dashboard can rename and delete studies, change trials and
write attributes, and keeps notes and figures as attributes of the study. A resume would make the
run's own study anew from the rounds, without them. A copy needs no password of a server either, and
also shows runs that keep no trials.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, final

from evo_grpo.errors import EngineUnavailable
from evo_grpo.readers.report.figures.lineage import plot_lineage
from evo_grpo.record import columns
from evo_grpo.record.config import read_config
from evo_grpo.record.folder import expect_run
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.log import START, RoundDone, RunFinished, entries
from evo_grpo.record.study import open_study
from evo_grpo.record.view import RunView, view_of
from evo_grpo.record.wording import measured_on
from evo_grpo.schema.shown import shown_value

if TYPE_CHECKING:
    from evo_grpo.record.records import AgentRecord, RoundRecord

FIGURE = "lineage"
"""Id of the figure in the dashboard."""


@final
class StudyCopy:
    """Reads the log of a run into a study in memory, with notes and the family tree.

    Args:
        run: The run folder, finished or not.

    Attributes:
        storage: The storage that optuna-dashboard reads.

    Raises:
        RunNotFoundError: `run` is not a run folder.
        EngineUnavailable: optuna-dashboard or plotly is not installed.
    """

    def __init__(self, run: str | Path) -> None:
        try:
            # Untyped: type checkers may not have the package.
            self._pages: Any = import_module("optuna_dashboard")
        except ImportError as error:
            raise EngineUnavailable(
                f"dashboard: optuna_dashboard cannot be imported here ({error}); "
                'pip install "evo-grpo[dashboard]"'
            ) from error
        from optuna.storages import InMemoryStorage

        self._folder = expect_run(run)
        self._config = read_config(self._folder)
        self.storage = InMemoryStorage()
        self._begin()
        self.update()

    def _begin(self) -> None:
        """Make the study, before any entry of the log is read."""
        self._cursor = START
        self._last: RoundRecord | None = None
        further = self._config.evolve.fitness.further
        self._study = open_study(self.storage, self._folder.resolve().name, further=further)
        self._lineage = Lineage(self._study, self._config.search_space())
        self._show()

    def update(self) -> None:
        """Read the entries that the run has appended since the last call.

        A study that was deleted in the dashboard is made anew.
        """
        try:
            self._study.get_trials(deepcopy=False)
        except KeyError:  # the storage has no such study
            self._begin()
        before = self._cursor
        for self._cursor, entry in entries(self._folder, self._cursor):  # noqa: B020 -- it moves on
            if isinstance(entry, RoundDone):
                self._add(entry.record)
            elif isinstance(entry, RunFinished) and self._last is not None:
                self._lineage.record_mean(entry.summary, self._last)
        if self._cursor != before:
            self._show()

    def _show(self) -> None:
        """Write the note of the study and the family tree."""
        view = view_of(self._folder)
        if view.rounds:
            # A panel of the dashboard sets the height, and has room below.
            tree = plot_lineage(view).update_layout(
                title="Family tree",
                height=None,
                margin={"t": 60},
                legend={"yanchor": "top", "y": -0.3},
            )
            self._pages.save_plotly_graph_object(self._study, tree, graph_object_id=FIGURE)
        # After the figure, so that whoever reads the winner's name finds the whole tree.
        self._pages.save_note(self._study, study_note(self._folder, view))

    def _add(self, record: RoundRecord) -> None:
        by_agent = {agent.agent: agent for agent in record.agents}
        for trial in self._lineage.record(record):
            note = trial_note(by_agent[trial.user_attrs["agent"]], record)
            # `save_note` takes an `optuna.Trial`, whose constructor would start sampling.
            noted = SimpleNamespace(
                storage=self.storage,
                study=self._study,
                _trial_id=trial._trial_id,  # pyright: ignore[reportPrivateUsage] -- as it uses it
            )
            self._pages.save_note(noted, note)
        self._last = record


def trial_note(agent: AgentRecord, record: RoundRecord) -> str:
    """Return the note of a trial: its agent, parent, fitness, and the decisions about it."""
    lines = [f"**Agent {agent.agent} in round {record.round + 1}**, member {agent.member}", ""]
    if agent.parent is None:
        lines.append("- of the first population")
    else:
        lines.append(f"- from member {agent.parent}: {agent.mutation.op}")
    lines += [
        f"- {name}: {shown_value(old)} → {shown_value(new)}"
        for name, (old, new) in agent.mutation.changes.items()
    ]
    if agent.state == "ok" and agent.score is not None:
        fitness, error = columns.fitness(agent), columns.fitness_se(agent)
        of = f", on {measured_on(agent.score)}: nothing was decided" if record.between else ""
        lines.append(f"- fitness {fitness:.4f} ± {error:.4f}{of}")
    else:
        lines.append(f"- failed: {_plain(agent.reason)}")
    decided = (one.sentence for one in record.decisions if one.agent == agent.agent)
    return "\n".join([*lines, *(f"- {_plain(sentence)}" for sentence in decided)])


def study_note(folder: Path, view: RunView) -> str:
    """Return the note of the study: the run, its story, and that this is a copy."""
    heading = list[str]()
    if (config := view.settings) is not None:
        population = config.population
        heading = [
            f"**{_plain(config.name)}**: {_code(config.model.name)} on {_code(config.env.kind)}, "
            f"{population.size} agents, {population.rounds} rounds of "
            f"{population.steps_per_round} steps, seed {config.seed}",
            "",
        ]
    ending = (
        f"A copy of the run in {_code(str(folder))}, made from its records and kept up to date "
        "with them. Changes that you make here are lost when this dashboard ends."
    )
    return "\n".join([*heading, *(_plain(one.text) + "\n" for one in view.story), ending])


def _plain(text: str) -> str:
    """Return a text with the characters escaped that mark up Markdown or HTML."""
    return "".join(f"&#{ord(one)};" if one in "<>&`*_[]()|\\" else one for one in text)


def _code(text: str) -> str:
    return f"`{text.replace('`', '')}`"

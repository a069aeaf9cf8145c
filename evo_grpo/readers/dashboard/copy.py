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
from evo_grpo.readers.database import add_mean, study_of
from evo_grpo.readers.report.figures.lineage import plot_lineage
from evo_grpo.record import columns
from evo_grpo.record.config import read_config
from evo_grpo.record.folder import expect_run
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.log import START, RoundDone, RunFinished, entries
from evo_grpo.record.names import JOURNAL
from evo_grpo.record.study import open_study

if TYPE_CHECKING:
    from evo_grpo.record.records import AgentRecord, RoundRecord
    from evo_grpo.settings import RunConfig

FIGURE = "lineage"
"""Id of the figure in the dashboard."""


@final
class StudyCopy:
    """Reads the log of a run into a study in memory, with notes and the family tree.

    Args:
        run: The run folder, finished or not.

    Attributes:
        storage: What optuna-dashboard shows.

    Raises:
        RunNotFoundError: It is no run folder.
        EngineUnavailable: optuna-dashboard or plotly is not installed.
    """

    def __init__(self, run: str | Path) -> None:
        check_dashboard()
        from optuna.storages import InMemoryStorage

        self._folder = folder = expect_run(run)
        config = read_config(folder)
        self.storage = InMemoryStorage()
        self._cursor = START
        self._rounds: list[RoundRecord] = []
        self._study = open_study(self.storage, folder.resolve().name)
        self._lineage = Lineage(self._study, config.search_space())
        # Untyped, since it need not be there where this is checked.
        self._pages: Any = import_module("optuna_dashboard")
        self._pages.save_note(self._study, study_note(folder, config, _original(folder)))
        self.update()

    def update(self) -> None:
        """Read what the run has said since."""
        before = len(self._rounds)
        for self._cursor, entry in entries(self._folder, self._cursor):  # noqa: B020 -- it moves on
            if isinstance(entry, RoundDone):
                self._add(entry.record)
            elif isinstance(entry, RunFinished) and self._rounds:
                add_mean(self._lineage, entry.summary, self._rounds[-1])
        if len(self._rounds) > before:
            # A panel of the dashboard has a height of its own, and room below.
            tree = plot_lineage(self._rounds).update_layout(
                title="Family tree",
                height=None,
                margin={"t": 60},
                legend={"yanchor": "top", "y": -0.3},
            )
            self._pages.save_plotly_graph_object(self._study, tree, graph_object_id=FIGURE)

    def _add(self, record: RoundRecord) -> None:
        by_agent = {agent.agent: agent for agent in record.agents}
        for trial in self._lineage.record(record):
            note = trial_note(by_agent[trial.user_attrs["agent"]], record)
            # `save_note` asks for an `optuna.Trial`, which would begin to sample.
            noted = SimpleNamespace(
                storage=self.storage,
                study=self._study,
                _trial_id=trial._trial_id,  # pyright: ignore[reportPrivateUsage] -- as it uses it
            )
            self._pages.save_note(noted, note)
        self._rounds[record.round :] = [record]  # it comes again where its plan changed


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


def trial_note(agent: AgentRecord, record: RoundRecord) -> str:
    """Return who an agent is, what it descends from, and what was decided about it."""
    lines = [f"**Agent {agent.agent} in round {record.round + 1}**, member {agent.member}", ""]
    if agent.parent is None:
        lines.append("- of the first population")
    else:
        lines.append(f"- from member {agent.parent}: {agent.mutation.op}")
    lines += [f"- {name}: {old:g} → {new:g}" for name, (old, new) in agent.mutation.changes.items()]
    if agent.state == "ok" and agent.score is not None:
        fitness, error = columns.fitness(agent), columns.fitness_se(agent)
        lines.append(f"- fitness {fitness:.4f} ± {error:.4f}")
    else:
        lines.append(f"- failed: {_plain(agent.reason)}")
    decided = (one.sentence for one in record.decisions if one.agent == agent.agent)
    return "\n".join([*lines, *(f"- {_plain(sentence)}" for sentence in decided)])


def study_note(folder: Path, config: RunConfig, original: str) -> str:
    """Return what a run is, and what this copy of its study is not.

    `original` is where the study itself is kept, empty where there is none.
    """
    population = config.population
    kept = f" The study itself is in {_code(original)}." if original else ""
    return "\n".join(
        [
            f"**{_plain(config.name)}**: {_code(config.model.name)} on {_code(config.env.kind)}, "
            f"{population.size} agents, {population.rounds} rounds of "
            f"{population.steps_per_round} steps, seed {config.seed}",
            "",
            f"A copy of the run in {_code(str(folder))}, made from its records and kept up with "
            f"them. What you change here is gone when this dashboard ends.{kept}",
        ]
    )


def _plain(text: str) -> str:
    """Return a text without what Markdown or HTML would take for markup."""
    return "".join(f"&#{ord(one)};" if one in "<>&`*_[]()|\\" else one for one in text)


def _code(text: str) -> str:
    return f"`{text.replace('`', '')}`"

"""An evolving population of GRPO agents over one shared language model.

The public names are loaded on first use: `import evo_grpo` is fast and does not import torch.
Scripts written for AgileRL import from `evo_grpo.agilerl` instead.
"""

from __future__ import annotations

# This module imports nothing, not even `typing`: the command `evo-grpo` cannot handle Ctrl-C before
# this module is loaded.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from evo_grpo.analysis.arms import compare as compare
    from evo_grpo.analysis.arms import replay as replay
    from evo_grpo.analysis.export.export import export as export
    from evo_grpo.analysis.recipe import recipe as recipe
    from evo_grpo.analysis.sampling.answers import sample as sample
    from evo_grpo.analysis.sampling.evaluation import evaluate_adapter as evaluate_adapter
    from evo_grpo.analysis.sampling.first_step import try_config as try_config
    from evo_grpo.api.agent import CISPO as CISPO
    from evo_grpo.api.agent import GRPO as GRPO
    from evo_grpo.api.agent import GSPO as GSPO
    from evo_grpo.api.calls import resume as resume
    from evo_grpo.api.calls import run as run
    from evo_grpo.api.population import Population as Population
    from evo_grpo.envs.builtin.dataset import DatasetEnv as DatasetEnv
    from evo_grpo.envs.episodes.gym import MultiTurnGym as MultiTurnGym
    from evo_grpo.envs.episodes.multi_turn import MultiTurnEnv as MultiTurnEnv
    from evo_grpo.envs.episodes.multi_turn import TokenObservationWrapper as TokenObservationWrapper
    from evo_grpo.envs.single_turn import ReasoningGym as ReasoningGym
    from evo_grpo.evolve.explore.mutate import Mutations as Mutations
    from evo_grpo.evolve.explore.on_copy import LowerLROnCopy as LowerLROnCopy
    from evo_grpo.evolve.explore.on_copy import NoExploration as NoExploration
    from evo_grpo.evolve.explore.optuna import OptunaExploration as OptunaExploration
    from evo_grpo.evolve.explore.resample import Resample as Resample
    from evo_grpo.evolve.explore.schedule import ScheduleExploration as ScheduleExploration
    from evo_grpo.evolve.protocols import Candidate as Candidate
    from evo_grpo.evolve.protocols import Explorer as Explorer
    from evo_grpo.evolve.protocols import Offspring as Offspring
    from evo_grpo.evolve.protocols import Selector as Selector
    from evo_grpo.evolve.protocols import Trial as Trial
    from evo_grpo.evolve.select.halving import HalvingSelection as HalvingSelection
    from evo_grpo.evolve.select.halving import NoSelection as NoSelection
    from evo_grpo.evolve.select.pareto import ParetoSelection as ParetoSelection
    from evo_grpo.evolve.select.tournament import TournamentSelection as TournamentSelection
    from evo_grpo.evolve.select.truncation import TruncationSelection as TruncationSelection
    from evo_grpo.readers.follow import follow as follow
    from evo_grpo.readers.follow import study_of as study_of
    from evo_grpo.readers.report.figures.diagnostics import plot_diagnostics as plot_diagnostics
    from evo_grpo.readers.report.figures.lineage import plot_lineage as plot_lineage
    from evo_grpo.readers.report.figures.rounds import plot_fitness as plot_fitness
    from evo_grpo.readers.report.figures.rounds import plot_schedules as plot_schedules
    from evo_grpo.readers.report.run_page import write_report as write_report
    from evo_grpo.readers.trackers.base import Tracker as Tracker
    from evo_grpo.record.history import history as history
    from evo_grpo.record.history import read_metrics as read_metrics
    from evo_grpo.record.leaderboard import leaderboard as leaderboard
    from evo_grpo.record.observer import Observer as Observer
    from evo_grpo.schema.search_space import HyperparameterConfig as HyperparameterConfig
    from evo_grpo.schema.search_space import RLParameter as RLParameter
    from evo_grpo.settings import RunConfig as RunConfig

__version__ = "0.3.0.dev0"

_HOME = {
    "CISPO": "evo_grpo.api.agent",
    "GRPO": "evo_grpo.api.agent",
    "GSPO": "evo_grpo.api.agent",
    "Candidate": "evo_grpo.evolve.protocols",
    "DatasetEnv": "evo_grpo.envs.builtin.dataset",
    "Explorer": "evo_grpo.evolve.protocols",
    "HalvingSelection": "evo_grpo.evolve.select.halving",
    "HyperparameterConfig": "evo_grpo.schema.search_space",
    "LowerLROnCopy": "evo_grpo.evolve.explore.on_copy",
    "MultiTurnEnv": "evo_grpo.envs.episodes.multi_turn",
    "MultiTurnGym": "evo_grpo.envs.episodes.gym",
    "Mutations": "evo_grpo.evolve.explore.mutate",
    "NoExploration": "evo_grpo.evolve.explore.on_copy",
    "NoSelection": "evo_grpo.evolve.select.halving",
    "Observer": "evo_grpo.record.observer",
    "Offspring": "evo_grpo.evolve.protocols",
    "OptunaExploration": "evo_grpo.evolve.explore.optuna",
    "ParetoSelection": "evo_grpo.evolve.select.pareto",
    "Population": "evo_grpo.api.agent",
    "RLParameter": "evo_grpo.schema.search_space",
    "ReasoningGym": "evo_grpo.envs.single_turn",
    "Resample": "evo_grpo.evolve.explore.resample",
    "ScheduleExploration": "evo_grpo.evolve.explore.schedule",
    "RunConfig": "evo_grpo.settings",
    "Selector": "evo_grpo.evolve.protocols",
    "TokenObservationWrapper": "evo_grpo.envs.episodes.multi_turn",
    "TournamentSelection": "evo_grpo.evolve.select.tournament",
    "Tracker": "evo_grpo.readers.trackers.base",
    "Trial": "evo_grpo.evolve.protocols",
    "TruncationSelection": "evo_grpo.evolve.select.truncation",
    "compare": "evo_grpo.analysis.arms",
    "evaluate_adapter": "evo_grpo.analysis.sampling.evaluation",
    "export": "evo_grpo.analysis.export.export",
    "follow": "evo_grpo.readers.follow",
    "history": "evo_grpo.record.history",
    "leaderboard": "evo_grpo.record.leaderboard",
    "plot_diagnostics": "evo_grpo.readers.report.figures.diagnostics",
    "plot_fitness": "evo_grpo.readers.report.figures.rounds",
    "plot_lineage": "evo_grpo.readers.report.figures.lineage",
    "plot_schedules": "evo_grpo.readers.report.figures.rounds",
    "read_metrics": "evo_grpo.record.history",
    "recipe": "evo_grpo.analysis.recipe",
    "replay": "evo_grpo.analysis.arms",
    "resume": "evo_grpo.api.calls",
    "run": "evo_grpo.api.calls",
    "sample": "evo_grpo.analysis.sampling.answers",
    "study_of": "evo_grpo.readers.follow",
    "try_config": "evo_grpo.analysis.sampling.first_step",
    "write_report": "evo_grpo.readers.report.run_page",
}

__all__ = [*_HOME]  # pyright: ignore[reportUnsupportedDunderAll] -- the names are imported above


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- any public object
    if name not in _HOME:
        raise AttributeError(
            f"module 'evo_grpo' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    import importlib

    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

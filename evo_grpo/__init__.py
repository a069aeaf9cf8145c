"""An evolving population of GRPO agents over one shared language model.

The public names load on first use, so that `import evo_grpo` costs nothing and pulls in no torch.
Coming from AgileRL, change the import to `evo_grpo.agilerl`.
"""

from __future__ import annotations

# Nothing is imported here, not even `typing`: the command `evo-grpo` handles Ctrl-C as soon as this
# module is loaded, and not before.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from evo_grpo.api.agent import CISPO, GRPO, GSPO
    from evo_grpo.api.population import Population
    from evo_grpo.baselines import compare
    from evo_grpo.envs.episodes.gym import MultiTurnGym
    from evo_grpo.envs.episodes.multi_turn import MultiTurnEnv, TokenObservationWrapper
    from evo_grpo.envs.single_turn import ReasoningGym
    from evo_grpo.evolve.explore.mutate import Mutations
    from evo_grpo.evolve.explore.none import NoExploration
    from evo_grpo.evolve.explore.on_copy import LowerLROnCopy
    from evo_grpo.evolve.explore.optuna import OptunaExploration
    from evo_grpo.evolve.explore.protocol import Candidate, Explorer, Trial
    from evo_grpo.evolve.explore.resample import Resample
    from evo_grpo.evolve.select.halving import HalvingSelection
    from evo_grpo.evolve.select.none import NoSelection
    from evo_grpo.evolve.select.protocol import Offspring, Selector
    from evo_grpo.evolve.select.tournament import TournamentSelection
    from evo_grpo.evolve.select.truncation import TruncationSelection
    from evo_grpo.exporting.export import export
    from evo_grpo.record.history import history
    from evo_grpo.record.leaderboard import leaderboard
    from evo_grpo.record.observer import Observer
    from evo_grpo.record.step_metrics import read_metrics
    from evo_grpo.replaying import replay
    from evo_grpo.report.figures.diagnostics import plot_diagnostics
    from evo_grpo.report.figures.fitness import plot_fitness
    from evo_grpo.report.figures.lineage import plot_lineage
    from evo_grpo.report.figures.schedules import plot_schedules
    from evo_grpo.report.run_page import write_report
    from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter
    from evo_grpo.settings import RunConfig
    from evo_grpo.studies import deliver
    from evo_grpo.training import resume, run
    from evo_grpo.trying.answers import sample
    from evo_grpo.trying.evaluation import evaluate_adapter

__version__ = "0.2.0"

_HOME = {
    "CISPO": "evo_grpo.api.agent",
    "Candidate": "evo_grpo.evolve.explore.protocol",
    "Explorer": "evo_grpo.evolve.explore.protocol",
    "GRPO": "evo_grpo.api.agent",
    "GSPO": "evo_grpo.api.agent",
    "HalvingSelection": "evo_grpo.evolve.select.halving",
    "HyperparameterConfig": "evo_grpo.schema.search_space",
    "LowerLROnCopy": "evo_grpo.evolve.explore.on_copy",
    "MultiTurnEnv": "evo_grpo.envs.episodes.multi_turn",
    "MultiTurnGym": "evo_grpo.envs.episodes.gym",
    "Mutations": "evo_grpo.evolve.explore.mutate",
    "NoExploration": "evo_grpo.evolve.explore.none",
    "NoSelection": "evo_grpo.evolve.select.none",
    "Observer": "evo_grpo.record.observer",
    "Offspring": "evo_grpo.evolve.select.protocol",
    "OptunaExploration": "evo_grpo.evolve.explore.optuna",
    "Population": "evo_grpo.api.agent",
    "RLParameter": "evo_grpo.schema.search_space",
    "ReasoningGym": "evo_grpo.envs.single_turn",
    "Resample": "evo_grpo.evolve.explore.resample",
    "RunConfig": "evo_grpo.settings",
    "Selector": "evo_grpo.evolve.select.protocol",
    "TokenObservationWrapper": "evo_grpo.envs.episodes.multi_turn",
    "TournamentSelection": "evo_grpo.evolve.select.tournament",
    "Trial": "evo_grpo.evolve.explore.protocol",
    "TruncationSelection": "evo_grpo.evolve.select.truncation",
    "compare": "evo_grpo.baselines",
    "deliver": "evo_grpo.studies",
    "evaluate_adapter": "evo_grpo.trying.evaluation",
    "export": "evo_grpo.exporting.export",
    "history": "evo_grpo.record.history",
    "leaderboard": "evo_grpo.record.leaderboard",
    "read_metrics": "evo_grpo.record.step_metrics",
    "plot_diagnostics": "evo_grpo.report.figures.diagnostics",
    "plot_fitness": "evo_grpo.report.figures.fitness",
    "plot_lineage": "evo_grpo.report.figures.lineage",
    "plot_schedules": "evo_grpo.report.figures.schedules",
    "replay": "evo_grpo.replaying",
    "resume": "evo_grpo.training",
    "run": "evo_grpo.training",
    "write_report": "evo_grpo.report.run_page",
    "sample": "evo_grpo.trying.answers",
}

__all__ = [
    "CISPO",
    "GRPO",
    "GSPO",
    "Candidate",
    "Explorer",
    "HalvingSelection",
    "HyperparameterConfig",
    "LowerLROnCopy",
    "MultiTurnEnv",
    "MultiTurnGym",
    "Mutations",
    "NoExploration",
    "NoSelection",
    "Observer",
    "Offspring",
    "OptunaExploration",
    "Population",
    "RLParameter",
    "ReasoningGym",
    "Resample",
    "RunConfig",
    "Selector",
    "TokenObservationWrapper",
    "TournamentSelection",
    "Trial",
    "TruncationSelection",
    "compare",
    "deliver",
    "evaluate_adapter",
    "export",
    "history",
    "leaderboard",
    "plot_diagnostics",
    "plot_fitness",
    "plot_lineage",
    "plot_schedules",
    "read_metrics",
    "replay",
    "resume",
    "run",
    "sample",
    "write_report",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- whatever the name stands for
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

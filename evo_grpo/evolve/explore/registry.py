"""The explorations that settings can name. A new one is a module here and a line below."""

from typing import Annotated

from pydantic import Tag

from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.explore.none import NoExploration
from evo_grpo.evolve.explore.on_copy import LowerLROnCopy
from evo_grpo.evolve.explore.optuna import OptunaExploration
from evo_grpo.evolve.explore.resample import Resample
from evo_grpo.evolve.explore.schedule import ScheduleExploration
from evo_grpo.evolve.kinds import OWN, OwnStrategy, by_kind, kind_or_settings

Exploration = Annotated[
    Annotated[Mutations, Tag("mutate")]
    | Annotated[LowerLROnCopy, Tag("on_copy")]
    | Annotated[Resample, Tag("resample")]
    | Annotated[OptunaExploration, Tag("optuna")]
    | Annotated[ScheduleExploration, Tag("schedule")]
    | Annotated[NoExploration, Tag("none")]
    | Annotated[OwnStrategy, Tag(OWN)],
    by_kind,
    kind_or_settings("mutate", method="explore"),
]
"""The setting `evolve.exploration`: a kind, a mapping with a kind, or the name of a class."""

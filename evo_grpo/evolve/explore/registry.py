"""The explorations that settings can name. A new one is a file beside this one and a line here."""

from typing import Annotated

from pydantic import Field

from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.explore.none import NoExploration
from evo_grpo.evolve.explore.on_copy import LowerLROnCopy
from evo_grpo.evolve.explore.optuna import OptunaExploration
from evo_grpo.evolve.explore.resample import Resample
from evo_grpo.evolve.kinds import kind_or_settings

Exploration = Annotated[
    Mutations | LowerLROnCopy | Resample | OptunaExploration | NoExploration,
    Field(discriminator="kind"),
    kind_or_settings("mutate"),
]
"""The setting `evolve.exploration`: a kind, a mapping of settings, or a strategy."""

"""The selections that settings can name. A new one is a file beside this one and a line here."""

from typing import Annotated

from pydantic import Field

from evo_grpo.evolve.kinds import kind_or_settings
from evo_grpo.evolve.select.halving import HalvingSelection
from evo_grpo.evolve.select.none import NoSelection
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.evolve.select.truncation import TruncationSelection

Selection = Annotated[
    TournamentSelection | TruncationSelection | HalvingSelection | NoSelection,
    Field(discriminator="kind"),
    kind_or_settings("tournament"),
]
"""The setting `evolve.selection`: a kind, a mapping of settings, or a strategy."""

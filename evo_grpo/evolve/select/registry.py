"""The selections that settings can name. A new one is a module here and a line below."""

from typing import Annotated

from pydantic import Tag

from evo_grpo.evolve.kinds import OWN, OwnStrategy, by_kind, kind_or_settings
from evo_grpo.evolve.select.halving import HalvingSelection
from evo_grpo.evolve.select.none import NoSelection
from evo_grpo.evolve.select.pareto import ParetoSelection
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.evolve.select.truncation import TruncationSelection

Selection = Annotated[
    Annotated[TournamentSelection, Tag("tournament")]
    | Annotated[TruncationSelection, Tag("truncation")]
    | Annotated[HalvingSelection, Tag("halving")]
    | Annotated[ParetoSelection, Tag("pareto")]
    | Annotated[NoSelection, Tag("none")]
    | Annotated[OwnStrategy, Tag(OWN)],
    by_kind,
    kind_or_settings("tournament", method="plan"),
]
"""The setting `evolve.selection`: a kind, a mapping with a kind, or the name of a class."""

"""What every selection keeps, for each strategy that settings can name."""

from typing import get_args

import pytest
from hypothesis import strategies as st
from selector_contract import SelectorContract

from evo_grpo.evolve.kinds import OwnStrategy, Selection
from evo_grpo.evolve.select.halving import HalvingSelection, NoSelection
from evo_grpo.evolve.select.pareto import ParetoSelection
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.evolve.select.truncation import TruncationSelection

#: Many selections of each kind. A new strategy has a line here, and passes.
SELECTIONS = {
    TournamentSelection: st.builds(
        TournamentSelection, size=st.integers(1, 14), elitism=st.booleans()
    ),
    TruncationSelection: st.builds(TruncationSelection, share=st.floats(0.01, 0.5)),
    HalvingSelection: st.just(HalvingSelection()),
    ParetoSelection: st.builds(ParetoSelection, size=st.integers(1, 14)),
    NoSelection: st.just(NoSelection()),
}


def test_every_selection_of_the_registry_is_here():
    kinds = {get_args(kind)[0] for kind in get_args(get_args(Selection)[0])}
    assert kinds - {OwnStrategy} == set(SELECTIONS)


@pytest.mark.parametrize("kind", SELECTIONS, ids=lambda kind: kind.__name__)
class TestContract(SelectorContract):
    @pytest.fixture(autouse=True)
    def _selectors(self, kind):
        self.example, self.selectors = kind(), SELECTIONS[kind]

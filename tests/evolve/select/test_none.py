"""No selection: everyone stays, and the worst leave where places are fewer."""

import numpy as np
import pytest
from selector_contract import history

from evo_grpo.evolve.protocols import Offspring
from evo_grpo.evolve.select.halving import NoSelection


def plan(places):
    histories = [history(0.1), [], history(0.9), history(0.5), []]
    return NoSelection().plan(histories, places, np.random.default_rng(0))


def test_everyone_stays_failed_agents_too():
    assert plan(5) == tuple(Offspring(position, position) for position in range(5))


@pytest.mark.parametrize(
    ("places", "stay"), [(4, [0, 1, 2, 3]), (3, [0, 2, 3]), (2, [2, 3]), (1, [2])]
)
def test_failed_agents_leave_first_and_then_the_worst(places, stay):
    assert [offspring.position for offspring in plan(places)] == stay

"""Successive halving: the best fill the places, in place, and nothing is drawn."""

import numpy as np
import pytest
from hypothesis import given
from selector_contract import PROPERTY, history, rounds

from evo_grpo.evolve.protocols import Offspring, rank
from evo_grpo.evolve.select.halving import HalvingSelection, NoSelection


@PROPERTY
@given(rounds())
def test_the_best_survive_in_place_and_nobody_is_copied(case):
    histories, places, seed = case
    rng = np.random.default_rng(seed)
    plan = HalvingSelection().plan(histories, places, rng)
    assert rng.bit_generator.state == np.random.default_rng(seed).bit_generator.state
    assert all(offspring.parent == offspring.position for offspring in plan)
    kept, order = {offspring.position for offspring in plan}, rank(histories)
    assert set(order[:places]) <= kept
    assert len(kept) == places
    assert [o.position for o in plan if o.elite] == [order[0]]


@pytest.mark.parametrize(
    ("places", "stay"),
    [(5, [0, 1, 2, 3, 4]), (4, [0, 1, 2, 3]), (3, [0, 2, 3]), (2, [2, 3]), (1, [2])],
)
def test_failed_agents_leave_first_then_the_worst_then_the_higher_position(places, stay):
    histories = [history(0.5), [], history(0.9), history(0.5, 0.7), history(float("nan"))]
    plan = HalvingSelection().plan(histories, places, np.random.default_rng(0))
    assert plan == tuple(Offspring(p, p, elite=p == 2) for p in stay)
    plan = NoSelection().plan(histories, places, np.random.default_rng(0))
    assert plan == tuple(Offspring(p, p) for p in stay)


def test_equal_agents_leave_from_the_highest_position():
    plan = HalvingSelection().plan([history(0.5)] * 4, 2, np.random.default_rng(0))
    assert plan == (Offspring(0, 0, elite=True), Offspring(1, 1))

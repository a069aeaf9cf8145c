"""Truncation: the worst share copies agents of the best share, and the others stay."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from selector_contract import PROPERTY, history, rounds

from evo_grpo.evolve.protocols import rank
from evo_grpo.evolve.select.truncation import TruncationSelection

TRUNCATIONS = st.builds(TruncationSelection, share=st.floats(0.01, 0.5))


@PROPERTY
@given(TRUNCATIONS, rounds())
def test_the_worst_copy_the_best_and_the_others_stay(selection, case):
    histories, _, seed = case
    plan = selection.plan(histories, len(histories), np.random.default_rng(seed))
    order = rank(histories)
    count = max(1, int(selection.share * len(histories)))
    failed = [p for p in range(len(histories)) if p not in order]
    worst = order[len(order) - min(max(0, count - len(failed)), len(order) - 1) :]
    copies = {o.position: o.parent for o in plan if o.parent != o.position}
    assert set(copies) == {*failed, *worst}
    assert set(copies.values()) <= set(order[:count])
    assert [o.position for o in plan if o.elite] == [order[0]]


def test_a_quarter_of_eight_agents_is_two():
    histories = [history(fitness / 10) for fitness in (3, 1, 8, 5, 2, 7, 4, 6)]
    plan = TruncationSelection().plan(histories, 8, np.random.default_rng(0))
    assert {o.position for o in plan if o.parent != o.position} == {1, 4}
    assert {o.parent for o in plan if o.parent != o.position} <= {2, 5}


def test_the_copied_are_drawn_at_random_from_all_of_the_best():
    histories = [history(fitness / 10) for fitness in range(8)]
    drawn = {
        offspring.parent
        for seed in range(20)
        for offspring in TruncationSelection(share=0.5).plan(
            histories, 8, np.random.default_rng(seed)
        )
        if offspring.parent != offspring.position
    }
    assert drawn == {4, 5, 6, 7}

"""Pareto selection: who stays, who is copied, and whom explorations leave alone."""

import numpy as np
from selector_contract import history

from evo_grpo.evolve.select.pareto import ParetoSelection
from evo_grpo.types import Objective, Score


def two(fitness, tokens):
    return [Score(fitness, 0.1, 8, further=(Objective("tokens", True, tokens, 0.1),))]


def plan(histories, places, seed=0):
    found = ParetoSelection().plan(histories, places, np.random.default_rng(seed))
    return {o.position: o.parent for o in found}, {o.position for o in found if o.elite}


def test_the_best_in_each_objective_are_elite_and_the_front_stays():
    parents, elites = plan([two(0.9, 9), two(0.5, 5), two(0.1, 1), two(0.4, 6)], 4)
    assert {p: parents[p] for p in (0, 1, 2)} == {0: 0, 1: 1, 2: 2}
    assert parents[3] == 1  # the only one that dominates it
    assert elites == {0, 2}


def test_fewer_places_cut_the_most_crowded_of_the_front():
    parents, _ = plan([two(0.9, 9), two(0.5, 5), two(0.49, 4.9), two(0.1, 1)], 3)
    assert set(parents) == {0, 1, 3} or set(parents) == {0, 2, 3}
    assert plan([two(0.9, 9), two(0.5, 5), two(0.1, 1)], 1)[0] == {0: 0}


def test_failed_agents_become_copies_of_the_front_with_most_room():
    histories = [two(0.9, 9), [], two(0.1, 1), two(0.5, 5), two(0.52, 5.1), history(float("nan"))]
    copied = {plan(histories, 6, seed)[0][position] for seed in range(20) for position in (1, 5)}
    assert {0, 2} <= copied <= {0, 2, 3, 4}

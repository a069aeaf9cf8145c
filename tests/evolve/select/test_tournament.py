"""Tournaments: the best stays, the better win, and copies go where agents won nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from selector_contract import PROPERTY, history, rounds

from evo_grpo.evolve.protocols import Offspring, rank
from evo_grpo.evolve.select.tournament import TournamentSelection, _winners

TOURNAMENTS = st.builds(TournamentSelection, size=st.integers(1, 14), elitism=st.booleans())


@PROPERTY
@given(TOURNAMENTS, rounds())
def test_survivors_are_the_winners_of_the_tournaments(selection, case):
    histories, places, seed = case
    plan = selection.plan(histories, places, np.random.default_rng(seed))
    # The slow obvious implementation: the same draws, the winners as one list.
    order = rank(histories)
    rng = np.random.default_rng(seed)
    winners = [order[0]] if selection.elitism else []
    while len(winners) < places:
        size = min(selection.size, len(order))
        drawn = rng.choice(len(order), size=size, replace=False)
        winners.append(order[min(drawn)])
    assert sorted(offspring.parent for offspring in plan) == sorted(winners)
    copies = [offspring for offspring in plan if offspring.parent != offspring.position]
    assert len(copies) == places - len(set(winners)), "no more copies than needed"
    losers = [p for p in range(len(histories)) if p not in winners]
    assert [copy.position for copy in copies] == losers[: len(copies)]


def test_a_full_tournament_leaves_only_the_best():
    histories = [history(mean) for mean in (0.1, 0.9, 0.3, 0.2)]
    plan = TournamentSelection(size=4).plan(histories, 4, np.random.default_rng(0))
    assert plan == (
        Offspring(0, 1),
        Offspring(1, 1, elite=True),
        Offspring(2, 1),
        Offspring(3, 1),
    )


def test_fewer_places_let_agents_leave():
    histories = [history(mean) for mean in (0.1, 0.9, 0.3, 0.2)]
    plan = TournamentSelection(size=4).plan(histories, 2, np.random.default_rng(0))
    assert plan == (Offspring(0, 1), Offspring(1, 1, elite=True))
    plan = TournamentSelection(size=4).plan(histories, 1, np.random.default_rng(0))
    assert plan == (Offspring(1, 1, elite=True),)


def test_pressure_grows_with_the_size_of_the_tournament():
    histories = [history(position / 16) for position in range(16)]
    kept = []
    for size in (1, 2, 4, 8):
        selection, rng = TournamentSelection(size=size), np.random.default_rng(0)
        parents = [o.parent for _ in range(200) for o in selection.plan(histories, 16, rng)]
        kept.append(np.mean(parents))
    assert kept == sorted(kept)
    assert kept[0] < 9 < 13 < kept[-1]


def test_a_tournament_is_no_larger_than_the_agents_that_have_not_failed():
    plan = TournamentSelection(size=9).plan([history(0.5), []], 2, np.random.default_rng(0))
    assert [offspring.parent for offspring in plan] == [0, 0]


@pytest.mark.parametrize("size", [1, 2, 7, 400, 1200, 5000])
def test_the_winners_of_a_large_population_have_the_ranks_of_a_small_ones(size):
    # 1200 agents are drawn all at once; the slow obvious implementation beside it.
    agents, places = 1200, 4000
    size = min(size, agents)
    drawn = np.array(_winners(agents, size, places, np.random.default_rng(0)))
    rng = np.random.default_rng(1)
    obvious = np.array([rng.choice(agents, size, replace=False).min() for _ in range(places)])
    assert drawn.min() >= 0
    assert drawn.max() <= agents - size
    for share in (0.1, 0.5, 0.9):
        expected = np.quantile(obvious, share)
        assert np.mean(drawn <= expected) == pytest.approx(np.mean(obvious <= expected), abs=0.04)
    assert drawn.mean() == pytest.approx((agents - size) / (size + 1), rel=0.06)


def test_the_draws_of_a_seed_do_not_change():
    histories = [history(mean) for mean in (0.3, 0.7, 0.1, 0.9, 0.5, 0.2)]
    plan = TournamentSelection(size=2).plan(histories, 6, np.random.default_rng(4))
    assert [offspring.parent for offspring in plan] == [0, 1, 3, 3, 4, 0]

"""Several goals: dominance by paired tests, non-dominated sorting and crowding."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evo_grpo.evolve.decide import Standing, Strategy, decide
from evo_grpo.evolve.explore.on_copy import NoExploration
from evo_grpo.evolve.goals import ahead, crowding, dominates, fronts, ranked
from evo_grpo.evolve.select.pareto import ParetoSelection
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.types import Member, Objective, Score, Slot

PROMPTS = 40


def agent(right, tokens, spread=0.0):
    """A score of so many right answers, and of answers with so many tokens in the mean.

    The tokens of single prompts lie up to `spread` below and above.
    """
    rewards = (1.0,) * right + (0.0,) * (PROMPTS - right)
    own = tuple(tokens + spread * (-1) ** number for number in range(PROMPTS))
    return Score(
        right / PROMPTS,
        0.05,
        PROMPTS,
        rewards,
        (Objective("tokens", True, float(np.mean(own)), 0.1, own),),
    )


def values(*means):
    """A score of means alone: fitness, and goals of which every other one is minimized."""
    further = tuple(
        Objective(f"goal {number}", number % 2 == 0, mean, 0.1)
        for number, mean in enumerate(means[1:])
    )
    return Score(means[0], 0.1, 8, further=further)


POINTS = st.integers(2, 3).flatmap(
    lambda goals: st.lists(
        st.tuples(*[st.sampled_from([0.0, 1.0, 2.0, 3.0])] * goals), min_size=1, max_size=7
    )
)


@settings(max_examples=60)
@given(POINTS)
def test_fronts_by_means_are_the_longest_chains_above(points):
    up = [[v if g in (0, 2) else -v for g, v in enumerate(one)] for one in points]

    def over(a, b):
        return all(x >= y for x, y in zip(a, b, strict=True)) and a != b

    def depth(index):
        return max((1 + depth(j) for j, one in enumerate(up) if over(one, up[index])), default=0)

    found = fronts([values(*one) for one in points], None)
    assert [sorted(front) for front in found] == [
        [i for i in range(len(points)) if depth(i) == level] for level in range(len(found))
    ]


@settings(max_examples=60)
@given(POINTS)
def test_crowding_is_the_room_between_the_neighbours_in_each_goal(points):
    points = list(dict.fromkeys(points))
    got = crowding([values(*one) for one in points])
    for index, one in enumerate(points):
        room = 0.0
        for goal, value in enumerate(one):
            others = [p[goal] for i, p in enumerate(points) if i != index]
            column = [p[goal] for p in points]
            if len(set(column)) < len(column):
                return  # neighbours of equal values depend on the order
            below, above = [v for v in others if v < value], [v for v in others if v > value]
            if not below or not above:
                room = math.inf
            else:
                room += (min(above) - max(below)) / (max(column) - min(column))
        assert got[index] == pytest.approx(room)


def test_dominance_needs_one_significant_advantage_and_no_worse_mean():
    better, worse = agent(30, 5), agent(10, 5)
    assert dominates(better, worse, 0.1)
    assert not dominates(worse, better, 0.1)
    # Shorter in the mean, though no test says so: nothing may overwrite it.
    assert not dominates(better, agent(10, 4.9, spread=3), 0.1)
    # One right answer more is a tie, with answers that are significantly shorter too.
    assert not dominates(agent(11, 5), worse, 0.1)
    found = ahead(agent(11, 4), worse, 0.1)
    assert (found.objective, found.difference, found.significant(0.1)) == ("tokens", 1.0, True)
    # Without a level every difference of means counts.
    assert dominates(agent(11, 5), worse, None)


def test_fronts_by_tests_do_not_depend_on_the_order_of_the_agents():
    # Each is a tie with the next one, and the first is ahead of the last: not transitive.
    scores = [agent(right, 5) for right in (20, 19, 18, 17, 16, 15, 14)]
    scores += [agent(5, 2), agent(14, 9)]
    found = fronts(scores, 0.1)
    assert found[0] == [0, 1, 2, 3, 7]
    order = [8, 3, 0, 7, 5, 1, 6, 2, 4]
    mixed = fronts([scores[index] for index in order], 0.1)
    assert [sorted(order[i] for i in front) for front in mixed] == found


def test_the_order_is_front_then_room_then_fitness():
    scores = [agent(20, 5), agent(12, 3.1), agent(10, 3), agent(30, 9), None, agent(5, 9)]
    # The ends have infinite room, the better fitness first.
    assert ranked(scores, 0.1) == [3, 2, 0, 1, 5]


def standings(*scores):
    return [
        Standing(Slot(i), Member(i, Slot(i)), Hparams(lr=1e-3), [score])
        for i, score in enumerate(scores)
    ]


def decided(scores, places, significance=0.1):
    strategy = Strategy(
        ParetoSelection().at(significance), NoExploration(), HyperparameterConfig(), significance
    )
    agents = standings(*scores)
    rng = np.random.default_rng(0)
    generation, decisions = decide(agents, places, None, strategy, rng, round=0, next_id=9)
    parents = dict(zip(generation.slots, generation.parents, strict=True))
    return parents, {d.agent: (d.kind, d.sentence) for d in decisions}


def test_a_dominated_agent_takes_the_weights_of_one_that_dominates_it():
    scores = [agent(30, 9), agent(20, 5), agent(10, 3), agent(10, 5)]
    parents, told = decided(scores, 4)
    assert parents[0] == 0
    assert parents[1] == 1
    assert parents[2] == 2
    assert parents[3] in (1, 2)  # agent 0 has longer answers
    assert told[3][0] == "copied"
    if parents[3] == 2:
        assert "+2.00 ± 0.00 in tokens on 40 shared prompts" in told[3][1]


def test_agents_that_no_test_separates_are_not_copied():
    parents, told = decided([agent(20, 5, 3), agent(20, 5.2, -3), agent(19, 5.1, -3)], 3)
    assert parents == {0: 0, 1: 1, 2: 2}
    assert told == {}


def test_fewer_places_go_to_the_front_first_to_its_ends():
    scores = [agent(20, 5), agent(19, 4.9), agent(30, 9), agent(10, 3), agent(5, 9)]
    parents, told = decided(scores, 3)
    assert set(parents) == {0, 2, 3}
    assert told[4][0] == told[1][0] == "left"


def test_an_agent_that_would_leave_takes_the_place_of_one_that_it_dominates():
    # A selection of one's own that keeps the wrong one: the paired tests mend it.
    class Wrong:
        def plan(self, histories, places, rng):
            from evo_grpo.evolve.protocols import Offspring

            return (Offspring(0, 0), Offspring(2, 2))

    strategy = Strategy(Wrong(), NoExploration(), HyperparameterConfig(), 0.1)
    agents = standings(agent(30, 9), agent(20, 5), agent(10, 6))
    generation, _ = decide(agents, 2, None, strategy, np.random.default_rng(0), round=0, next_id=9)
    assert generation.slots == (0, 1)

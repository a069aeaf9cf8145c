"""Plans tested by a paired test: what cannot be separated is neither copied nor lost."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_grpo.evolve.decide import drop_unsupported
from evo_grpo.evolve.generation import check_plan
from evo_grpo.evolve.protocols import Offspring
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.evolve.select.truncation import TruncationSelection
from evo_grpo.types import Score

PROMPTS = 40


def score(right):
    """A fitness of so many right answers; the same prompts are right first."""
    rewards = (1.0,) * right + (0.0,) * (PROMPTS - right)
    return Score(right / PROMPTS, 0.05, PROMPTS, rewards)


def parents(tested):
    return {o.position: o.parent for o in tested.plan}


def test_a_copy_happens_where_its_parent_is_significantly_better():
    plan = [Offspring(0, 0, elite=True), Offspring(1, 0)]
    tested = drop_unsupported(plan, [score(30), score(10)], 0.1)
    assert parents(tested) == {0: 0, 1: 0}
    assert tested.copies[1].difference == 0.5
    assert tested.copies[1].significant(0.001)
    assert tested.plan[0].elite


def test_an_agent_that_cannot_be_told_from_its_parent_keeps_its_weights():
    plan = [Offspring(0, 0, elite=True), Offspring(1, 0)]
    tested = drop_unsupported(plan, [score(12), score(11)], 0.1)
    assert parents(tested) == {0: 0, 1: 1}
    assert tested.copies == {}
    parent, ahead = tested.kept[1]
    assert (parent, ahead.difference, ahead.prompts) == (0, 1 / PROMPTS, PROMPTS)


@pytest.mark.parametrize("right", [0, 7, PROMPTS])
@pytest.mark.parametrize("selection", [TournamentSelection(), TruncationSelection(share=0.5)])
def test_equal_fitness_copies_nobody(selection, right):
    """As where the reward is always the same: there is nothing to choose by."""
    scores = [score(right)] * 6
    rng, planned = np.random.default_rng(0), 0
    for places in (6, 4):
        plan = selection.plan([[one] for one in scores], places, rng)
        tested = drop_unsupported(plan, scores, 0.1)
        assert tested.copies == {}
        assert all(position == parent for position, parent in parents(tested).items())
        assert len(tested.plan) == places
        planned += sum(offspring.position != offspring.parent for offspring in plan)
    assert planned


def test_without_a_level_the_plan_stays_as_it_is():
    plan = [Offspring(0, 0, elite=True), Offspring(1, 0)]
    tested = drop_unsupported(plan, [score(12), score(11)], None)
    assert parents(tested) == {0: 0, 1: 0}
    assert math.isclose(tested.copies[1].difference, 1 / PROMPTS)


def test_a_copy_goes_to_the_best_agent_that_would_not_survive():
    # The plan puts the copy into position 1, the worst; 2 would leave and is nearly as good as 0.
    plan = [Offspring(0, 0, elite=True), Offspring(1, 0)]
    tested = drop_unsupported(plan, [score(20), score(1), score(19)], 0.1)
    assert parents(tested) == {0: 0, 2: 2}
    assert tested.kept[2][0] == 0
    worst, ahead = tested.left[1]
    assert worst == 2
    assert ahead.difference == 18 / PROMPTS


def test_nobody_leaves_who_is_significantly_better_than_one_that_stays():
    # Position 2 won its place by the draw alone.
    plan = [Offspring(0, 0, elite=True), Offspring(2, 2)]
    tested = drop_unsupported(plan, [score(35), score(30), score(2), score(29)], 0.1)
    assert parents(tested) == {0: 0, 1: 1}
    assert set(tested.left) == {2, 3}
    assert tested.left[3][1].difference == 1 / PROMPTS


def test_the_elite_and_the_parents_of_copies_stay():
    plan = [Offspring(0, 0, elite=True), Offspring(1, 2), Offspring(2, 2)]
    scores = [score(5), score(0), score(10), score(30)]
    tested = drop_unsupported(plan, scores, 0.1)
    assert {0, 2} <= set(parents(tested))
    assert parents(tested)[3] == 3, "the best is not overwritten by a worse one's copy"


def test_failed_agents_are_overwritten_without_a_test():
    plan = [Offspring(0, 0, elite=True), Offspring(1, 0), Offspring(2, 0)]
    tested = drop_unsupported(plan, [score(10), None, score(10)], 0.1)
    assert parents(tested) == {0: 0, 1: 0, 2: 2}
    assert tested.copies[1] is None
    assert drop_unsupported(plan[:1], [score(10), None], 0.1).left == {1: None}


@given(st.data(), st.integers(1, 7))
def test_a_tested_plan_can_be_carried_out(data, agents):
    rights = data.draw(
        st.lists(st.none() | st.integers(0, PROMPTS), min_size=agents, max_size=agents)
    )
    if all(right is None for right in rights):
        rights[0] = 3
    scores = [None if right is None else score(right) for right in rights]
    ranked = [p for p in range(agents) if scores[p] is not None]
    survivors = sorted(data.draw(st.sets(st.sampled_from(ranked), min_size=1)))
    elite = max(survivors, key=lambda p: scores[p].mean)
    rest = [p for p in range(agents) if p not in survivors]
    filled = data.draw(st.sets(st.sampled_from(rest))) if rest else set()
    plan = [Offspring(p, p, p == elite) for p in survivors]
    plan += [Offspring(p, data.draw(st.sampled_from(survivors))) for p in filled]
    plan.sort(key=lambda o: o.position)
    tested = drop_unsupported(plan, scores, 0.1)
    check_plan("plan", tested.plan, agents, agents)
    assert len(tested.plan) == len(plan), "as many places as were planned"
    assert parents(tested)[elite] == elite
    assert set(tested.left) == set(range(agents)) - set(parents(tested))
    for position, parent in parents(tested).items():
        if position != parent and scores[position] is not None:
            assert tested.copies[position].significant(0.1)
    stay = [p for p, parent in parents(tested).items() if p == parent and p != elite]
    copied = {parent for position, parent in parents(tested).items() if position != parent}
    movable = [p for p in stay if p not in copied and scores[p] is not None]
    for gone in tested.left:
        for weak in movable:
            if scores[gone] is not None:
                better = scores[gone].mean - scores[weak].mean
                assert better < 0.3, "would have been significant"

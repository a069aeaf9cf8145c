"""Decisions and places by round, and rows that stay the same whatever the places and the groups."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_grpo.evolve.sizes import (
    LEAST,
    decides_after,
    decisions_by_share,
    places_by_round,
    prompts_of_agents,
    wrong_sizes,
)


@pytest.mark.parametrize(
    ("rounds", "size", "decisions"),
    [
        (24, 8, [6, 12, 18, 24]),
        (6, 8, [2, 3, 4, 6]),
        (8, 1, [2, 4, 6, 8]),
        (10, 16, [2, 4, 6, 8, 10]),  # a share more, since three halvings lead to two agents
        (24, 64, [3, 7, 10, 14, 17, 21, 24]),
        (4, 8, [1, 2, 3, 4]),
        (3, 8, [1, 2, 3]),  # fewer rounds than shares
        (1, 8, [1]),
    ],
)
def test_a_run_decides_after_equal_shares_and_at_its_end(rounds, size, decisions):
    assert decisions_by_share(rounds, size) == decisions


@given(st.integers(1, 200), st.integers(1, 100))
def test_shares_are_equal_but_for_the_rounding_to_rounds(rounds, size):
    decisions = decisions_by_share(rounds, size)
    assert decisions[-1] == rounds
    assert decisions == sorted(set(decisions))
    if rounds < 4:
        assert decisions == list(range(1, rounds + 1))
    else:
        assert len(decisions) >= 4
    steps = [b - a for a, b in pairwise([0, *decisions])]
    assert max(steps) - min(steps) <= 2


def test_after_the_last_number_decisions_repeat_at_the_last_distance():
    def decided(decisions):
        return [n for n in range(1, 15) if decides_after(n, decisions)]

    assert decided([2, 3, 6]) == [2, 3, 6, 9, 12]
    assert decided([4]) == [4, 8, 12]
    assert decided([1, 2, 3]) == list(range(1, 15))


@pytest.mark.parametrize(
    ("size", "decisions", "places"),
    [
        # The last halving is two decisions before the end.
        (8, [2, 4, 6, 8], (8, 8, 4, 4, 2, 2, 2, 2)),
        (8, [6, 12, 18, 24], (*(8,) * 6, *(4,) * 6, *(2,) * 12)),
        (5, [1, 2, 3, 4], (5, 3, 2, 2)),
        (3, [1, 2, 3, 4], (3, 3, 2, 2)),  # one halving: not at the first decision
        (16, [2, 4, 6, 8, 10], (16, 16, 8, 8, 4, 4, 2, 2, 2, 2)),
        # Too few decisions for all halvings: as many as there are, and none at the end.
        (16, [1, 2], (16, 8)),
        (8, [3], (8, 8, 8)),
        (2, [1, 2, 3, 4], (2, 2, 2, 2)),
        (1, [1, 2], (1, 1)),
    ],
)
def test_null_halves_at_decisions_down_to_two(size, decisions, places):
    assert places_by_round(size, None, decisions) == places
    assert list(wrong_sizes(size, list(places), archive=False)) == []


@given(st.integers(1, 60), st.integers(1, 40))
def test_the_better_of_the_last_two_trains_on_for_a_share_of_the_run(rounds, size):
    decisions = decisions_by_share(rounds, size)
    places = places_by_round(size, None, decisions)
    assert len(places) == rounds
    assert all((a + 1) // 2 == b or a == b for a, b in pairwise(places))
    shrinks = [n for n, (a, b) in enumerate(pairwise(places), start=1) if b < a]
    assert set(shrinks) <= set(decisions[:-1])
    if len(decisions) >= 4 and size <= 8:
        assert places[-1] == min(size, LEAST)
        assert all(n <= decisions[-3] for n in shrinks)


def test_others_are_taken_as_they_are():
    assert set(places_by_round(8, "constant", [1, 2, 3])) == {8}
    assert places_by_round(8, [8, 6, 5], [4, 8]) == (8, 6, 5)


@pytest.mark.parametrize(
    ("sizes", "archive", "text"),
    [
        ([], True, "at least one number"),
        ([8, 4, 0], True, "no more agents can leave than there are"),
        ([6, 4], True, r"population.size \(8\) as the first number"),
        ([8, 4, 5], True, "no number above the one before it"),
        ([8, 3], True, "expected 4 agents or more after the first round"),
        ([8, 4, 1], False, "at least 2 agents in every round without evolve.archive"),
    ],
)
def test_wrong_sizes_are_named(sizes, archive, text):
    (found,) = wrong_sizes(8, sizes, archive=archive)
    assert re.search(text, found)


def test_one_agent_is_allowed_beside_an_archive():
    assert list(wrong_sizes(8, [8, 4, 2, 1], archive=True)) == []


@given(
    st.integers(1, 12),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(2, 12),
    st.data(),
)
def test_rows_stay_the_same_but_for_the_rounding_to_groups(agents, prompts, steps, group, data):
    rows = 12 * prompts * group  # planned for twelve agents, however many are left
    share = rows // agents
    sizes = data.draw(
        st.lists(st.integers(2, max(2, min(16, share))), min_size=agents, max_size=agents)
    )
    dealt = prompts_of_agents(rows, steps, sizes)
    assert len(dealt) == steps
    assert all(len(step) == agents and min(step) >= 1 for step in dealt)
    # Half of a group, of all agents together; 2% of any round with 25 groups or more.
    sampled = sum(n * size for step in dealt for n, size in zip(step, sizes, strict=True))
    assert abs(sampled - rows * steps) <= min(sizes) / 2 + 1e-9
    for agent, size in enumerate(sizes):
        mine = [step[agent] for step in dealt]
        assert max(mine) - min(mine) <= 1, "steps are alike"
        assert abs(sum(mine) * size - rows * steps / agents) <= max(sizes) + size / 2


def test_equal_groups_get_exactly_their_share():
    assert prompts_of_agents(256, 3, [8] * 8) == ((4,) * 8,) * 3
    assert prompts_of_agents(256, 3, [8] * 2) == ((16,) * 2,) * 3


def test_groups_above_the_share_get_one_prompt_a_step():
    dealt = prompts_of_agents(8, 2, [16])
    assert dealt == ((1,), (1,))

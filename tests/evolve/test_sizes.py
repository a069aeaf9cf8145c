"""Places by round, and rows that stay the same whatever the places and the group sizes."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_grpo.evolve.sizes import (
    places_by_round,
    planned_rows,
    prompts_of_agents,
    wrong_sizes,
)


@pytest.mark.parametrize(
    ("size", "places"),
    [(8, (8, 4, 2)), (5, (5, 3, 2)), (3, (3, 2)), (2, (2,)), (1, (1,)), (32, (32, 16, 8, 4, 2))],
)
def test_null_halves_down_to_two(size, places):
    assert places_by_round(size, None) == places
    assert list(wrong_sizes(size, list(places), archive=False)) == []


def test_others_are_taken_as_they_are():
    assert places_by_round(8, "constant") == (8,)
    assert places_by_round(8, [8, 6, 5]) == (8, 6, 5)


@pytest.mark.parametrize(
    ("sizes", "archive", "text"),
    [
        ([], True, "at least one number"),
        ([8, 4, 0], True, "no more agents can leave than there are"),
        ([6, 4], True, r"population.size \(8\) as the first number"),
        ([8, 4, 5], True, "no number above the one before it"),
        ([8, 3], True, "at least half of the agents after the first round"),
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
    assert planned_rows(rows, steps, sizes) == sampled
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

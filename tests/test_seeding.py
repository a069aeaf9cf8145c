"""Streams: the same on every machine, independent of each other, and nothing global moves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evo_grpo.seeding import derive, generator

PROPERTY = settings(max_examples=60)
# A few letters say it all, and the table of all letters takes ten seconds to build.
PATHS = st.lists(st.integers() | st.text(st.sampled_from("ab1:-"), max_size=4), max_size=4)


def test_seeds_are_the_same_on_every_machine():
    # Numbers of the first release: a change here changes every run that anybody repeats.
    assert derive(0) == 4066689987807800415
    assert derive(0, "sample", 3, 1) == 155720357700848329
    assert derive(7, "select") == 5757250491472954353


@PROPERTY
@given(st.integers(), PATHS, st.integers(), PATHS)
def test_different_paths_have_different_seeds(seed, path, other_seed, other_path):
    one, other = derive(seed, *path), derive(other_seed, *other_path)
    assert 0 <= one < 2**63
    assert (one == other) == ((seed, path) == (other_seed, other_path))


@pytest.mark.parametrize(
    ("one", "other"),
    [(("1",), (1,)), (("a", "b"), ("ab",)), ((1, 2), (12,)), ((1, 2), (2, 1)), ((), ("",))],
)
def test_paths_that_read_alike_are_told_apart(one, other):
    assert derive(0, *one) != derive(0, *other)


def test_numpy_numbers_count_as_numbers():
    assert derive(np.int64(5), "a", np.int64(2)) == derive(5, "a", 2)


def test_a_generator_repeats_and_leaves_the_global_one_alone():
    before = np.random.get_state()[1].tolist()  # noqa: NPY002 -- it is read to see that it stays
    first, second = (generator(1, "a", 2).random(4) for _ in range(2))
    assert first.tolist() == second.tolist()
    assert first.tolist() != generator(1, "a", 3).random(4).tolist()
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002 -- as above

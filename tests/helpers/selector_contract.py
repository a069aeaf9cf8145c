"""What every selection keeps. tests/evolve/test_kinds.py runs it on each of them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evo_grpo.errors import RunFailedError
from evo_grpo.evolve.protocols import rank
from evo_grpo.types import Score

PROPERTY = settings(max_examples=40)

MEANS = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
#: Few different values, so that many agents are equal; no score, or one that is not finite: failed.
HISTORY = st.one_of(
    st.lists(MEANS, min_size=1, max_size=3), st.just([]), st.just([math.nan]), st.just([math.inf])
)


def history(*means):
    return [Score(mean=mean, se=0.1, n=8) for mean in means]


@st.composite
def rounds(draw):
    """Histories, one of them at least of an agent that has not failed; places; a seed."""
    size = draw(st.integers(1, 12))
    means = draw(st.lists(HISTORY, min_size=size, max_size=size).filter(_some_finite))
    places = draw(st.one_of(st.just(size), st.integers(1, size)))
    return [history(*one) for one in means], places, draw(st.integers(0, 2**32))


def _some_finite(means):
    return any(one and all(map(math.isfinite, one)) for one in means)


class Counted(list):
    """Histories that count how often one of them is read."""

    reads = 0

    def __iter__(self):
        for one in super().__iter__():
            self.reads += 1
            yield one

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


class SelectorContract:
    """Subclass as `Test...` and give `example`, a selection, and `selectors`, many of them as a
    hypothesis strategy.
    """

    example = None
    selectors = None

    def check(self, test):
        """Run `test(selector, histories, places, seed)` on many cases."""
        PROPERTY(given(self.selectors, rounds())(lambda s, case: test(s, *case)))()

    def test_children_of_ranked_survivors_fill_all_places(self):
        def test(selector, histories, places, seed):
            plan = selector.plan(histories, places, np.random.default_rng(seed))
            positions = [offspring.position for offspring in plan]
            assert positions == sorted(set(positions))
            assert set(positions) <= set(range(len(histories)))
            assert len(positions) == places
            survivors = {o.position for o in plan if o.parent == o.position}
            assert {o.parent for o in plan} <= survivors
            assert {o.parent for o in plan if o.parent != o.position} <= set(rank(histories))

        self.check(test)

    def test_at_most_one_elite_which_is_the_best_and_survives(self):
        def test(selector, histories, places, seed):
            plan = selector.plan(histories, places, np.random.default_rng(seed))
            elites = [o for o in plan if o.elite]
            assert len(elites) <= 1
            for elite in elites:
                assert elite.position == elite.parent == rank(histories)[0]
            # Of equal agents it is the one at the lowest position.
            equal = [history(0.5) for _ in histories]
            plan = selector.plan(equal, places, np.random.default_rng(seed))
            assert [o.position for o in plan if o.elite] in ([], [0])

        self.check(test)

    def test_equal_streams_give_equal_plans_and_leave_the_histories_as_they_are(self):
        def test(selector, histories, places, seed):
            before = [list(map(repr, one)) for one in histories]
            first, second = (
                selector.plan(histories, places, np.random.default_rng(seed)) for _ in range(2)
            )
            assert first == second
            assert [list(map(repr, one)) for one in histories] == before

        self.check(test)

    def test_a_population_that_failed_ends_the_run(self):
        def test(selector, histories, places, seed):
            del places
            failed = [history(math.nan) if seed % 2 else [] for _ in histories]
            with pytest.raises(
                RunFailedError, match=rf"at least one agent.*none of {len(failed)}.*smaller range"
            ) as info:
                selector.plan(failed, len(failed), np.random.default_rng(seed))
            assert info.value.exit_code == 1

        self.check(test)

    def test_a_large_population_is_read_a_few_times_at_most(self):
        size = 2_000
        rng = np.random.default_rng(0)
        histories = Counted(history(mean) for mean in rng.random(size))
        plan = self.example.plan(histories, size // 2, rng)
        assert len(plan) == size // 2
        assert histories.reads <= 4 * size

"""Claims hold their level over all pairs: under equal agents, subsets of them, and many looks."""

import itertools

import numpy as np
import pytest

from evo_grpo.evolve.claims import TIE_LEVEL, chance, claims, signs
from evo_grpo.evolve.compare import compare
from evo_grpo.population.evaluate import summarise
from evo_grpo.types import Score


def score(rewards):
    return summarise(np.asarray(rewards, dtype=np.float64), range(len(rewards)))


def claimed(table, equal=None):
    """Whether the best of some agents is claimed to differ from another one of them."""
    equal = range(len(table)) if equal is None else equal
    best = max(equal, key=lambda i: np.mean(table[i]))
    found = claims([score(row) for row in table], best, TIE_LEVEL)
    return any(found[i] for i in equal)


def rate(draw, cases=400, equal=None):
    return np.mean([claimed(draw(), equal) for _ in range(cases)])


BOUND = TIE_LEVEL + 2 * (TIE_LEVEL * 0.9 / 400) ** 0.5


@pytest.mark.parametrize("agents", [2, 3, 8])
@pytest.mark.parametrize("kind", ["binary", "lognormal"])
def test_equal_agents_are_told_apart_no_more_often_than_the_level(agents, kind):
    rng = np.random.default_rng(agents)

    def draw():
        if kind == "binary":
            return (rng.random((agents, 32)) < rng.random(32)) * 1.0
        return rng.lognormal(size=(agents, 32))

    assert rate(draw) <= BOUND


def test_equal_agents_beside_others_that_differ_are_not_told_apart_either():
    """Three loud agents beside quiet and worse ones, which all are told apart from them."""
    rng = np.random.default_rng(4)

    def draw():
        quiet = np.full((5, 32), -20.0) + 0.01 * rng.normal(size=(5, 32))
        return np.concatenate([rng.normal(size=(3, 32)), quiet])

    assert 0 < rate(draw, equal=range(3)) <= BOUND
    found = claims([score(row) for row in draw()], 0, TIE_LEVEL)
    assert found[3:] == [1] * 5


@pytest.mark.parametrize(("same_way", "p"), [(4, 0.125), (5, 0.0625), (6, 0.03125)])
def test_a_few_prompts_of_many_prove_no_more_than_their_signs(same_way, p):
    """A Student interval of 4 of 256 differences excludes zero."""
    rewards = np.zeros(256)
    rewards[:same_way] = 1
    assert chance(score(rewards), score(np.zeros(256))) == pytest.approx(p, abs=1e-7)
    assert chance(score(np.zeros(256)), score(rewards)) == pytest.approx(p, abs=1e-7)


def test_two_agents_have_the_two_sided_sign_flip_test():
    rng = np.random.default_rng(1)
    for draws in (rng.integers(0, 5, (30, 2, 12)) / 4, rng.normal(size=(30, 2, 12))):
        for one, other in ((score(a), score(b)) for a, b in draws):
            exact = min(1.0, 2 * min(compare(one, other).p, compare(other, one).p))
            # Differences that are no multiples of a step are rounded, and the p-value up.
            assert exact - 1e-9 <= chance(one, other) <= exact * 1.25 + 0.01


def test_the_p_value_of_many_prompts_is_the_binomial():
    """40 differences of 1 of which 30 are positive: 2 P(Bin(40, 1/2) >= 30)."""
    apart = np.zeros(1500)
    apart[:30], apart[30:40] = 1, -1
    assert chance(score(apart), score(np.zeros(1500))) == pytest.approx(0.0022214, rel=1e-3)


def test_unlike_shapes_of_equal_mean_keep_the_level():
    """1 against 20 with probability .05: in .04 of all cases the 64 prompts show no 20 at all."""
    rng = np.random.default_rng(2)
    pairs = [(np.ones(64), 20.0 * (rng.random(64) < 0.05)) for _ in range(400)]
    flips = [min(compare(score(a), score(b)).p, compare(score(b), score(a)).p) for a, b in pairs]
    assert np.mean(np.array(flips) <= TIE_LEVEL / 2) > BOUND
    assert np.mean([claimed(pair) for pair in pairs]) <= BOUND


def test_the_first_look_decides_where_an_agent_was_looked_at_again():
    first, later = np.zeros(16), np.ones(16)
    behind = Score(0.0, 0.0, 16, tuple(first))
    again = Score(0.5, 0.0, 16, tuple(later), first_look=tuple(first))
    assert claims([again, behind], 0, TIE_LEVEL) == [0, 0]
    assert claims([Score(1.0, 0.0, 16, tuple(later)), behind], 0, TIE_LEVEL) == [0, 1]


def test_more_agents_ask_for_more():
    """Eight prompts, all one way: p = 2 / 256."""
    better, zero = score(np.ones(8)), score(np.zeros(8))
    assert claims([better, zero], 0, TIE_LEVEL) == [0, 1]
    assert claims([better, *[zero] * 3], 0, TIE_LEVEL) == [0, 1, 1, 1]
    assert claims([better, *[zero] * 5], 0, TIE_LEVEL) == [0] * 6
    assert claims([zero, better], 0, TIE_LEVEL) == [0, -1]


def pairs_of(blocks):
    """The pairs of equal agents, where the agents of a block are equal."""
    return sum(len(list(itertools.combinations(block, 2))) for block in blocks)


def partitions(agents):
    if not agents:
        yield []
        return
    first, *rest = agents
    for blocks in partitions(rest):
        yield [[first], *blocks]
        for i, block in enumerate(blocks):
            yield [*blocks[:i], [first, *block], *blocks[i + 1 :]]


@pytest.mark.parametrize("agents", [3, 4, 5, 6, 7])
def test_the_number_of_pairs_that_can_be_equal_is_that_of_all_partitions(agents):
    """After as many claims, agent 0 can equal only the others; who differs may equal one another.

    So many pairs can be equal at once, and at that share of the level the next claim is made.
    """
    for differ in range(agents - 1):
        others = set(range(agents - differ, agents))
        most = max(
            pairs_of(blocks)
            for blocks in partitions(list(range(agents)))
            for own in [next(block for block in blocks if 0 in block)]
            if len(own) > 1 and not others & set(own)
        )
        sure, last = [0.0] * differ, [1.0] * (agents - 2 - differ)
        for p, found in ((0.99 / most, 1), (1.01 / most, 0)):
            assert signs([1.0] * (agents - 1), [p * 0.05, *sure, *last], agents, 0.05)[0] == found


def test_what_was_not_tested_is_not_claimed():
    assert signs([1.0, 1.0], [float("nan"), 0.0], 3, 0.05) == [0, 1]
    empty, other = Score(1.0, 0.1, 8), score(np.zeros(8))
    assert chance(empty, other) == chance(empty, empty) == 1.0
    gaps = score([1.0] * 4 + [np.nan] * 8)
    assert chance(gaps, score([0.0] * 12)) == pytest.approx(0.125, abs=1e-7)

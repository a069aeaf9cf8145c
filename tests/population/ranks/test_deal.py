"""Agents are dealt to shards, and shards to ranks: evenly, in order, whoever else computes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_grpo.population.ranks.deal import deal, rank_of

COUNTS = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@given(COUNTS)
def test_every_shard_gets_its_even_part_in_order(counts):
    agents, shards = counts
    dealt = deal(range(agents), shards)
    assert [slot for shard in dealt for slot in shard] == list(range(agents))
    sizes = [len(shard) for shard in dealt]
    assert len(sizes) == shards
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


@given(COUNTS)
def test_every_rank_gets_its_even_part_of_the_shards(counts):
    shards, ranks = counts
    places = [rank_of(shard, shards, ranks) for shard in range(shards)]
    assert places == sorted(places)
    per_rank = [places.count(rank) for rank in range(ranks)]
    assert min(per_rank) >= 1
    assert max(per_rank) - min(per_rank) <= 1


def test_one_shard_is_everybody():
    assert deal([3, 5, 6], 1) == ((3, 5, 6),)
    assert deal([3, 5, 6], 2) == ((3, 5), (6,))


@pytest.mark.parametrize(("ranks", "places"), [(1, [0, 0, 0]), (2, [0, 0, 1]), (3, [0, 1, 2])])
def test_a_rank_with_several_shards_has_neighbours(ranks, places):
    assert [rank_of(shard, 3, ranks) for shard in range(3)] == places

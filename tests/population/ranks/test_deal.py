"""Agents are dealt to shards, evenly and in order, and transfers of ranks to groups."""

from hypothesis import given
from hypothesis import strategies as st

from evo_grpo.population.ranks.deal import deal, side_by_side

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


def test_one_shard_is_everybody():
    assert deal([3, 5, 6], 1) == ((3, 5, 6),)
    assert deal([3, 5, 6], 2) == ((3, 5), (6,))
    assert deal([3, 5], 3) == ((3,), (5,), ())


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=30))
def test_transfers_of_a_rank_wait_for_no_more_than_those_of_the_two_ranks(transfers):
    ordered = side_by_side(enumerate(transfers), lambda one: one[1])
    assert sorted(ordered) == list(enumerate(transfers))
    busy = [rank for ends in transfers for rank in set(ends) if len(set(ends)) == 2]
    done = dict.fromkeys(range(7), 0)
    for _, (source, target) in ordered:
        if source != target:
            done[source] = done[target] = 1 + max(done[source], done[target])
            assert done[source] < max(1, busy.count(source)) + max(1, busy.count(target))


def test_a_chain_of_transfers_is_cut_into_two_halves():
    chain = [(rank, rank + 1) for rank in range(6)]
    assert side_by_side(chain, lambda ends: ends) == [*chain[::2], *chain[1::2]]

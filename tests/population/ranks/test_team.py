"""How agents are dealt to shards, transfers of ranks are ordered, and passes made together."""

from queue import Queue
from threading import Barrier, BrokenBarrierError, Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evo_grpo.errors import RunFailedError
from evo_grpo.population.ranks.team import Lockstep, Pass, Team, deal, order_transfers

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
    ordered = order_transfers(enumerate(transfers), lambda one: one[1])
    assert sorted(ordered) == list(enumerate(transfers))
    busy = [rank for ends in transfers for rank in set(ends) if len(set(ends)) == 2]
    done = dict.fromkeys(range(7), 0)
    for _, (source, target) in ordered:
        if source != target:
            done[source] = done[target] = 1 + max(done[source], done[target])
            assert done[source] < max(1, busy.count(source)) + max(1, busy.count(target))


def test_a_chain_of_transfers_is_cut_into_two_halves():
    chain = [(rank, rank + 1) for rank in range(6)]
    assert order_transfers(chain, lambda ends: ends) == [*chain[::2], *chain[1::2]]


F, B = Pass.FORWARD, Pass.BACKWARD


class Talk:
    """Ranks in threads that tell each other a number."""

    def __init__(self, ranks):
        self.told = [0] * ranks
        self.barrier = Barrier(ranks, timeout=20)

    def highest(self, rank):
        def tell(number):
            self.told[rank] = number
            self.barrier.wait()
            found = max(self.told)
            self.barrier.wait()
            return found

        return tell


def walk(programs):
    """Run a program on each rank; returns the exchanges and the own passes of each."""
    talk = Talk(len(programs))
    exchanges, own = [[] for _ in programs], [[] for _ in programs]
    errors = Queue()

    def play(rank):
        lockstep = Lockstep(
            talk.highest(rank),
            lambda: exchanges[rank].append(F),
            lambda: exchanges[rank].append(B),
        )
        try:
            for wanted in programs[rank]:
                with lockstep.forward() if wanted is F else lockstep.backward():
                    exchanges[rank].append(wanted)
                    own[rank].append(wanted)
            lockstep.idle()
        except BrokenBarrierError as error:
            errors.put(error)

    threads = [Thread(target=play, args=(rank,)) for rank in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors.empty(), "the ranks lost each other"
    return exchanges, own


#: Forwards alone, as in decoding, and forwards with their backward.
PARTS = st.lists(st.sampled_from([[F], [F, F, F], [F, B], [F, F, B]]), max_size=5)
PROGRAMS = st.lists(
    PARTS.map(lambda parts: [one for part in parts for one in part]), min_size=1, max_size=4
)


@settings(max_examples=40)
@given(PROGRAMS)
def test_ranks_make_the_same_exchanges_whatever_each_wants(programs):
    exchanges, own = walk(programs)
    assert all(made == exchanges[0] for made in exchanges)
    assert own == [list(program) for program in programs]


def test_no_exchange_is_made_for_nobody():
    exchanges, _ = walk([[F, B, F, B], [F, B, F, B]])
    assert exchanges[0] == [F, B, F, B]


def test_a_backward_waits_until_nobody_wants_a_forward():
    exchanges, _ = walk([[F, B], [F, F, F, B]])
    assert exchanges[0] == [F, F, F, B]


def test_a_rank_without_work_takes_part_in_that_of_others():
    exchanges, _ = walk([[], [F, F, B]])
    assert exchanges[0] == [F, F, B]


def test_an_error_in_the_middle_of_a_pass_leaves_this_rank_out_for_good():
    lockstep = Lockstep(lambda number: number, lambda: None, lambda: None)
    with pytest.raises(ValueError, match="in the middle"), lockstep.forward():
        raise ValueError("in the middle")
    assert lockstep.broken
    for use in (lockstep.forward, lockstep.backward):
        with pytest.raises(RunFailedError, match="continue with: evo-grpo resume"), use():
            pass
    with pytest.raises(RunFailedError, match="in the middle of one"):
        lockstep.idle()


def test_an_error_while_others_are_helped_leaves_this_rank_out_too():
    def fails():
        raise ValueError("the others are gone")

    lockstep = Lockstep(lambda number: max(number, F), fails, lambda: None)
    with pytest.raises(ValueError, match="are gone"):
        lockstep.idle()
    assert lockstep.broken


def test_alone_nobody_is_waited_for():
    def never():
        raise AssertionError("there is nobody to join")

    lockstep = Team().in_lockstep(never, never)
    with lockstep.backward():
        pass
    lockstep.idle()

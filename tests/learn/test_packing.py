"""Rows to micro-batches: none lost, none over the budget, in the order that computes least."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evo_grpo.learn.packing import collate, pack
from evo_grpo.learn.rows import Row

CPU = torch.device("cpu")


def row(prompt, generated, *, start=0, number=0):
    mask = np.arange(prompt + generated) >= prompt
    ids = np.concatenate([np.arange(prompt) + start + 2, np.full(generated, 1)])
    return Row(ids, mask, number=number)


def groups(sizes, prompts, before=6, after=32):
    """`prompts` groups of every agent, as large as its entry in `sizes`."""
    return [
        (agent, row(before, after, start=10 * prompt, number=max(sizes) * prompt + i))
        for agent, size in enumerate(sizes)
        for prompt in range(prompts)
        for i in range(size)
    ]


def computed(bucket):
    """Padded tokens of a micro-batch, the slow way, by either plan."""
    prompts = {(agent, r.token_ids[~r.mask].tobytes()) for agent, r in bucket}
    before = max(int((~r.mask).sum()) for _, r in bucket)
    after = max(r.generated for _, r in bucket)
    whole = len(bucket) * max(len(r.token_ids) for _, r in bucket)
    return min(whole, len(prompts) * before + len(bucket) * after)


ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 12), st.integers(1, 12), st.integers(0, 2)),
    min_size=1,
    max_size=40,
)


@given(rows=ROWS, budget=st.integers(1, 100), most=st.none() | st.integers(1, 5))
def test_no_row_is_lost_and_the_budget_is_kept(rows, budget, most):
    pairs = [
        (agent, row(before, after, start=start, number=number))
        for number, (agent, before, after, start) in enumerate(rows)
    ]
    buckets = pack(pairs, budget, most)
    assert sorted(map(id, (r for b in buckets for _, r in b))) == sorted(id(r) for _, r in pairs)
    for bucket in buckets:
        assert [agent for agent, _ in bucket] == sorted(agent for agent, _ in bucket)
        assert computed(bucket) <= budget or len(bucket) == 1
        assert most is None or len(bucket) <= most


def test_rows_of_like_length_stand_together():
    pairs = [(0, row(n - 1, 1, start=n)) for n in (3, 20, 4, 19)]
    assert [[len(r.token_ids) for _, r in b] for b in pack(pairs, 40)] == [[20, 19], [4, 3]]


def test_few_long_rows_get_a_micro_batch_of_their_own_where_padding_costs_more():
    pairs = [
        (agent, row(1, 63 if i < 2 else 7, start=100 * i, number=i))
        for agent in range(2)
        for i in range(16)
    ]
    lengths = [{len(r.token_ids) for _, r in bucket} for bucket in pack(pairs, 10_000)]
    assert lengths == [{64}, {8}]
    # A sixteenth of the budget is more than the padding of 28 rows.
    assert len(pack(pairs, 100_000)) == 1


def test_rows_of_one_length_are_divided_evenly():
    pairs = [(0, row(9, 1, start=100 * i, number=i)) for i in range(10)]
    assert [len(bucket) for bucket in pack(pairs, 85)] == [5, 5]


def test_rows_of_one_long_prompt_stand_together():
    pairs = [
        (0, row(30, lengths, start=prompt, number=4 * prompt + i))
        for prompt in range(3)
        for i, lengths in enumerate((1, 4, 2, 3))
    ]
    buckets = pack(pairs, 50)
    assert [len(b) for b in buckets] == [4, 4, 4]
    assert all(len({r.token_ids[0] for _, r in b}) == 1 for b in buckets)


def test_every_bucket_holds_all_agents_alike_where_rows_allow_it():
    for bucket in pack(groups((4, 4, 4), 2, 3, 5), 100):
        counts = collate(bucket, 0, CPU).counts
        assert len(counts) == 3
        assert len(set(counts)) == 1


def test_of_many_agents_a_bucket_holds_few_with_all_their_rows():
    """A group of each of 8 agents is twice the budget: four buckets of two agents, not of four."""
    buckets = pack(groups((4,) * 8, 2), 4 * (6 + 4 * 32))
    assert [collate(bucket, 0, CPU).counts for bucket in buckets] == [(8, 8)] * 4
    assert [sorted({position for position, _ in bucket}) for bucket in buckets] == [
        [0, 1], [2, 3], [4, 5], [6, 7]
    ]  # fmt: skip


def test_groups_of_different_sizes_stay_whole_and_a_bucket_holds_one_of_every_agent():
    sizes = (4, 4, 6, 8, 16)
    tokens = len(sizes) * 6 + sum(sizes) * 32
    for tiers, budget in ((1, tokens), (1, 2 * tokens - 1), (2, 2 * tokens)):
        buckets = pack(groups(sizes, 4), budget)
        assert len(buckets) == 4 // tiers
        for bucket in buckets:
            assert collate(bucket, 0, CPU).counts == tuple(tiers * size for size in sizes)


def test_a_tier_over_the_budget_is_split_between_groups():
    buckets = pack(groups((8, 8), 2), 6 + 8 * 32)
    assert [collate(bucket, 0, CPU).counts for bucket in buckets] == [(8,)] * 4


@pytest.mark.parametrize(
    ("agents", "size", "budget", "most", "buckets"),
    [
        pytest.param(8, 8, int(1.9 * (6 + 8 * 32)), None, 20, id="budget of almost two groups"),
        pytest.param(1, 4, 10**6, 6, 4, id="three instead of four are too little"),
        pytest.param(1, 8, 10**6, 9, 4, id="a row more than a group"),
    ],
)
def test_groups_are_split_only_where_whole_ones_leave_buckets_half_full(
    agents, size, budget, most, buckets
):
    assert len(pack(groups((size,) * agents, 4), budget, most)) == buckets

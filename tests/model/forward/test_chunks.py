import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evo_grpo.model.forward.stacks import make_chunks

CPU = torch.device("cpu")
COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any).map(tuple)


def owner_of_rows(counts):
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


@given(COUNTS, st.integers(1, 9), st.integers(0, 64))
def test_products_equal_those_of_each_row_with_its_own_agent(counts, columns, rank):
    chunks = make_chunks(counts, columns, rank, CPU)
    noise = torch.Generator().manual_seed(sum(counts) + columns)
    x = torch.randn(sum(counts), columns, 3, generator=noise, dtype=torch.float64)
    b = torch.randn(len(counts), 3, 5, generator=noise, dtype=torch.float64)
    result = torch.ones(sum(counts), columns, 5, dtype=torch.float64)
    chunks.add_product(result, chunks.split(x), chunks.per_chunk(b))
    torch.testing.assert_close(result, 1 + torch.bmm(x, b[owner_of_rows(counts)]))


@given(COUNTS, st.integers(1, 9), st.integers(0, 64))
def test_sums_over_an_agents_rows_hold_no_padding(counts, columns, rank):
    chunks = make_chunks(counts, columns, rank, CPU)
    noise = torch.Generator().manual_seed(sum(counts) + columns)
    x = torch.randn(sum(counts), columns, 3, generator=noise, dtype=torch.float64)
    grad = torch.randn(sum(counts), columns, 2, generator=noise, dtype=torch.float64)
    products = torch.bmm(chunks.spread(grad).transpose(1, 2), chunks.split(x))
    per_row = torch.bmm(grad.transpose(1, 2), x)
    expected = torch.zeros(len(counts), 2, 3, dtype=torch.float64)
    expected.index_add_(0, owner_of_rows(counts), per_row)
    torch.testing.assert_close(chunks.per_agent(products, len(counts)), expected)


def test_equal_counts_need_no_index():
    chunks = make_chunks((4, 4, 4), 7, 16, CPU)
    assert (chunks.count, chunks.rows) == (3, 4)
    assert chunks.owners is chunks.gather is chunks.scatter is None


def test_a_common_divisor_moves_no_row():
    chunks = make_chunks((16, 24, 8), 32, 16, CPU)
    assert chunks.gather is None
    assert (chunks.count, chunks.rows) == (6, 8)
    assert chunks.owners is not None
    assert chunks.owners.tolist() == [0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("counts", [(97, 101, 89), (1, 200)])
def test_one_token_a_row_pads_little(counts):
    chunks = make_chunks(counts, 1, 16, CPU)
    assert sum(counts) <= chunks.count * chunks.rows < 1.3 * sum(counts) + 16


def test_padding_repeats_rows_of_the_same_agent():
    counts = (97, 101, 89)
    chunks = make_chunks(counts, 1, 16, CPU)
    owners = owner_of_rows(counts).double()[:, None]
    pieces = chunks.split(owners)
    assert chunks.gather is not None
    assert chunks.owners is not None
    assert torch.equal(pieces[..., 0], chunks.owners[:, None].expand_as(pieces[..., 0]).double())


def test_owners_are_named_by_their_places_in_a_longer_list():
    equal, ragged = make_chunks((4, 4), 7, 16, CPU), make_chunks((16, 24, 8), 32, 16, CPU)
    assert equal.placed((0, 1), 2, CPU) is equal
    assert equal.placed((2, 0), 3, CPU).owners.tolist() == [2, 0]
    assert ragged.placed((5, 1, 3), 6, CPU).owners.tolist() == [5, 5, 1, 1, 1, 3]
    values = torch.ones(6, 2)
    summed = ragged.placed((5, 1, 3), 6, CPU).per_agent(values, 6)
    assert summed[:, 0].tolist() == [0, 3, 0, 1, 0, 2]

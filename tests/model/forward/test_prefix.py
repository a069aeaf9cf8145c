"""What rows share is found, and every wanted position is where it was."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from evo_grpo.learn.packing import collate
from evo_grpo.learn.rows import Row

CPU = torch.device("cpu")


def row(prompt, rest, mask=None):
    ids = np.array([*prompt, *rest])
    own = [True] * len(rest) if mask is None else mask
    return Row(ids, np.array([False] * len(prompt) + own))


def contexts_whole(batch):
    """The tokens each wanted position sees, read from whole rows."""
    width = batch.input_ids.shape[1]
    return [
        tuple(batch.input_ids[w // width, : w % width + 1].tolist()) for w in batch.where.tolist()
    ]


def contexts_shared(batch):
    """The same, read from beginnings and rests."""
    shared = batch.prefix
    before, after = shared.ids.shape[1], shared.rest.shape[1]
    out = []
    for w in shared.where.tolist():
        if w < shared.ids.numel():
            out.append(tuple(shared.ids[w // before, : w % before + 1].tolist()))
            continue
        line, place = divmod(w - shared.ids.numel(), after)
        beginning = shared.source[line].item()
        tokens = shared.ids[beginning, : shared.lengths[beginning]].tolist()
        out.append((*tokens, *shared.rest[line, : place + 1].tolist()))
    return out


PROMPTS = [(3, 4, 5, 6, 7, 8), (3, 4, 5, 6, 7, 9), (9, 9, 9, 9)]
ROWS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(PROMPTS),
        st.lists(st.tuples(st.integers(10, 19), st.booleans()), min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=16,
)


@given(ROWS)
def test_every_wanted_position_sees_the_same_tokens(rows):
    pairs = []
    for agent, prompt, rest in sorted(rows, key=lambda r: r[0]):
        mask = [True, *(own for _, own in rest[1:])]
        pairs.append((agent, row(prompt, [token for token, _ in rest], mask)))
    batch = collate(pairs, 0, CPU)
    if batch.prefix is None:
        return
    assert contexts_shared(batch) == contexts_whole(batch)
    shared = batch.prefix
    plain = len(pairs) * batch.input_ids.shape[1]
    assert shared.ids.numel() + shared.rest.numel() <= 0.95 * plain
    assert sum(shared.counts) == len(shared.ids) == len(shared.lengths)


def test_a_group_has_one_beginning_and_agents_have_their_own():
    pairs = [(a, row(PROMPTS[p], (10 + g, 1))) for a in (0, 2) for p in (0, 1) for g in range(4)]
    shared = collate(pairs, 0, CPU).prefix
    assert shared.counts == (2, 2)
    assert shared.ids.tolist() == [list(PROMPTS[0]), list(PROMPTS[1])] * 2
    assert shared.source.tolist() == [i for i in range(4) for _ in range(4)]
    assert shared.rest.tolist() == [[10 + g] for _ in range(4) for g in range(4)]


def test_nothing_is_cut_where_nothing_is_saved():
    alone = [(0, row((3, 4, 5, n), (10, 1))) for n in range(6, 12)]
    assert collate(alone, 0, CPU).prefix is None
    short = [(0, row((3,), range(10, 40))) for _ in range(4)]
    assert collate(short, 0, CPU).prefix is None


def test_rows_without_a_generated_token_ask_for_nothing():
    silent = Row(np.array([3, 4, 5, 6, 7, 8]), np.zeros(6, bool))
    pairs = [(0, silent), *((0, row(PROMPTS[0], (10, 1))) for _ in range(7))]
    batch = collate(pairs, 0, CPU)
    assert contexts_shared(batch) == contexts_whole(batch)

"""Attention of shared prefixes by flash kernels; here by torch's own for a CPU."""

from functools import partial

import numpy as np
import pytest
import tiny
import torch
from architectures import FAMILIES
from plain_attention import SIZE, one_row, table
from tiny_cohort import PLAIN, build_cohort, learn, make_rows, perturb

from evo_grpo.learn.rows import Row
from evo_grpo.model.forward import prefix as prefixes
from evo_grpo.model.forward.chunks import make_chunks
from evo_grpo.model.forward.prefix import find_shared_prefixes
from evo_grpo.model.llama import flash, train
from evo_grpo.model.llama.cuda import choice
from evo_grpo.model.llama.cuda.comparison import differs
from evo_grpo.model.llama.flash import SharedAttention
from evo_grpo.model.llama.kernels import Span

CPU = torch.device("cpu")
#: Largest difference over the largest number.
APART = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture
def by_flash(monkeypatch):
    """Learn by these kernels; the calls are counted."""
    calls = []

    class Counted(SharedAttention):
        def __call__(self, joined):
            calls.append(joined.shape)
            return super().__call__(joined)

    monkeypatch.setattr(choice, "flash_serves", lambda *given: True)
    monkeypatch.setattr(train, "SharedAttention", Counted)
    return calls


def shared(seed, monkeypatch):
    """Rows of some agents as the learner cuts them; the rests of some are padding alone."""
    monkeypatch.setattr(prefixes, "MIN_SAVED_SHARE", -9.0)
    rng = np.random.default_rng(seed)
    positions, whole = [], []
    for agent in range(rng.integers(1, 4)):
        for _ in range(rng.integers(1, 4)):
            head = rng.integers(2, 99, rng.integers(1, 9))
            head[0] = 100 + len(whole)  # so that no two groups share a prefix
            # A group may be one row, whose rest may be padding alone.
            tails = [rng.integers(2, 99, rng.integers(1, 6)) for _ in range(rng.integers(1, 6))]
            if rng.integers(0, 4) == 0:
                head, tails = head[:1], tails[:1] if rng.integers(0, 2) else [head[:0]]
            whole += [(head, tail) for tail in tails]
            positions += [agent] * len(tails)
    width = max(2, *(len(head) + len(tail) for head, tail in whole))
    ids, masks = np.zeros((len(whole), width), np.int64), np.zeros((len(whole), width), bool)
    for i, (head, tail) in enumerate(whole):
        ids[i, : len(head) + len(tail)] = np.r_[head, tail]
        masks[i, len(head) : len(head) + len(tail)] = True
    masks[:, 0] = False
    return find_shared_prefixes(np.array(positions), ids, masks, CPU)


def spans_of(prefix):
    """The spans of a layer, with rotary positions."""
    (count, before), (rows, after) = prefix.ids.shape, prefix.rest.shape
    starts = [prefix.lengths[s] for s in prefix.source.tolist()]
    tables = [torch.stack(t)[:, None] for t in zip(*(table(after, s) for s in starts), strict=True)]
    return (
        Span(0, count, before, make_chunks((count,), before, 0, CPU), *table(before)),
        Span(count * before, rows, after, make_chunks((rows,), after, 0, CPU), *tables),
    )


def by_rows(prefix, spans, joined, heads, kv_heads):
    """Each row for itself; what only padding attends to is left out."""
    start = spans[1].start
    beginnings = joined[:start].split(prefix.ids.shape[1])
    rests = joined[start:].split(prefix.rest.shape[1])
    out = [one_row(row, heads, kv_heads) for row in beginnings]
    for source, row in zip(prefix.source.tolist(), rests, strict=True):
        start = prefix.lengths[source]
        whole = torch.cat([beginnings[source][:start], row])
        out.append(one_row(whole, heads, kv_heads)[start:])
    return torch.cat(out)


@pytest.mark.parametrize("dtype", APART, ids=str)
@pytest.mark.parametrize("piece", range(5))
def test_outputs_and_gradients_are_those_of_each_row_for_itself(piece, dtype, monkeypatch):
    for seed in range(piece, 170, 5):
        prefix = shared(seed, monkeypatch)
        heads, kv_heads = [(1, 1), (4, 2), (3, 3), (7, 1), (8, 1)][seed % 5]
        spans = spans_of(prefix)
        given = tiny.noise((spans[1].stop, (heads + 2 * kv_heads) * SIZE), seed).detach().to(dtype)
        weights = tiny.noise((spans[1].stop, heads * SIZE), seed + 1).to(dtype)
        found = []
        for kind in (dtype, torch.float64):
            joined = given.to(kind, copy=True).requires_grad_()
            if kind is dtype:
                wide = [Span(s.start, s.rows, s.columns, s.chunks, s.cos.to(dtype), s.sin.to(dtype))
                        for s in spans]  # fmt: skip
                attention = SharedAttention(heads, kv_heads, tuple(wide), prefix, SIZE**-0.5)
                out = attention(joined)
            else:
                out = by_rows(prefix, spans, joined, heads, kv_heads)
            out.backward(weights.to(kind))
            found.append((out.detach().double(), joined.grad.double()))
        for fast, slow in zip(*found, strict=True):
            assert (fast - slow).abs().max() <= APART[dtype] * slow.abs().max(), seed


def learned(build, rows, hparams=PLAIN, ranks=None, **settings):
    """The adapters of agents that have learned, and their metrics."""
    slots = len(rows)
    cohort = build_cohort(slots, hparams, model=build(), **settings)
    metrics = learn(cohort, list(cohort.agents), rows)
    weights = [
        torch.cat([p.detach().flatten() for p in cohort.slots.parameters(state.adapter)])
        for state in cohort.agents.values()
    ]
    return weights, metrics


@pytest.mark.parametrize("family", ["llama", *FAMILIES])
def test_agents_learn_the_same(family, by_flash, monkeypatch):
    build = {"llama": tiny.llama, **FAMILIES}[family]
    rows = [make_rows(slot, groups=3, prompt=(4, 9)) for slot in range(3)]
    settings = {"hparams": PLAIN.replace(beta=0.1, update_epochs=2, batch_size=6)}
    ours, metrics = learned(build, rows, **settings)
    assert bool(by_flash) == (family != "mistral-window")  # whose window is shorter than the rows
    monkeypatch.setattr(choice, "flash_serves", lambda *given: False)
    wanted, others = learned(build, rows, **settings)
    for one, two in zip(ours, wanted, strict=True):
        # AdamW moves a weight whose gradient is near 0 by the sign of that.
        assert (one - two).abs().mean() < 1e-5
    for one, two in zip(metrics, others, strict=True):
        assert one == pytest.approx(two, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("in_order", [True, False])
def test_the_order_of_sums_is_set_for_the_backward_alone(in_order, monkeypatch):
    modes = []

    def watched(call, *given):
        modes.append(torch.get_deterministic_debug_mode())
        return call(*given)

    monkeypatch.setattr(flash, "_backward", partial(watched, flash._backward))
    prefix = shared(3, monkeypatch)
    spans = spans_of(prefix)
    given = tiny.noise((spans[1].stop, 4 * SIZE), 0).detach().requires_grad_()
    attention = SharedAttention(2, 1, spans, prefix, 0.3, in_order=in_order)
    attention(given).sum().backward()
    # A mode of 1 would only warn, and flash attention would keep to no order.
    assert modes == [2 if in_order else 0] * 2
    assert torch.get_deterministic_debug_mode() == 0
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_two_equal_calls_are_equal_to_the_bit(by_flash):
    rows = [make_rows(slot, groups=3) for slot in range(2)]
    first, second = (learned(tiny.llama, rows)[0] for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_a_nan_stays_with_its_agent(by_flash):
    rows = [make_rows(slot, groups=2) for slot in range(3)]
    found = []
    for broken in (False, True):
        cohort = build_cohort(3, PLAIN, model=tiny.llama())
        if broken:
            perturb(cohort, 1, float("nan"))
        learn(cohort, [0, 1, 2], rows)
        found.append([p.clone() for s in (0, 2)
                      for p in cohort.slots.parameters(cohort.agents[s].adapter)])  # fmt: skip
    assert by_flash
    assert all(map(torch.equal, *found))


def test_rows_of_a_prefix_that_lie_apart_are_attended_to_as_before(by_flash):
    one, two = (make_rows(seed, groups=1, prompt=(6, 7)) for seed in (1, 2))
    assert isinstance(one[0], Row)
    mixed = [row for pair in zip(one, two, strict=True) for row in pair]
    ids = [np.r_[row.token_ids, np.zeros(16 - len(row.token_ids), np.int64)] for row in mixed]
    masks = [np.r_[row.mask, np.zeros(16 - len(row.mask), bool)] for row in mixed]
    prefix = find_shared_prefixes(np.zeros(8, np.int64), np.stack(ids), np.stack(masks), CPU)
    assert prefix.segments is None
    assert prefix.rows == ()


def shifted_sums(call, grad, out, sums, *rest):
    return call(grad, out, sums.flip(0) + 1.0, *rest)


def nan_in_a_gradient(call, *given):
    dq, dk, dv = call(*given)
    return dq, dk, dv * float("nan")


def scale_of_its_own(call, *given):
    return call(*given[:-1], given[6].shape[-1] ** -0.5)


def far_keys_forgotten(call, *given):
    dq, dk, dv = call(*given)
    dk[130:150] = 0.0
    return dq, dk, dv


WRONG = (shifted_sums, nan_in_a_gradient, scale_of_its_own, far_keys_forgotten)


@pytest.mark.parametrize("wrong", [None, *WRONG])
def test_kernels_that_mean_something_else_are_seen(wrong, monkeypatch):
    # Its scale of the scores is not that of the size of a head.
    slots = tiny.population(FAMILIES["granite"](max_position_embeddings=256), (4, 4))
    if wrong is not None:
        monkeypatch.setattr(flash, "_backward", partial(wrong, flash._backward))
    assert (differs(slots, slots.names, "flash") is None) == (wrong is None)

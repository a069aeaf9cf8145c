"""The specialized learn pass against PEFT's own forward, one agent after another."""

import math
from functools import partial

import architectures
import pytest
import tiny
import torch
from fused_cases import (
    all_hidden,
    assert_close,
    assert_same_bits,
    inputs,
    llama_gradients,
    one_at_a_time,
    scores,
    take_gradients,
)

from evo_grpo.model.forward.choice import ModuleForward, open_forward
from evo_grpo.model.forward.prefix import SharedPrefix
from evo_grpo.model.forward.stacks import RowLayout
from evo_grpo.model.llama import attention
from evo_grpo.model.llama.departures import can_join_layers, departures_of
from evo_grpo.model.llama.train import LlamaForward


def compare_with_one_at_a_time(slots, layout, *, recompute=False):
    """Hidden states and every agent's gradients."""
    input_ids, weights = inputs(layout.rows)
    slow_hidden, slow = one_at_a_time(slots, layout, input_ids, weights)
    hidden, fast = llama_gradients(slots, layout, input_ids, weights, recompute=recompute)
    torch.testing.assert_close(hidden, slow_hidden, atol=1e-5, rtol=1e-5)
    assert_close(fast, slow)


@pytest.fixture(autouse=True)
def length(request, monkeypatch):
    """The way to attend: that of short rows where a test does not say."""
    way = getattr(request, "param", "short")
    monkeypatch.setattr(attention, "SHORT", 128 if way == "short" else 0)


both_lengths = pytest.mark.parametrize("length", ["short", "long"], indirect=True)


MEMBERS = {
    "bias on q k v": tiny.qwen2,
    "as many key heads": partial(tiny.llama, num_key_value_heads=4),
    "bias in the MLP": partial(tiny.llama, mlp_bias=True),
    **architectures.FAMILIES,
}


@both_lengths
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("build", MEMBERS.values(), ids=MEMBERS)
def test_members_of_the_family(build, recompute):
    """Ragged rows of unequal ranks, some longer than a window."""
    slots = tiny.population(build(), (4, 2))
    assert not departures_of(slots.base, slots.layers)
    assert can_join_layers(slots.base, slots.layers)
    compare_with_one_at_a_time(slots, RowLayout(("a0", "a1"), (1, 3)), recompute=recompute)


@pytest.mark.parametrize("modules", [["q_proj"], ["v_proj"], ["k_proj", "up_proj"], ["o_proj"]])
def test_some_of_the_joined_layers_may_have_adapters(modules):
    slots = tiny.population(tiny.llama(), (4, 4), target_modules=modules)
    layout = RowLayout(("a0", "a1"), (1, 3))
    compare_with_one_at_a_time(slots, layout)


def test_a_micro_batch_may_hold_some_of_the_agents():
    slots = tiny.population(tiny.llama(), (4, 4, 4))
    layout = RowLayout(tiny.names(3), (2, 1, 2))
    input_ids, weights = inputs(layout.rows)
    _, whole = llama_gradients(slots, layout, input_ids, weights)
    step = LlamaForward(slots, layout.adapters)
    for names, rows in ((("a0", "a2"), [0, 1, 3, 4]), (("a1",), [2])):
        counts = (2, 2) if len(names) == 2 else (1,)
        with step.rows(RowLayout(names, counts)):
            hidden = all_hidden(step, input_ids[rows])
            (scores(slots.base, hidden, input_ids[rows]) * weights[rows]).sum().backward()
    step.collect_gradients()
    assert_close(take_gradients(slots, layout.adapters), whole)


def test_none_takes_the_base_alone():
    slots = tiny.population(tiny.llama())
    input_ids, _ = inputs(6)
    with torch.no_grad():
        with slots.peft.disable_adapter():
            plain = slots.base.hidden(input_ids)
        slots.restore_trainable()
        for adapters, counts in (((None, "a0", None), (2, 3, 1)), ((None, None), (4, 2))):
            step = LlamaForward(slots, adapters)
            with step.rows(RowLayout(adapters, counts)):
                hidden = all_hidden(step, input_ids)
            mine = [i for n, c in zip(adapters, counts, strict=True) for i in [n] * c]
            alone = [i for i, name in enumerate(mine) if name is None]
            torch.testing.assert_close(hidden[alone], plain[alone], atol=1e-5, rtol=1e-5)
            others = [i for i, name in enumerate(mine) if name is not None]
            assert not others or (hidden[others] - plain[others]).abs().max() > 1e-2


@pytest.mark.parametrize(
    "build", [tiny.llama, architectures.qwen3, architectures.olmo3, architectures.gemma3]
)
def test_bfloat16_stays_near_the_modules_and_gives_gradients_in_the_adapters_dtype(build):
    slots = tiny.population(build().bfloat16(), (4, 4))
    for name in ("a0", "a1"):
        assert all(p.dtype == torch.float32 for p in slots.parameters(name))
    layout = RowLayout(("a0", "a1"), (1, 3))
    input_ids, weights = inputs(layout.rows)
    out = []
    for step in (LlamaForward(slots, layout.adapters), ModuleForward(slots)):
        with step.rows(layout):
            hidden = all_hidden(step, input_ids)
            (scores(slots.base, hidden, input_ids) * weights).sum().backward()
        step.collect_gradients()
        out.append((hidden.detach().float(), take_gradients(slots, layout.adapters)))
    (hidden, ours), (expected, theirs) = out
    torch.testing.assert_close(hidden, expected, atol=0.15, rtol=0.05)
    for name in ("a0", "a1"):
        for a, b in zip(ours[name], theirs[name], strict=True):
            assert a.dtype == torch.float32
            assert (a - b).norm() < 0.1 * b.norm()


def test_which_step_serves_which_model():
    plain = tiny.population(tiny.llama())
    dropping = tiny.population(tiny.llama(), lora_dropout=0.1)
    other = tiny.population(tiny.gpt2())
    assert isinstance(open_forward(plain, ("a0",)), LlamaForward)
    assert isinstance(open_forward(dropping, ("a0",)), ModuleForward)
    assert isinstance(open_forward(other, ("a0",)), ModuleForward)
    plain.base.specialized = False
    assert isinstance(open_forward(plain, ("a0",)), ModuleForward)


def shared_rows(alike):
    """Rows of two agents over two beginnings each, whole and cut."""
    lengths = (5, 5, 5, 5) if alike else (5, 3, 2, 5)
    heads = [tiny.ids(1, n, seed=40 + i)[0].tolist() for i, n in enumerate(lengths)]
    source = [0, 0, 0, 1, 1, 2, 2, 3]
    rests = tiny.ids(8, 3, seed=9).tolist()
    width = max(lengths) + 3
    whole = [heads[s] + rest for s, rest in zip(source, rests, strict=True)]
    ids = torch.tensor([w + [0] * (width - len(w)) for w in whole])
    # All that a completion's tokens and the one after them are predicted by.
    wanted = [(r, lengths[s] - 1 + j) for r, s in enumerate(source) for j in range(4)]
    where = torch.tensor([r * width + t for r, t in wanted])
    before = max(lengths)
    cut = [
        source[r] * before + t
        if t < lengths[source[r]]
        else 4 * before + r * 3 + t - lengths[source[r]]
        for r, t in wanted
    ]
    prefix = SharedPrefix(
        ids=torch.tensor([h + [0] * (before - len(h)) for h in heads]),
        lengths=lengths,
        counts=(2, 2),
        source=torch.tensor(source),
        rest=torch.tensor(rests),
        row_lengths=torch.tensor(lengths)[source if len(set(lengths)) > 1 else [0]],
        where=torch.tensor(cut),
    )
    return ids, where, prefix, RowLayout(("a0", "a1"), (5, 3))


def backward_of(slots, step, given, layout, weights=1.0):
    """Hidden states and gradients of a step over rows, or over a prefix and rests."""
    with step.rows(layout):
        hidden = step.hidden_at(*given)
        (hidden * weights).sum().backward()
    step.collect_gradients()
    return hidden.detach(), take_gradients(slots, layout.adapters)


@both_lengths
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize(
    "build", [tiny.llama, *architectures.FAMILIES.values()], ids=["llama", *architectures.FAMILIES]
)
def test_what_rows_share_is_computed_once_with_the_same_result(build, alike):
    """A rest of a row sees its prefix as far as a window reaches."""
    slots = tiny.population(build(), (2, 18 if alike else 8))
    ids, where, prefix, layout = shared_rows(alike)
    weights = tiny.noise((len(where), tiny.HIDDEN), 3) / len(where)
    shared = LlamaForward(slots, layout.adapters, recompute=not alike)
    hidden, gradients = backward_of(slots, shared, (ids, where, prefix), layout, weights)
    for step in (LlamaForward(slots, layout.adapters), ModuleForward(slots)):
        expected, theirs = backward_of(slots, step, (ids, where), layout, weights)
        torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)
        assert_close(gradients, theirs)


@both_lengths
def test_one_agents_nan_reaches_no_other_through_what_rows_share():
    slots = tiny.population(tiny.llama(), (4, 4))
    ids, where, prefix, layout = shared_rows(alike=False)
    out = []
    for broken in (False, True):
        if broken:
            with torch.no_grad():
                for parameter in slots.parameters("a0"):
                    parameter.fill_(math.nan)
        step = LlamaForward(slots, layout.adapters)
        out.append(backward_of(slots, step, (ids, where, prefix), layout))
    (clean_hidden, clean), (hidden, got) = out
    assert torch.isnan(hidden[:20]).all()
    assert torch.equal(hidden[20:], clean_hidden[20:])
    assert_same_bits(got["a1"], clean["a1"])

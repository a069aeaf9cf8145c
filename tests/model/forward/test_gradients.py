"""Every way to the gradients of several agents at once, against PEFT with one after another."""

import math

import pytest
import tiny
import torch
from fused_cases import (
    BATCHES,
    assert_close,
    assert_same_bits,
    fused_gradients,
    inputs,
    llama_gradients,
    one_at_a_time,
)

from evo_grpo.model.forward.fused import population_forward
from evo_grpo.model.forward.stacks import RowLayout
from evo_grpo.model.llama import attention


@pytest.fixture(params=["modules", "joined layers", "joined layers, long rows"])
def gradients(request, monkeypatch):
    """Hidden states and each agent's gradients; the joined layers attend to long rows otherwise."""
    monkeypatch.setattr(attention, "SHORT", 0 if "long" in request.param else 128)
    return fused_gradients if request.param == "modules" else llama_gradients


def compare(gradients, slots, layout, *, recompute=False):
    """Compare with one agent at a time, by PEFT; return its hidden states."""
    input_ids, weights = inputs(layout.rows)
    slow_hidden, slow = one_at_a_time(slots, layout, input_ids, weights)
    hidden, fast = gradients(slots, layout, input_ids, weights, recompute=recompute)
    torch.testing.assert_close(hidden, slow_hidden, atol=1e-5, rtol=1e-5)
    assert_close(fast, slow)
    return slow_hidden


@pytest.mark.parametrize(
    ("batch", "recompute"),
    [*((name, False) for name in BATCHES), ("two-equal", True), ("eight-ragged-ranks", True)],
)
def test_gradients_equal_those_of_one_agent_at_a_time(gradients, batch, recompute):
    ranks, counts = BATCHES[batch]
    slots = tiny.population(tiny.llama(), ranks)
    compare(gradients, slots, RowLayout(tiny.names(len(ranks)), counts), recompute=recompute)


@pytest.mark.parametrize("counts", [(2, 2), (1, 3)])
def test_scaling_of_rslora_and_patterns(gradients, counts):
    changes = {"use_rslora": True, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 32}}
    slots = tiny.population(tiny.llama(), (4, 4), **changes)
    compare(gradients, slots, RowLayout(("a0", "a1"), counts))


@pytest.mark.parametrize("counts", [(2, 2), (1, 3)])
def test_a_slot_may_leave_out_modules_that_another_adapts(gradients, counts):
    slots = tiny.population(tiny.llama(), ())
    for index, (rank, module) in enumerate([(4, "q_proj"), (2, "v_proj")]):
        slots.add(f"a{index}", tiny.lora(rank, target_modules=[module, "down_proj"]))
        tiny.stir(slots, f"a{index}", index + 1)
    layout = RowLayout(("a0", "a1"), counts)
    expected = compare(gradients, slots, layout)
    with torch.no_grad(), population_forward(slots.layers, layout, frozen=True):
        hidden = slots.base.hidden(inputs(layout.rows)[0])
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("counts", [(2, 2, 2), (3, 1, 2)], ids=["equal", "ragged"])
@pytest.mark.parametrize(
    ("value", "recompute"), [(None, False), (None, True), (math.nan, True), (math.inf, False)]
)
def test_one_agents_nan_reaches_no_other(gradients, counts, value, recompute):
    """In the loss, or in all weights: not even the last bit of another agent changes."""
    slots = tiny.population(tiny.llama(), (4, 4, 2))
    layout = RowLayout(tiny.names(3), counts)
    input_ids, weights = inputs(layout.rows)
    before = gradients(slots, layout, input_ids, weights, recompute=recompute)
    rows = list(layout.slices())
    if value is None:
        weights[rows[1]] = math.nan
    else:
        with torch.no_grad():
            for parameter in slots.parameters("a1"):
                parameter.fill_(value)
    hidden, broken = gradients(slots, layout, input_ids, weights, recompute=recompute)
    harmed = broken["a1"] if value is None else [hidden[rows[1]]]
    assert all(torch.isnan(x).any() for x in harmed)
    for name, part in (("a0", rows[0]), ("a2", rows[2])):
        assert torch.equal(hidden[part], before[0][part])
        assert_same_bits(broken[name], before[1][name])

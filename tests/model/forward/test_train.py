import architectures
import pytest
import tiny
import torch
from fused_cases import (
    all_hidden,
    assert_close,
    inputs,
    one_at_a_time,
    scores,
    take_gradients,
)

from evo_grpo.model.forward.choice import ModuleForward
from evo_grpo.model.forward.stacks import RowLayout

LAYOUT = RowLayout(("a0", "a1"), (1, 3))


def gradients(slots, step):
    input_ids, weights = inputs(LAYOUT.rows)
    with step.rows(LAYOUT):
        hidden = all_hidden(step, input_ids)
        (scores(slots.base, hidden, input_ids) * weights).sum().backward()
    step.collect_gradients()
    return take_gradients(slots, LAYOUT.adapters)


def test_modules_recompute_their_layers():
    slots = tiny.population(tiny.gpt2(), (4, 2))
    calls = []
    slots.base.trunk.h[0].attn.register_forward_hook(
        lambda *_: calls.append(torch.is_grad_enabled())
    )
    plain = gradients(slots, ModuleForward(slots))
    assert len(calls) == 1
    recomputed = gradients(slots, ModuleForward(slots, recompute=True))
    assert len(calls) == 3
    assert_close(recomputed, plain, atol=1e-7)
    assert not any(module.training for module in slots.base.trunk.modules())


@pytest.mark.parametrize(
    "build",
    [
        lambda: architectures.opt(dropout=0.3, attention_dropout=0.3),
        lambda: architectures.bart(dropout=0.3, attention_dropout=0.3, activation_dropout=0.3),
    ],
    ids=["opt", "bart"],
)
def test_recomputed_layers_do_not_drop_out(build):
    """They read their own `training`, which checkpointing sets."""
    slots = tiny.population(build(), (4, 2))
    input_ids, weights = inputs(LAYOUT.rows)
    _, expected = one_at_a_time(slots, LAYOUT, input_ids, weights)
    state = torch.get_rng_state()
    assert_close(gradients(slots, ModuleForward(slots, recompute=True)), expected)
    assert torch.equal(state, torch.get_rng_state()), "the global generator has moved"
    assert not any(module.training for module in slots.base.trunk.modules())

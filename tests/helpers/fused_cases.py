"""The population forward against one agent at a time: inputs, slow references, comparisons."""

import contextlib

import tiny
import torch

from evo_grpo.model.forward.fused import population_forward
from evo_grpo.model.llama.train import LlamaForward

T = 7


def scores(base, hidden, input_ids):
    """Log-probs (B, T-1) of each next token."""
    targets = input_ids[:, 1:]
    temperature = torch.full((targets.numel(),), 0.8)
    logprobs, _ = base.token_logprobs(hidden[:, :-1].flatten(0, 1), targets.flatten(), temperature)
    return logprobs.view(targets.shape)


def all_hidden(step, input_ids):
    """Final hidden states (B, T, H) of a learn pass, of all tokens."""
    hidden = step.hidden_at(input_ids, torch.arange(input_ids.numel()))
    return hidden.view(*input_ids.shape, -1)


def take_gradients(slots, adapters):
    out = {}
    for name in adapters:
        if name is None or name in out:
            continue
        out[name] = [p.grad for p in slots.parameters(name)]
        for parameter in slots.parameters(name):
            parameter.grad = None
    return out


def fused_gradients(slots, layout, input_ids, weights, *, dropout=None, recompute=False):
    """Hidden states and each agent's gradients from one forward and backward."""
    mode = tiny.checkpointing(slots.base) if recompute else contextlib.nullcontext()
    with mode, population_forward(slots.layers, layout, dropout=dropout):
        hidden = slots.base.hidden(input_ids)
        (scores(slots.base, hidden, input_ids) * weights).sum().backward()
    return hidden.detach(), take_gradients(slots, layout.adapters)


def llama_gradients(slots, layout, input_ids, weights, *, recompute=False):
    """The same by the joined layers."""
    step = LlamaForward(slots, layout.adapters, recompute=recompute)
    with step.rows(layout):
        hidden = all_hidden(step, input_ids)
        (scores(slots.base, hidden, input_ids) * weights).sum().backward()
    step.collect_gradients()
    return hidden.detach(), take_gradients(slots, layout.adapters)


def one_at_a_time(slots, layout, input_ids, weights):
    """The slow obvious way: activate each adapter, let PEFT run that agent's rows alone."""
    parts, gradients = [], {}
    for name, rows in zip(layout.adapters, layout.slices(), strict=True):
        slots.activate(name)
        hidden = slots.base.hidden(input_ids[rows])
        (scores(slots.base, hidden, input_ids[rows]) * weights[rows]).sum().backward()
        parts.append(hidden.detach())
        gradients |= take_gradients(slots, [name])
    return torch.cat(parts), gradients


def inputs(rows, seed=0):
    return tiny.ids(rows, T, seed), tiny.noise((rows, T - 1), seed + 50) / rows


def assert_close(left, right, atol=1e-5):
    assert left.keys() == right.keys()
    for name, ours in left.items():
        assert any(g.abs().max() > 1e-3 for g in ours), f"{name} has no gradient to compare"
        for a, b in zip(ours, right[name], strict=True):
            torch.testing.assert_close(a, b, atol=atol, rtol=0)


def assert_same_bits(left, right):
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


BATCHES = {
    "one": ((4,), (3,)),
    "two-equal": ((4, 4), (3, 3)),
    "two-ragged": ((4, 4), (1, 4)),
    "two-ranks": ((2, 8), (2, 2)),
    "two-ranks-ragged": ((2, 8), (3, 1)),
    "eight-equal": ((4,) * 8, (2,) * 8),
    "eight-ragged-ranks": ((4, 2, 8, 4, 1, 4, 16, 4), (2, 1, 3, 2, 4, 1, 2, 5)),
}

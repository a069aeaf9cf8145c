"""Attention of shared prefixes by flash kernels; here by torch's own for a CPU.

`test_learn` compares its outputs and gradients with those of each row for itself.
"""

from functools import partial

import kernel_reference
import numpy as np
import pytest
import tiny
import torch
from architectures import FAMILIES
from tiny_cohort import make_rows

from evo_grpo.model.forward.prefix import find_shared_prefixes
from evo_grpo.model.llama.cuda import attention
from evo_grpo.model.llama.cuda.attention import Segments
from evo_grpo.model.llama.cuda.choice import differs

CPU = torch.device("cpu")


def shared(rows):
    """The shared prefixes of rows of one agent."""
    width = max(len(row.token_ids) for row in rows)
    ids = [np.r_[row.token_ids, np.zeros(width - len(row.mask), np.int64)] for row in rows]
    masks = [np.r_[row.mask, np.zeros(width - len(row.mask), bool)] for row in rows]
    return find_shared_prefixes(np.zeros(len(rows), np.int64), np.stack(ids), np.stack(masks), CPU)


def test_rows_of_a_prefix_that_lie_apart_have_no_segments():
    one, two = (make_rows(seed, groups=1, prompt=(6, 7)) for seed in (1, 2))
    assert shared([*one, *two]).segments is not None
    prefix = shared([row for pair in zip(one, two, strict=True) for row in pair])
    assert prefix.segments is None
    assert prefix.rows == ()


@pytest.mark.parametrize("in_order", [True, False])
def test_the_order_of_sums_is_set_for_the_backward_alone(in_order, monkeypatch):
    modes = []

    def watched(call, *given):
        modes.append(torch.get_deterministic_debug_mode())
        return call(*given)

    monkeypatch.setattr(attention, "flash_backward", partial(watched, attention.flash_backward))
    prefix = shared(make_rows(1, groups=2, prompt=(6, 7)))
    segments = Segments(prefix, prefix.ids, in_order=in_order)
    tokens = prefix.ids.numel() + prefix.rest.numel()
    q, kv = (tiny.noise(shape, 1).detach() for shape in ((tokens, 2, 8), (2, tokens, 1, 8)))
    (out, sums, *states), more = segments.attend(q, kv, 0.3)
    segments.gradients(out, q, kv, out, sums, more[1], [*states, *more[2:]], 0.3)
    # A mode of 1 would only warn, and flash attention would keep to no order.
    assert modes == [2 if in_order else 0] * 2
    assert torch.get_deterministic_debug_mode() == 0
    assert torch.utils.deterministic.fill_uninitialized_memory


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


@pytest.mark.parametrize(
    "wrong", [None, shifted_sums, nan_in_a_gradient, scale_of_its_own, far_keys_forgotten]
)
def test_kernels_that_mean_something_else_are_seen(wrong, monkeypatch):
    # Its scale of the scores is not that of the size of a head.
    slots = tiny.population(FAMILIES["granite"](max_position_embeddings=256), (4, 4))
    if wrong is not None:
        own = partial(wrong, attention.flash_backward)
        monkeypatch.setattr(attention, "flash_backward", own)
    with kernel_reference.instead():
        assert (differs(slots, slots.names) is None) == (wrong is None)

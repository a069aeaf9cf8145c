"""Log-probs by the kernel of the head, here by torch or in Triton's interpreter."""

import os
from contextlib import nullcontext

import kernel_reference
import pytest
import torch

from evo_grpo.model.llama.cuda import operators
from evo_grpo.model.logprobs import linear_logprobs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: numpy warns of exp() of numbers that are too large for it, of which kernels make infinities.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]
pytestmark += [pytest.mark.kernels] if INTERPRETED else []
#: Largest difference over the largest number.
APART = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def computed(given, dtype, *, kernels, **options):
    """Values, and the gradient of the hidden states."""
    hidden, weight, targets, temperature = given
    own = hidden.to(dtype).requires_grad_()
    with nullcontext() if INTERPRETED else kernel_reference.instead():
        logprobs, entropies = linear_logprobs(
            own, weight.to(dtype), targets, temperature, kernels=kernels, **options
        )
    loss = (logprobs * torch.linspace(-1, 1, len(targets))).sum()
    if options.get("of_entropies", True):
        loss = loss + 0.3 * entropies.sum()
    (grad,) = torch.autograd.grad(loss, own)
    return logprobs.detach(), entropies.detach(), grad


def states(rows=7, size=24, vocabulary=300, heat=3.0):
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(rows, size, generator=generator) * heat
    weight = torch.randn(vocabulary, size, generator=generator) * 0.3
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    # The last are sure of their target, and sure of another token.
    targets[-2] = (hidden[-2] @ weight.T).argmax()
    hidden[-2:] *= 20.0
    return hidden, weight, targets, torch.rand(rows, generator=generator) + 0.5


@pytest.mark.parametrize("of_entropies", [True, False])
@pytest.mark.parametrize("dtype", APART, ids=str)
def test_values_and_gradients_are_those_of_torch(dtype, of_entropies):
    given = states()
    ours = computed(given, dtype, kernels=True, of_entropies=of_entropies)
    # In half precision both have the logits that a product in it gives.
    wide = torch.float64 if dtype is torch.float32 else dtype
    wanted = computed(given, wide, kernels=False, of_entropies=of_entropies)
    for one, two in zip(ours, wanted, strict=True):
        one, two = one.double(), two.double()
        assert (one - two).abs().max() <= APART[dtype] * max(1.0, float(two.abs().max()))


def test_float16_holds_the_slopes_beside_a_token_that_is_sure():
    hidden, weight, targets, temperature = states(rows=2, vocabulary=60_000)
    hidden[:], weight[:, 0], targets[:] = 0.0, 1.0, 7  # all tokens have the first feature
    hidden[:, 1] = 1.0
    weight[:, 1] = torch.randn(60_000, generator=torch.Generator().manual_seed(2))
    weight[targets, 1] = 150.0
    given = hidden, weight, targets, torch.ones_like(temperature)
    assert all(part.isfinite().all() for part in computed(given, torch.float16, kernels=True))


def test_blocks_of_rows_give_the_same(monkeypatch):
    given = states()
    whole = computed(given, torch.float32, kernels=True)
    monkeypatch.setattr("evo_grpo.model.logprobs.KERNEL_BYTES", 2 * 300 * 2 * 4)
    for one, two in zip(whole, computed(given, torch.float32, kernels=True), strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


def test_a_head_with_a_cap_or_a_bias_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(operators, "head_slopes", None)
    computed(states(), torch.float32, kernels=True, softcap=20.0)
    computed(states(), torch.float32, kernels=True, bias=torch.zeros(300))

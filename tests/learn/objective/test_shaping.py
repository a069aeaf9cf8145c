import math

import pytest
import torch

from evo_grpo.learn.objective.shaping import token_advantages

ADVANTAGES = torch.tensor([1.5, -0.5, 0.0, 0.25], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
KL = torch.tensor([[0.1, 0.4, 0.1], [0.2, 9, 9], [0.0, 0.3, 9], [9, 9, 9]], dtype=torch.float64)


def test_without_switches_each_token_gets_its_row_s_advantage():
    shaped, kept = token_advantages(ADVANTAGES, MASK)
    assert torch.equal(shaped, ADVANTAGES[:, None] * MASK)
    assert kept.tolist() == [True] * 4
    assert shaped.dtype == torch.float64


def test_rows_without_signal_are_dropped():
    shaped, kept = token_advantages(ADVANTAGES, MASK, filter_zero=True)
    assert kept.tolist() == [True, True, False, True]
    shaped, kept = token_advantages(ADVANTAGES, MASK, filter_zero=True, filter_eps=0.5)
    assert kept.tolist() == [True, False, False, False]
    assert shaped[1].tolist() == [0, 0, 0]


def test_whitening_sees_the_valid_tokens_of_kept_rows():
    shaped, _ = token_advantages(ADVANTAGES, MASK, whiten=True, filter_zero=True)
    values = [1.5, 1.5, 1.5, -0.5]
    mean = sum(values) / 4
    scale = math.sqrt(sum((v - mean) ** 2 for v in values) / 4 + 1e-8)
    assert shaped[0].tolist() == pytest.approx([(1.5 - mean) / scale] * 3, abs=1e-12)
    assert shaped[1].tolist() == pytest.approx([(-0.5 - mean) / scale, 0, 0], abs=1e-12)
    assert shaped[2:].tolist() == [[0, 0, 0], [0, 0, 0]]


def test_whitening_without_spread_or_without_tokens_is_zero():
    same = torch.full((2,), 0.1)
    assert token_advantages(same, torch.ones(2, 3), whiten=True)[0].abs().max() < 1e-3
    assert token_advantages(same, torch.zeros(2, 3), whiten=True)[0].tolist() == [[0, 0, 0]] * 2


def test_kl_shaping_compares_each_token_with_those_before_it():
    kl = KL.clone().requires_grad_()
    shaped, _ = token_advantages(ADVANTAGES, MASK, kl=kl, beta=0.5)
    assert shaped[0].tolist() == pytest.approx([1.45, 1.35, 1.575])
    assert shaped[1].tolist() == pytest.approx([-0.6, 0, 0])  # the first has none before it
    assert shaped[2].tolist() == pytest.approx([0, -0.15, 0])
    assert not shaped.requires_grad
    unused, _ = token_advantages(ADVANTAGES, MASK, beta=0.5)
    assert torch.equal(unused, ADVANTAGES[:, None] * MASK)


def test_a_token_that_the_reference_likes_more_is_raised():
    flat = torch.zeros(1, dtype=torch.float64)
    kl = torch.tensor([[-2.0, -2.0, 1.0, 5.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1, 1]])  # an environment wrote the second token
    shaped, _ = token_advantages(flat, mask, kl=kl, beta=0.1)
    assert shaped[0].tolist() == pytest.approx([0.2, 0, 0.1 * (-2 - 1), 0.1 * (-0.5 - 5)])


def test_clipping_comes_last():
    shaped, _ = token_advantages(ADVANTAGES, MASK, kl=KL, beta=0.5, whiten=True, clip_range=0.9)
    whitened, _ = token_advantages(ADVANTAGES, MASK, whiten=True)
    by_kl = torch.tensor([[-0.05, -0.15, 0.075], [-0.1, 0, 0], [0, -0.15, 0], [0, 0, 0]])
    want = (whitened + by_kl).clamp(-0.9, 0.9) * MASK
    torch.testing.assert_close(shaped, want)
    assert shaped.abs().max() == 0.9
    assert 0.8 < shaped[0, 1] < 0.9

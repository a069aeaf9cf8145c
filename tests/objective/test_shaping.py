import math

import pytest
import torch

from evo_grpo.errors import ConfigError, ShapeError
from evo_grpo.objective.shaping import token_advantages

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


def test_kl_shaping_takes_from_tokens_that_stray():
    kl = KL.clone().requires_grad_()
    shaped, _ = token_advantages(ADVANTAGES, MASK, kl=kl, beta=0.5, use_kl_shaping=True)
    assert shaped[0].tolist() == pytest.approx([1.55, 1.4, 1.55])
    assert shaped[1].tolist() == pytest.approx([-0.5, 0, 0])  # alone, it is its row's mean
    assert shaped[2].tolist() == pytest.approx([0.075, -0.075, 0])
    assert not shaped.requires_grad
    unused, _ = token_advantages(ADVANTAGES, MASK, kl=kl, beta=0.5)
    assert torch.equal(unused, ADVANTAGES[:, None] * MASK)


def test_dropped_rows_get_no_shaping():
    shaped, _ = token_advantages(
        ADVANTAGES, MASK, kl=KL, beta=0.5, use_kl_shaping=True, filter_zero=True
    )
    assert shaped[2].tolist() == [0, 0, 0]


def test_clipping_comes_last():
    shaped, _ = token_advantages(
        ADVANTAGES, MASK, kl=KL, beta=0.5, whiten=True, clip_range=0.5, use_kl_shaping=True
    )
    whitened, _ = token_advantages(ADVANTAGES, MASK, whiten=True)
    by_kl = torch.tensor([[0.05, -0.1, 0.05], [0, 0, 0], [0.075, -0.075, 0], [0, 0, 0]])
    want = (whitened + by_kl).clamp(-0.5, 0.5) * MASK
    torch.testing.assert_close(shaped, want)
    assert shaped.abs().max() == 0.5


def test_masked_places_may_hold_anything():
    kl = KL.masked_fill(MASK == 0, math.nan)
    shaped, _ = token_advantages(ADVANTAGES, MASK, kl=kl, beta=0.5, use_kl_shaping=True)
    clean, _ = token_advantages(ADVANTAGES, MASK, kl=KL, beta=0.5, use_kl_shaping=True)
    assert torch.equal(shaped, clean)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"beta": -1.0}, ConfigError, "beta: expected a finite number >= 0, got -1.0;"),
        ({"clip_range": 0.0}, ConfigError, "clip_range: expected None or .* > 0, got 0.0;"),
        ({"filter_eps": math.nan}, ConfigError, "filter_eps: expected .* got nan;"),
        ({"use_kl_shaping": True}, ConfigError, "kl: expected a .* tensor .*got None;"),
        ({"kl": KL[:, :2]}, ShapeError, r"kl: expected shape \(B, T\) = \(4, 3\), got \(4, 2\);"),
        ({"mask": MASK[:2]}, ShapeError, r"mask: expected .* = \(4, T\), got \(2, 3\);"),
        ({"advantages": KL}, ShapeError, r"advantages: expected floats of shape \(B,\)"),
    ],
)
def test_wrong_arguments_say_what_was_expected(arguments, kind, message):
    with pytest.raises(kind, match=message):
        token_advantages(**{"advantages": ADVANTAGES, "mask": MASK, **arguments})

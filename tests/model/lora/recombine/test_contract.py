"""What every operator keeps. A new one is a line in `OPERATORS` or in `NOISE`."""

import numpy as np
import pytest
import torch

from evo_grpo.model.lora.recombine.product import Product
from evo_grpo.model.lora.recombine.registry import OPERATORS
from evo_grpo.model.lora.recombine.svd_noise import SVDNoise
from evo_grpo.settings import EvolveConfig

WIDE, HIGH = 12, 10
NOISE = {"svd_noise": SVDNoise(0.3)}
ALL = {**OPERATORS, **NOISE}


def parent(rank, seed, scale=1.0, size=1.0):
    draw = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rank, WIDE, generator=draw), torch.randn(HIGH, rank, generator=draw)
    return Product(a * size, b * size, scale)


def parents(name):
    """Two of unequal ranks and scales; one for noise."""
    made = [parent(3, 1, 2.0), parent(5, 2, 0.5)]
    return made[:1] if name in NOISE else made


def update(product):
    return product.scale * product.b.double() @ product.a.double()


def child(name, given, rank=5, seed=0):
    made = ALL[name](given, rank, np.random.default_rng(seed))
    assert made.a.shape[1] == WIDE
    assert made.b.shape[0] == HIGH
    assert made.a.shape[0] == made.b.shape[1]
    assert made.a.isfinite().all()
    assert made.b.isfinite().all()
    return update(made)


def test_the_settings_name_every_operator():
    choices = EvolveConfig.model_json_schema()["properties"]["recombine"]["enum"]
    assert choices == ["none", *OPERATORS]


@pytest.mark.parametrize("name", ALL)
def test_equal_streams_give_equal_children(name):
    assert torch.equal(child(name, parents(name)), child(name, parents(name)))


@pytest.mark.parametrize("name", OPERATORS)
def test_equal_parents_have_a_child_that_is_equal_to_them(name):
    one = parent(5, 3, 1.5)
    torch.testing.assert_close(child(name, [one, one]), update(one), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_only_the_products_of_the_parents_count(name):
    given = parents(name)
    turn = torch.randn(3, 3, generator=torch.Generator().manual_seed(9))
    first = Product(turn.inverse() @ given[0].a * 4, given[0].b @ turn, given[0].scale / 4)
    found = child(name, [first, *given[1:]])
    torch.testing.assert_close(found, child(name, given), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_parents_that_have_learned_nothing_have_a_child_that_has_not(name):
    given = [Product(one.a, torch.zeros_like(one.b), one.scale) for one in parents(name)]
    assert not child(name, given).any()


@pytest.mark.parametrize("name", ["average", "svd_subspace"])
def test_the_child_draws_on_both_parents(name):
    first, second = parent(5, 1), parent(5, 2)
    found = child(name, [first, second])
    assert all((found * update(one)).sum() > 0.1 * update(one).square().sum() / 2
               for one in (first, second))  # fmt: skip


def test_a_subspace_keeps_the_leading_half_of_the_better_parent_and_the_size_of_the_other():
    better, other = parent(5, 1, size=2.0), parent(5, 2)
    found = child("svd_subspace", [better, other])
    u, s, vh = torch.linalg.svd(update(better))
    kept = u[:, :3] * s[:3] @ vh[:3]
    # What is left lies outside of what was kept, and is the best of the other there, undiminished.
    outside = torch.eye(HIGH) - u[:, :3] @ u[:, :3].T, torch.eye(WIDE) - vh[:3].T @ vh[:3]
    u, s, vh = torch.linalg.svd(outside[0].double() @ update(other) @ outside[1].double())
    torch.testing.assert_close(found - kept, u[:, :2] * s[:2] @ vh[:2], atol=1e-4, rtol=1e-4)


def test_a_layer_is_taken_whole_from_either_parent():
    given = parents("layer_wise")
    rng = np.random.default_rng(0)
    drawn = [OPERATORS["layer_wise"](given, 5, rng) for _ in range(40)]
    counts = [sum(one is parent for one in drawn) for parent in given]
    assert sum(counts) == 40
    assert min(counts) > 8


def test_noise_scales_singular_values_and_keeps_their_vectors():
    (one,) = parents("svd_noise")
    u, before, vh = torch.linalg.svd(update(one))
    turned = u.T @ child("svd_noise", [one]) @ vh.T
    factors = turned.diagonal()[:3] / before[:3]
    rest = turned.clone()
    rest.diagonal().zero_()
    assert rest.abs().max() < 1e-4
    assert (factors > 0).all()
    assert 0.01 < factors.log().abs().mean() < 1.0
    assert torch.equal(update(SVDNoise(0.0)([one], 3, np.random.default_rng(0))), update(one))

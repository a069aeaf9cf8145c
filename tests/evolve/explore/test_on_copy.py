"""On copy: the lr of a copy falls, within its range where it has one."""

import numpy as np
import pytest
from explorer_contract import INSIDE, RANGES

from evo_grpo.evolve.explore.on_copy import LowerLROnCopy
from evo_grpo.evolve.protocols import Candidate
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter


def explore(explorer, hparams, config, **candidate):
    rng = np.random.default_rng(0)
    found = explorer.explore(Candidate(hparams, **candidate), config, rng)
    assert rng.bit_generator.state == np.random.default_rng(0).bit_generator.state
    return found


@pytest.mark.parametrize(
    ("config", "new"),
    [
        (HyperparameterConfig(**RANGES), 5e-5),
        (HyperparameterConfig(lr=RLParameter(8e-5, 1e-2)), 8e-5),
        (HyperparameterConfig(beta=RLParameter(0, 1)), 5e-5),
        (HyperparameterConfig(), 5e-5),
    ],
)
def test_a_copy_halves_its_lr_within_the_range_of_lr(config, new):
    found = explore(LowerLROnCopy(), INSIDE, config, copied=True)
    assert found == INSIDE.replace(lr=new)


def test_a_copy_at_the_least_lr_stays_there():
    config = HyperparameterConfig(lr=RLParameter(1e-4, 1e-2))
    assert explore(LowerLROnCopy(), INSIDE, config, copied=True) == INSIDE


def test_a_long_line_of_copies_never_reaches_zero():
    hparams = INSIDE
    for _ in range(2000):
        hparams = explore(LowerLROnCopy(), hparams, HyperparameterConfig(), copied=True)
    assert hparams.lr > 0

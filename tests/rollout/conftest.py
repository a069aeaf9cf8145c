"""The population that every engine of the contract samples from; no test changes it."""

import pytest
import tiny

from evo_grpo.model.base import SharedBase


@pytest.fixture(scope="module")
def slots():
    """Three agents of two ranks over the embedded tiny-sums, each far from the base."""
    out = tiny.population(SharedBase.load("tiny-sums", device="cpu"), (4, 4, 2))
    for index, name in enumerate(out.names):
        tiny.stir(out, name, 20 + index, scale=0.5)
    return out

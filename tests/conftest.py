"""Models that several tests of the torch half read; whoever changes one builds an own copy."""

import pytest
from hypothesis import HealthCheck, settings

# torch is imported where it is used: pytest-xdist loads this file in a process that runs no test.

# A machine with other work beside it is slow for a while, which no test may fail for; and the same
# examples are drawn every time.
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")

# The suite that every engine inherits is no test module of its own, yet its asserts shall explain.
pytest.register_assert_rewrite("engine_contract", "fused_cases")


@pytest.fixture
def llama():
    import tiny

    return tiny.llama()


@pytest.fixture
def pair():
    """Two agents over a tiny Llama."""
    import tiny

    return tiny.population(tiny.llama())


@pytest.fixture(scope="session")
def sums_base():
    """The embedded tiny-sums, with its tokenizer; tests that add no slot may share it."""
    from evo_grpo.model.base import SharedBase

    return SharedBase.load("tiny-sums", device="cpu")


@pytest.fixture
def generator_state():
    """Fail when a test moved torch's global generator."""
    import torch

    before = torch.random.get_rng_state()
    yield
    assert torch.equal(before, torch.random.get_rng_state()), "the global generator moved"

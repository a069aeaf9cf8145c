"""Models that several tests of the torch half read; whoever changes one builds an own copy."""

import hashlib
import sys

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
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")

# The suite that every engine inherits is no test module of its own, yet its asserts shall explain.
pytest.register_assert_rewrite("engine_contract", "fused_cases")


@pytest.fixture(scope="session", autouse=True)
def _embedded_model_compared_once():
    """Compare the fast layers with the embedded model's own once, not in each of many hundred runs.

    Bases of other weights, dtypes or configurations are compared each time;
    tests/model/llama/test_departures.py tests the comparison itself.
    """
    if "torch" not in sys.modules:  # nor is it needed by the tests that were collected
        yield
        return
    import torch

    from evo_grpo.model.llama import departures

    compare, known = departures.find_difference, {}

    def once(base, adapted):
        if base.name != "tiny-sums" or base.quantization or base.device.type != "cpu":
            return compare(base, adapted)
        digest = hashlib.sha256(base.model.config.to_json_string().encode())
        for name, value in base.weights().items():
            digest.update(f"{name} {value.dtype}".encode())
            digest.update(value.detach().flatten().view(torch.uint8).numpy())
        if (key := digest.digest()) not in known:
            known[key] = compare(base, adapted)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(departures, "find_difference", once)
        yield


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

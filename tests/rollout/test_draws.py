import math

import pytest
import torch

from evo_grpo.rollout.sampling import key_tensor, uniform
from evo_grpo.seeding import derive

CPU = torch.device("cpu")
N = 20_000


def splitmix(key, step):
    """The published generator on unbounded integers: its state after step + 1 increments."""
    mask = (1 << 64) - 1
    z = (key + (step + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return (z >> 11) / (1 << 53)


def distance_from_uniform(draws):
    """Kolmogorov and Smirnov's: the largest gap between the empirical and the true distribution."""
    ordered = draws.sort().values
    steps = torch.arange(len(draws) + 1, dtype=torch.float64) / len(draws)
    return max((ordered - steps[:-1]).max().item(), (steps[1:] - ordered).max().item())


# Exceeded by one sample in 10**5 that really is uniform; the draws here are fixed.
BOUND = math.sqrt(-math.log(1e-5 / 2) / 2) / math.sqrt(N)


@pytest.mark.parametrize("step", [0, 1, 31, 100_000])
def test_equals_the_published_generator(step):
    keys = [0, 1, 2**63 - 1, 2**62, *(derive(7, i) for i in range(50))]
    draws = uniform(key_tensor(keys, CPU), step, 1)[0]
    assert draws.tolist() == [splitmix(key, step) for key in keys]


def test_known_output_of_the_reference_code():
    """The first output of splitmix64.c for seed 0 is 0xE220A8397B1DCDAF."""
    assert uniform(key_tensor([0], CPU), 0, 1).item() == (0xE220A8397B1DCDAF >> 11) * 2.0**-53


@pytest.mark.parametrize("step", [0, 1, 17])
def test_rows_are_uniform(step):
    keys = key_tensor([derive(3, prompt, g) for prompt in range(N // 8) for g in range(8)], CPU)
    draws = uniform(keys, step, 1)[0]
    assert draws.min() >= 0
    assert draws.max() < 1
    assert distance_from_uniform(draws) < BOUND


def test_neighbours_are_independent():
    keys = key_tensor([derive(3, i) for i in range(N)], CPU)
    now, following = uniform(keys, 0, 2)
    for left, right in ((now, following), (now[:-1], now[1:])):
        correlation = torch.corrcoef(torch.stack([left, right]))[0, 1]
        assert abs(correlation) < 4.5 / math.sqrt(N)
        assert distance_from_uniform((left + right) % 1) < BOUND * 1.01


def test_a_row_draws_alike_in_any_company():
    keys = [derive(1, i) for i in range(9)]
    together = uniform(key_tensor(keys, CPU), 4, 1)[0]
    for i, key in enumerate(keys):
        assert uniform(key_tensor([key], CPU), 4, 1)[0, 0] == together[i]
    assert torch.equal(uniform(key_tensor(keys[::-1], CPU), 4, 1)[0], together.flip(0))


def test_moves_no_generator(generator_state):
    uniform(key_tensor([1, 2], CPU), 0, 3)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch finds none")
def test_cuda_draws_the_same_bits():
    keys = [derive(1, i) for i in range(999)]
    device = torch.device("cuda")
    assert torch.equal(
        uniform(key_tensor(keys, device), 7, 2).cpu(), uniform(key_tensor(keys, CPU), 7, 2)
    )

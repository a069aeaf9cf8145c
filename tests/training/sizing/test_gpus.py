"""Cards and sizes by name."""

import pytest

from evo_grpo.errors import ConfigError
from evo_grpo.training.sizing.gpus import GPUS, parse_gpu


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * 10**9),
        ("24", 24 * 10**9),
        ("23.5 gib", int(23.5 * 2**30)),
        ("a100-80gb", int(79.1 * 2**30)),
        ("NVIDIA A100 80GB", int(79.1 * 2**30)),
        ("GeForce RTX 4090", int(23.5 * 2**30)),
    ],
)
def test_a_card_has_its_memory(text, size):
    assert parse_gpu(text) == (text, size)


def test_an_unknown_card_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"got 'a100-80', did you mean a100-80gb\?") as caught:
        parse_gpu("a100-80")
    assert all(name in str(caught.value) for name in GPUS)
    for text in ("", "0GB", "-3GB", "24TB", "two cards"):
        with pytest.raises(ConfigError, match=r"^--gpu: expected a size such as 24GB, or one of"):
            parse_gpu(text)

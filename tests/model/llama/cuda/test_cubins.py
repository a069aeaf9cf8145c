"""Every kernel compiled for the cards that people have: registers, spills and shared memory."""

import importlib.util
import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton's compiler: make test-kernels", allow_module_level=True)

from cubins import (
    SHAPES,
    SHARED,
    compiled_for,
    launches,
    launches_of_learning,
    named,
    resources,
)  # fmt: skip

pytestmark = pytest.mark.kernels
#: shape, rank, dtype and capabilities: what people train everywhere, the rest where it is tightest.
TRIED = [
    *((shape, 8, torch.bfloat16, tuple(SHARED)) for shape in ("0.5B", "3B", "7B")),
    *((shape, 64, torch.float16, (86, 90)) for shape in SHAPES),
    ("3B", 16, torch.float32, (80, 90)),
]


@pytest.mark.parametrize(("shape", "rank", "dtype", "capabilities"), TRIED)
def test_no_spills_within_shared_memory(shape, rank, dtype, capabilities, monkeypatch):
    norms = shape in ("gemma", "7B")
    found = launches(shape, dtype, rank, monkeypatch, norms=norms)
    assert len(found) == 14
    if dtype is torch.bfloat16 or shape == "gemma":
        more = launches_of_learning(shape, dtype, rank, monkeypatch, norms=norms)
        assert len(more) == 9
        found += more
    bad = []
    for capability in capabilities:
        for name, launch in named(found):
            compiled = compiled_for(capability, launch)
            registers, spilled = resources(compiled)
            shared = compiled.metadata.shared
            # ptxas takes a frame of 8 bytes on sm_80 where registers are left.
            if spilled > 8 or registers > 255 or shared > SHARED[capability] << 10:
                bad.append((capability, name, registers, spilled, shared))
    assert not bad

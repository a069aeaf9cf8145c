"""The device of these tests: one of CUDA if torch finds one, else the rehearsal device.

EVO_GRPO_TEST_DEVICE chooses: cuda, rehearsal, or cpu, to try the tests themselves.
"""

import os
from contextlib import nullcontext

import pytest
import rehearsal
import torch

CHOSEN = os.environ.get("EVO_GRPO_TEST_DEVICE") or (
    "cuda" if torch.cuda.is_available() else rehearsal.NAME
)


@pytest.fixture(scope="session", autouse=True)
def device():
    """Its name, for torch and for `engine.device`."""
    with rehearsal.known() if CHOSEN == rehearsal.NAME else nullcontext():
        yield CHOSEN


@pytest.fixture(autouse=True)
def _what_runs_here(request, device):
    if request.node.get_closest_marker("cuda") and device != "cuda":
        pytest.skip(f"CUDA graphs are not rehearsed: needs a CUDA device, runs on {device}")

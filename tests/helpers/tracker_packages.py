"""The packages of trackers: where one is missing its tests are skipped, or fail when asked for."""

import os
from importlib.util import find_spec

import pytest

ASKED = "EVO_GRPO_TRACKERS"
"""Set by `make test-trackers`, which installs them all."""


def need(module):
    """Skip the module of tests that calls this where a package is missing."""
    if find_spec(module) is None:
        if os.environ.get(ASKED):
            pytest.fail(f"{module} is missing although {ASKED} is set", pytrace=False)
        pytest.skip(f"{module} is not installed; see make test-trackers", allow_module_level=True)

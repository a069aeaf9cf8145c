import pytest
from killed_runs import Runs


@pytest.fixture(scope="module")
def runs():
    with Runs() as server:
        yield server

"""vLLM's double for the fast tests; vLLM itself for those that are marked."""

import os

import pytest
from vllm_doubles import doubled


@pytest.fixture(autouse=True)
def _temporary_files(monkeypatch, tmp_path_factory):
    """Logs stay where something fails, as it does here on purpose."""
    folder = str(tmp_path_factory.mktemp("temporary"))
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr("tempfile.tempdir", folder)


@pytest.fixture
def double(monkeypatch):
    with doubled(monkeypatch) as module:
        yield module


@pytest.fixture
def double_in_child(monkeypatch):
    with doubled(monkeypatch, child=True):
        yield


@pytest.fixture(scope="session")
def python():
    """A Python with vLLM; `make test-vllm` names one, and is not satisfied with a skip."""
    named = os.environ.get("EVO_GRPO_VLLM")
    if named is None:
        pytest.skip("needs vLLM in an environment of its own: make test-vllm")
    return named

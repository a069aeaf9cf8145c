"""What the properties have in common: a folder of their own, and a report at the end."""

import os

import pytest

pytest.register_assert_rewrite("fuzzing")


@pytest.fixture
def in_a_folder(tmp_path, monkeypatch):
    """The current directory, in which the inputs may write."""
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


def pytest_terminal_summary(terminalreporter):
    if os.environ.get("EVO_GRPO_FUZZ_SECONDS"):
        import fuzzing  # not before its asserts are made to explain

        reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
        fuzzing.report(terminalreporter, [r for r in reports if r.when == "call"])

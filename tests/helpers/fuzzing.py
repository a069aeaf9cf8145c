"""Properties that hold for any input: fifty of them in `make test`, minutes in `make fuzz`.

A property is a function of one input, in keywords. `@example` above it keeps an input that once
broke it; that is the whole corpus.
"""

import functools
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from torture_table import tried as note

from evo_grpo.errors import EvoGrpoError

SECONDS = float(os.environ.get("EVO_GRPO_FUZZ_SECONDS") or 0)
"""How long each property is tried; 0 tries `quick` inputs, the same ones every time."""
INPUT_SECONDS = 5.0
"""How long one input may take, in computing time: what else the machine does is not its fault."""
BATCH = 100
"""Inputs between two looks at the clock."""


def fuzz(
    quick: int = 50, **inputs: SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a property.

    Args:
        quick: Inputs where nobody says how long.
        **inputs: What to draw for each keyword of the property.
    """

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        def test(record_property: Callable[[str, object], None], in_a_folder: None) -> None:
            tried = failures = 0

            @functools.wraps(check)
            def counted(**drawn: Any) -> None:
                nonlocal tried
                tried += 1
                began = time.process_time()
                check(**drawn)
                assert time.process_time() - began < INPUT_SECONDS

            def search(number: int, **how: Any) -> None:
                limits = settings(
                    max_examples=number,
                    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
                    print_blob=True,
                    **how,
                )
                limits(given(**inputs)(counted))()

            end = time.monotonic() + SECONDS
            try:
                search(quick, derandomize=not SECONDS)
                while time.monotonic() < end:
                    search(BATCH, derandomize=False, phases=set(Phase) - {Phase.explicit})
            except BaseException as error:
                failures = len(error.exceptions) if isinstance(error, ExceptionGroup) else 1
                raise
            finally:
                record_property("tried", tried)
                record_property("failures", failures)
            if SECONDS:
                name = check.__name__.removeprefix("test_").replace("_", " ")
                note(f"random inputs for {SECONDS:g} s", name, tried)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        test.__module__ = check.__module__
        return test

    return decorate


def is_told(error: EvoGrpoError) -> None:
    """Fail where the message of an error says nothing, or cannot be written."""
    message = str(error)
    assert message.strip()
    message.encode()


def told_or(
    result: Callable[[], Any], allowed: type[EvoGrpoError] | tuple[type, ...] = EvoGrpoError
) -> Any:
    """Return a result, or None where it was refused with a message."""
    try:
        return result()
    except allowed as error:
        is_told(error)
        return None


def report(terminal: pytest.TerminalReporter, reports: Iterable[pytest.TestReport]) -> None:
    """Say of each property how many inputs were tried."""
    rows = [(r.nodeid.rpartition("::")[2], dict(r.user_properties)) for r in reports]
    found = [(name, given) for name, given in rows if "tried" in given]
    if not found:
        return
    terminal.section(f"inputs, {SECONDS:g} s for each property")
    for name, of in found:
        failed = f"{of['failures']} failed" if of["failures"] else "none failed"
        terminal.write_line(f"{of['tried']:>12,} inputs, {failed}: {name.removeprefix('test_')}")

"""Logs the work of a run before its first result: loading, compiling, capturing."""

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager

LOGGER = "evo_grpo.working"
"""Name of the logger; the terminal shows its entries."""

_log = logging.getLogger(LOGGER)


@contextmanager
def working(what: str) -> Generator[None]:
    """Log `what`, such as "load the weights", before the body, and with its seconds after it."""
    begin = time.perf_counter()
    _log.info("%s", what, extra={"begins": True})
    try:
        yield
    finally:
        _log.info("%s: %.1f s", what, time.perf_counter() - begin, extra={"begins": False})

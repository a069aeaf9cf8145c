"""Logs the work of a run before its first result, such as loading, compiling, capturing graphs."""

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager

LOGGER = "evo_grpo.working"
"""Name of the logger; the terminal shows its entries."""

_log = logging.getLogger(LOGGER)


@contextmanager
def working(what: str) -> Generator[None]:
    """Log `what`, such as "load the weights", before a `with` block, and its seconds afterwards."""
    begin = time.perf_counter()
    _log.info("%s", what, extra={"begins": True})
    try:
        yield
    finally:
        _log.info("%s: %.1f s", what, time.perf_counter() - begin, extra={"begins": False})

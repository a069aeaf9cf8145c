"""Lets a thread load a model while no other one loads, trains or generates in this process.

transformers changes what a process shares while it loads: torch's default dtype, the initialisation
of weights, classes that it patches. Two threads that load leave the patches in place, and one that
computes beside a load gets tensors of another dtype.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

_change = threading.Condition()
_computing = Counter[int]()
"""Threads within `beside_no_load`, and how deep."""
_waiting = 0
"""Threads that wait to load: no further one begins to compute."""
_loads: list[int] = []
"""The thread that loads, once for each load within another."""


@contextmanager
def loading() -> Generator[None]:
    """Load alone: wait for other loads and for what computes, and let what comes wait."""
    global _waiting
    me = threading.get_ident()
    with _change:
        _waiting += 1
        try:
            _change.wait_for(lambda: not ({*_loads, *_computing} - {me}))
            _loads.append(me)
        finally:
            _waiting -= 1
            _change.notify_all()
    try:
        yield
    finally:
        with _change:
            _loads.pop()
            _change.notify_all()


@contextmanager
def beside_no_load() -> Generator[None]:
    """Compute while no other thread loads; several threads may compute at once."""
    me = threading.get_ident()
    with _change:
        _change.wait_for(lambda: me in {*_loads, *_computing} or not (_loads or _waiting))
        _computing[me] += 1
    try:
        yield
    finally:
        with _change:
            _computing[me] -= 1
            if not _computing[me]:
                del _computing[me]
            _change.notify_all()

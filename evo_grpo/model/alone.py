"""Lets a thread load a model while no other thread loads, trains or generates.

While it loads, transformers changes global state: torch's default dtype, the initialisation of
weights, patched classes. Two concurrent loads leave the patches in place, and a thread that
computes during a load gets tensors of another dtype.
"""

import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, nullcontext

_turn = threading.RLock()
"""Held by the thread that loads or waits to load; meanwhile no other thread starts to compute."""
_change = threading.Condition()
_computing = Counter[int]()
"""Thread -> number of nested `excluding_loads` contexts that it is in."""


@contextmanager
def loading() -> Generator[None]:
    """Open a context for loading a model, in which no other thread loads or computes.

    Entering it waits until the loads and computations of other threads end; later ones wait for it.
    """
    me = threading.get_ident()
    with _turn:
        with _change:
            _change.wait_for(lambda: not (_computing.keys() - {me}))
        yield


@contextmanager
def excluding_loads() -> Generator[None]:
    """Open a context for computing, in which no other thread loads; several may compute at once."""
    me = threading.get_ident()
    with nullcontext() if me in _computing else _turn, _change:
        _computing[me] += 1
    try:
        yield
    finally:
        with _change:
            _computing[me] -= 1
            if not _computing[me]:
                del _computing[me]
            _change.notify_all()

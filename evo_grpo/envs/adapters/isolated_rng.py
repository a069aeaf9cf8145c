"""Isolation of packages that draw from the global generators: the caller's stay as they were."""

from __future__ import annotations

import random
import threading
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np

_SEEDS = 2**32
# Two environments stepped by two threads would otherwise draw from each other's generators.
_LOCK = threading.RLock()


@contextmanager
def global_generators_kept() -> Generator[None]:
    """Put Python's and numpy's global generators back as they were, whatever happens inside."""
    with _LOCK:
        # Global generator because it is only read here, to be put back.
        python_state = random.getstate()
        # Global generator because it is only read here, to be put back.
        numpy_state = np.random.get_state()  # noqa: NPY002 -- kept, not drawn from
        try:
            yield
        finally:
            # Global generator because another package's draws are undone.
            random.setstate(python_state)
            # Global generator because another package's draws are undone.
            np.random.set_state(numpy_state)  # noqa: NPY002 -- put back, not drawn from


class PrivateGenerators:
    """The global generators as one environment sees them: its own, swapped in while it runs.

    Args:
        seed: What an environment that draws before its first reset draws from, any int.
    """

    def __init__(self, seed: int) -> None:
        self._episodes = random.Random(seed)
        self.start(self._episodes.randrange(_SEEDS))

    def start(self, seed: int | None) -> int:
        """Begin an episode.

        Args:
            seed: Any int, or None for the next one of this environment's own stream.

        Returns:
            The seed in the range that numpy's global generator takes, [0, 2**32).
        """
        small = self._episodes.randrange(_SEEDS) if seed is None else seed % _SEEDS
        self._python = random.Random(small).getstate()
        # The old class because its state is the one that the global generator can be set to.
        self._numpy = np.random.RandomState(small).get_state()
        return small

    @contextmanager
    def swapped_in(self) -> Generator[None]:
        """Let what runs inside draw from this environment's generators as if they were global."""
        with global_generators_kept():
            # Global generator because another package's code is about to draw from it.
            random.setstate(self._python)
            # Global generator because another package's code is about to draw from it.
            np.random.set_state(self._numpy)  # noqa: NPY002 -- the environment's own state
            try:
                yield
            finally:
                # Global generator because this environment goes on from here next time.
                self._python = random.getstate()
                # Global generator because this environment goes on from here next time.
                self._numpy = np.random.get_state()  # noqa: NPY002 -- kept, not drawn from

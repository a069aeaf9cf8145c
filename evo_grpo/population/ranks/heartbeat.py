"""Detects lost ranks by heartbeats.

A waiting rank cannot tell whether another rank is slow or dead: a round may take hours, and a
stopped process keeps its connections. Therefore a thread of each rank increments a number, its
sign, in the store of torch.distributed about every second, and reads the signs of all other ranks.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import Any, final

from evo_grpo.errors import ConfigError
from evo_grpo.schema.validation import shown

VARIABLE = "EVO_GRPO_RANK_TIMEOUT"
"""Environment variable with the seconds of silence after which a rank counts as lost."""
SECONDS = 900.0
"""Default of `VARIABLE`, long enough for a C function that holds the GIL and so prevents signs."""
_EVERY = 1.0
_RANKS_A_SECOND = 32
"""The number of ranks divided by this is the seconds between two looks, if above `_EVERY`."""
_LOOKS_TO_MISS = 3
"""Number of looks without a sign after which a rank counts as ended if a connection closed."""
_LOOKS_AFTER_END = 10
"""Number of looks, after a connection closed, until a silent rank is named without a clear lead."""

THREAD = "heartbeat"
"""Name of the thread that writes signs."""


@final
class Heartbeat:
    """Writes the signs of one rank into a shared store, and reads those of the other ranks.

    Signs are read every `every` seconds; a rank without a new sign for `limit` seconds is lost.
    """

    def __init__(self, rank: int, size: int, store: Any, limit: float) -> None:  # noqa: ANN401 -- torch exports no Store
        """Write the first sign; call `start` once all ranks have done so."""
        self.rank, self.size, self.limit = rank, size, limit
        self.every = min(max(_EVERY, size / _RANKS_A_SECOND), limit / 5)
        self._store = store
        self._signs = [0] * size
        self._missed = [0] * size  # looks since the last sign of each rank
        self._looks = 0
        self._cut_off = False
        self._over = threading.Event()
        self._write_sign()

    def start(self) -> None:
        """Start the daemon thread that writes and reads signs."""
        thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        thread.start()

        def stop() -> None:
            self._over.set()
            thread.join(_EVERY)  # bounded: it may wait for the store

        atexit.register(stop)

    def wait(self, done: Callable[[float], bool]) -> str:
        """Wait without a time limit for other ranks; return why the wait cannot end, or "".

        `done` waits up to a number of seconds, and returns whether the exchange is over. The
        returned reason has no full stop.
        """
        looks, stalled = self._looks, 0
        while not done(self.every):
            # Count looks: a clock would continue while this process is stopped.
            stalled = 0 if self._cut_off or self._looks != looks else stalled + 1
            looks = self._looks
            if why := self.lost():
                return why
            if stalled * self.every >= self.limit:
                # A store that does not answer blocks the thread that reads signs.
                return silence(0, self.size, stalled * self.every)
        return ""

    def lost(self) -> str:
        """Return a sentence that names a lost rank; empty if no rank is known to be lost."""
        most = max(self._missed)
        if not self._cut_off and most * self.every < self.limit:
            return ""
        return self._named(silent=not self._cut_off)

    def closed(self) -> str:
        """Find the rank whose end closed a connection; return a clause that names it, or ""."""
        for looks in range(_LOOKS_AFTER_END):
            # Name the rank that was silent first: ranks that noticed it may have ended since, and
            # on a busy machine another rank may be late.
            second, most = sorted(self._missed)[-2:]
            clear = most - second >= _LOOKS_TO_MISS - 1 or looks == _LOOKS_AFTER_END - 1
            if self._cut_off or (most >= _LOOKS_TO_MISS and clear):
                return self._named(silent=False)
            time.sleep(self.every)
        return ""

    def _named(self, *, silent: bool) -> str:
        """Return a clause on the most silent rank; if none is, on rank 0, which has the store."""
        most = max(self._missed)
        rank = self._missed.index(most) if most >= _LOOKS_TO_MISS else 0
        time.sleep(
            2 * self.every
        )  # let the others find the rank before this process or its store ends
        if silent:
            return silence(rank, self.size, most * self.every)
        return f"rank {rank} of {self.size} has ended"

    def _run(self) -> None:
        while not (self._cut_off or self._over.wait(self.every)):
            try:
                self._look()
            except RuntimeError:  # the process that kept the store has ended
                self._cut_off = True

    def _write_sign(self) -> None:
        self._store.set(str(self.rank), str(self._signs[self.rank] + 1))

    def _look(self) -> None:
        self._write_sign()
        for rank, sign in enumerate(self._store.multi_get(list(map(str, range(self.size))))):
            self._missed[rank] = 0 if int(sign) != self._signs[rank] else self._missed[rank] + 1
            self._signs[rank] = int(sign)
        self._looks += 1


def silence(rank: int, size: int, seconds: float) -> str:
    """Return a sentence that says for how many seconds a rank has given no sign."""
    return (
        f"rank {rank} of {size} has given no sign of life for {seconds:.0f} s: its process is "
        "stopped, or its machine is out of reach"
    )


def positive_from_environment(name: str, default: float, unit: str) -> float:
    """Return the positive number in an environment variable, or the default."""
    text = os.environ.get(name, str(default))
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(
            f"{name}: expected {unit}, a positive number, got {shown(text)}; leave it out for "
            f"{default:.0f}"
        )
    return number

"""`--nproc`: start the command again, once for every rank, and end them together.

Done here and not by torchrun: it tells of every stop in a page of its own, and its SIGTERM after
Ctrl-C would be the second signal, upon which a run ends without putting anything in order.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from evo_grpo.errors import ConfigError

#: Ranks notice at once that one is gone; what has not ended by itself after so long is ended.
SECONDS_TO_END = 15.0
_POLL_SECONDS = 0.05


def follows() -> bool:
    """Return whether this process is a rank that shows nothing: another one shows the run."""
    return _world() > 1 and int(os.environ.get("RANK", "0")) > 0


def launch_ranks(ranks: int | None, arguments: Sequence[str]) -> None:
    """Start the ranks of a run on this machine and exit as they do; a rank itself goes on.

    Args:
        ranks: How many; None, or 1, for this process alone.
        arguments: Those of the command.

    Raises:
        ConfigError: This process is a rank already, one of another number.
    """
    if _world() > 1:
        if ranks not in (None, _world()):
            raise ConfigError(
                f"--nproc: expected {_world()}, as many as the launcher has started, got {ranks}; "
                "leave --nproc out"
            )
        return
    if ranks is not None and ranks > 1:
        _run_ranks(ranks, [sys.executable, "-m", "evo_grpo", *arguments])


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _run_ranks(ranks: int, command: Sequence[str]) -> NoReturn:
    shared = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    # Threads of several processes that share cores wait for each other.
    shared.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    processes = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=None if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]

    def pass_on(number: int, frame: object) -> None:
        del frame
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    # Ctrl-C reaches all processes of the terminal; this one waits for what they say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, pass_on)
    sys.exit(_wait(processes))


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all; returns the code of the first rank, or of the first that failed."""
    deadline: float | None = None
    while any(process.poll() is None for process in processes):
        failed = any(process.poll() not in (None, 0) for process in processes)
        if failed and deadline is None:
            deadline = time.monotonic() + SECONDS_TO_END
        if deadline is not None and time.monotonic() > deadline:
            for process in processes:
                process.kill()
        time.sleep(_POLL_SECONDS)
    codes = [process.returncode for process in processes]
    for rank, code in enumerate(codes):
        if code < 0:
            name = signal.Signals(-code).name
            sys.stderr.write(f"rank {rank} of {len(codes)} was ended by {name}\n")
    code = next((code for code in codes if code), 0)
    return code if code >= 0 else 128 - code


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])

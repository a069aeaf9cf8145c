"""Implements `--nproc`: starts the command once for each rank, and ends the ranks together.

torchrun is not used: it prints a page about each stop, and after Ctrl-C it sends a SIGTERM, a
second signal, after which a run ends without cleaning up.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from evo_grpo.errors import ConfigError, EvoGrpoError
from evo_grpo.population.ranks.team import STORE, is_one_of_several

#: Seconds after the end of a rank until the remaining ranks are terminated.
SECONDS_TO_END = 15.0
_POLL_SECONDS = 0.05
_LAUNCHER = "EVO_GRPO_LAUNCHER"
"""Environment variable with the id of the process that started a rank; the rank ends with it."""


@contextmanager
def reporting_early_errors() -> Generator[None]:
    """Report an error of this rank to the other ranks before they are connected."""
    try:
        yield
    except EvoGrpoError:
        if not is_one_of_several():
            raise
        # Imported here because it loads torch, which is not needed for other errors.
        from evo_grpo.population.ranks.ranks import sharing_early_errors

        with sharing_early_errors():
            raise


def launch_ranks(ranks: int | None, arguments: Sequence[str]) -> None:
    """Start the ranks of a run on this machine, wait for them, and exit with their exit code.

    A process that is already a rank returns at once, or raises ConfigError if `ranks` differs.
    """
    if is_one_of_several():
        if launcher := os.environ.pop(_LAUNCHER, ""):
            threading.Thread(target=_end_with, args=(int(launcher),), daemon=True).start()
        # No C++ traces of connections to a rank that has ended; evo-grpo prints a sentence.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        world = int(os.environ["WORLD_SIZE"])
        if ranks not in (None, world):
            raise ConfigError(
                f"--nproc: expected {world}, the number of processes that the launcher started, "
                f"got {ranks}; omit --nproc"
            )
        return
    if ranks is not None and ranks > 1:
        _run_ranks(ranks, [sys.executable, "-P", "-m", "evo_grpo", *arguments])


def _run_ranks(ranks: int, command: Sequence[str]) -> NoReturn:
    # Bound before the ranks start, so that no other process can take the port in between.
    store = socket.socket()
    store.bind(("127.0.0.1", 0))
    shared = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.getsockname()[1]),
        _LAUNCHER: str(os.getpid()),
    }
    # Divide the cores: more threads than cores wait for each other.
    shared.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // ranks)))
    processes: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: object) -> None:
        del frame
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    for rank in range(ranks):
        process = subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            | ({STORE: str(store.fileno())} if rank == 0 else {}),
            pass_fds=[store.fileno()] if rank == 0 else [],
            stdin=None if rank == 0 else subprocess.DEVNULL,
            # Use a separate process group, so that Ctrl-C in a terminal reaches the rank only
            # through `pass_on`, and therefore only once.
            process_group=0,
        )
        processes.append(process)
    store.close()  # that of the first rank stays open
    sys.exit(_wait(processes))


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all ranks; return the exit code of rank 0, or of the rank that failed first."""
    first_failed: int | None = None
    ends = iter((signal.SIGTERM, signal.SIGKILL))
    deadline = 0.0
    while any(process.poll() is None for process in processes):
        codes = [process.poll() for process in processes]
        if first_failed is None:
            first_failed = next((rank for rank, code in enumerate(codes) if code), None)
            deadline = time.monotonic() + SECONDS_TO_END
        if first_failed is not None and time.monotonic() > deadline:
            # A rank in the middle of a round does not notice that another rank has ended.
            number = next(ends, signal.SIGKILL)
            for process in processes:
                if process.poll() is None:
                    process.send_signal(number)
            deadline = time.monotonic() + SECONDS_TO_END
        time.sleep(_POLL_SECONDS)
    codes = [process.returncode for process in processes]
    failed = [rank for rank, code in enumerate(codes) if code]
    if not failed:
        return 0
    cause = failed[0] if first_failed is None else first_failed
    if codes[cause] < 0:
        name = signal.Signals(-codes[cause]).name
        sys.stderr.write(f"rank {cause} of {len(codes)} was ended by {name}\n")
    code = codes[0] or codes[cause]
    return code if code >= 0 else 128 - code


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not available on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _end_with(launcher: int) -> None:
    """End this rank as SIGTERM does when its launcher has ended, even by SIGKILL."""
    while os.getppid() == launcher:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)

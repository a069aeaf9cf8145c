"""Runs in several processes on this machine, each a rank."""

import os
import socket

from forked import Forked

SECONDS = 240


def free_port():
    """Return a port of the loopback that nothing listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def start(ranks, *command, places=None, env=None):
    """Start a command in `ranks` processes that know each other; returns them by rank.

    Each runs in its own of `places`, where those are given.
    """
    shared = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **(env or {}),
    }
    return [
        Forked(
            command,
            cwd=places[rank] if places else None,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]


def finish(processes, seconds=SECONDS):
    """Wait for processes; returns exit code, stdout and stderr of each."""
    try:
        return [
            (*process.communicate(timeout=seconds), process.returncode) for process in processes
        ]
    finally:
        for process in processes:
            process.kill()
            process.wait()

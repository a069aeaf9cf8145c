"""Runs in several processes on this machine, each a rank."""

import os
import socket
import subprocess
import sys

from forked import Forked

SECONDS = 240


def free_port():
    """Return a port of the loopback that nothing listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def start(ranks, *command, places=None, env=None, begin=Forked):
    """Start a command in `ranks` processes that know each other; returns them by rank.

    Each runs in its own of `places`, where those are given. `begin` starts one: a `Forked` has
    loaded torch before, a `fresh` process has not.
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
        begin(
            command,
            cwd=places[rank] if places else None,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]


def fresh(arguments, cwd=None, env=None):
    """Start `python *arguments` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


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

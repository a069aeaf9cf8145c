"""Serves optuna-dashboard on this machine alone, and keeps what it shows up with the run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from evo_grpo.dashboard.copy import StudyCopy
from evo_grpo.errors import ConfigError, EvoGrpoError

HOST = "127.0.0.1"
SECONDS = 2.0
"""Between two looks at the rounds of the run."""

_log = logging.getLogger(__name__)


class _Server(ThreadingMixIn, WSGIServer):
    """Answers several requests at once: a page asks for many."""

    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    """Prints no line for each request."""

    def log_message(self, format: str, *arguments: object) -> None:
        """Log it instead."""
        _log.debug(format, *arguments)


def serve(run: str | Path, port: int, *, say: Callable[[str], None]) -> None:
    """Serve the dashboard of a run until the process is ended.

    Args:
        run: The run folder, finished or not.
        port: On the loopback address; 0 takes one that is free.
        say: Told the address once it answers, and once if the records can no longer be read.

    Raises:
        ConfigError: The port is taken.
        EngineUnavailable: optuna-dashboard or plotly is not installed.
        RunNotFoundError: It is no run folder.
    """
    copy = StudyCopy(run)
    pages: Any = import_module("optuna_dashboard")

    try:
        server = make_server(HOST, port, pages.wsgi(copy.storage), _Server, _Quiet)
    except OSError as error:
        raise ConfigError(
            f"--port {port}: cannot be used on {HOST} ({error.strerror}); give another one, or 0 "
            "for one that is free"
        ) from error
    stop = threading.Event()
    threading.Thread(target=_keep_up, args=(copy, stop, say), name="rounds", daemon=True).start()
    with server:
        say(f"http://{HOST}:{server.server_port}/dashboard")
        try:
            server.serve_forever()
        finally:
            stop.set()


def _keep_up(copy: StudyCopy, stop: threading.Event, say: Callable[[str], None]) -> None:
    while not stop.wait(SECONDS):
        try:
            copy.update()
        except (EvoGrpoError, OSError) as error:
            say(f"the rounds can no longer be read, and what is shown stays as it is: {error}")
            return

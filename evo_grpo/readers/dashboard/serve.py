"""Serves optuna-dashboard on this machine alone, and keeps what it shows up with the run."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable
from http.cookies import CookieError, SimpleCookie
from importlib import import_module
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import parse_qs, quote
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from evo_grpo.errors import ConfigError, EvoGrpoError
from evo_grpo.readers.dashboard.copy import StudyCopy

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


class _Guarded:
    """Answers the browser that was given the address, and nobody else on this machine or beyond.

    A page of somebody else can send a browser's requests here under another name for this machine
    or with another origin, and any user of the machine can connect to the port. So a request has
    to name this address, to come from it, and to bring the token that the address was shown with.

    Args:
        app: What answers then.
        port: On which it is asked.
    """

    def __init__(self, app: Callable[..., Iterable[bytes]], port: int) -> None:
        self._app = app
        # A browser shares its cookies between all ports of a machine.
        self._cookie = f"evo-grpo-{port}"
        self.token = secrets.token_urlsafe()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """See WSGI."""
        host, origin = environ.get("HTTP_HOST", ""), environ.get("HTTP_ORIGIN")
        # Of any port, for a person may forward another one to this one.
        if host.rpartition(":")[0] not in (HOST, "localhost"):
            return _refuse(start, f"expected the host {HOST} in the address, got another one")
        if origin is not None and origin != f"http://{host}":
            return _refuse(start, "expected a request of this page, got one of another origin")
        if self._same(parse_qs(environ.get("QUERY_STRING", "")).get("token", [""])[0]):
            # On to the address without the token, which is kept from histories and referrers.
            kept = f"{self._cookie}={self.token}; HttpOnly; SameSite=Lax; Path=/"
            headers = [
                ("Location", "/" + quote(environ.get("PATH_INFO", "").lstrip("/"))),
                ("Set-Cookie", kept),
            ]
            start("303 See Other", headers)
            return []
        try:
            cookies = SimpleCookie(environ.get("HTTP_COOKIE", ""))
        except CookieError:
            cookies = SimpleCookie()
        if self._cookie not in cookies or not self._same(cookies[self._cookie].value):
            return _refuse(start, "expected the whole address that evo-grpo dashboard printed")
        return self._app(environ, start)

    def _same(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self.token.encode())


def _refuse(start: Callable[..., Any], why: str) -> Iterable[bytes]:
    start("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
    return [f"refused: {why}\n".encode()]


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
    app = pages.wsgi(copy.storage)
    try:
        server = make_server(HOST, port, app, _Server, _Quiet)
    except OSError as error:
        raise ConfigError(
            f"--port {port}: cannot be used on {HOST} ({error.strerror}); give another one, or 0 "
            "for one that is free"
        ) from error
    stop = threading.Event()
    threading.Thread(target=_keep_up, args=(copy, stop, say), name="rounds", daemon=True).start()
    with server:
        guarded = _Guarded(app, server.server_port)  # before it answers anything
        server.set_app(guarded)
        say(f"http://{HOST}:{server.server_port}/dashboard?token={guarded.token}")
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

"""Serves optuna-dashboard on the loopback address, and keeps its study up to date with the run."""

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
"""Seconds between two reads of the log of the run."""

_log = logging.getLogger(__name__)


class _Server(ThreadingMixIn, WSGIServer):
    """Handles several requests at once: a page sends many."""

    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    """Prints no line for each request."""

    def log_message(self, format: str, *arguments: object) -> None:
        """Log it instead."""
        _log.debug(format, *arguments)


class _Guarded:
    """Accepts requests of the browser that opened the printed address, and refuses all others.

    A foreign page can send requests here from the user's browser, under another host name or from
    another origin, and any user of the machine can connect to the port. So a request must name this
    host, come from its origin, and carry the token of the printed address.

    Args:
        app: The WSGI application that handles accepted requests.
        port: The port of the server.
    """

    def __init__(self, app: Callable[..., Iterable[bytes]], port: int) -> None:
        self._app = app
        # A browser shares its cookies between all ports of a machine.
        self._cookie = f"evo-grpo-{port}"
        self.token = secrets.token_urlsafe()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """See WSGI."""
        host, origin = environ.get("HTTP_HOST", ""), environ.get("HTTP_ORIGIN")
        # Of any port: a user may forward another port to this one.
        if host.rpartition(":")[0] not in (HOST, "localhost"):
            return _refuse(start, f"expected the host {HOST} in the address, got another one")
        if origin is not None and origin != f"http://{host}":
            return _refuse(start, "expected a request of this page, got one of another origin")
        if self._same(parse_qs(environ.get("QUERY_STRING", "")).get("token", [""])[0]):
            # Redirect to the address without the token, to keep it out of histories and referrers.
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
        say: Called with the address when the server is ready, and with an error when the records
            cannot be read any more.

    Raises:
        ConfigError: The port is taken.
        EngineUnavailable: optuna-dashboard or plotly is not installed.
        RunNotFoundError: `run` is not a run folder.
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
        guarded = _Guarded(app, server.server_port)  # before the first request
        server.set_app(guarded)
        say(f"http://{HOST}:{server.server_port}/dashboard?token={guarded.token}")
        try:
            server.serve_forever()
        finally:
            stop.set()


def _keep_up(copy: StudyCopy, stop: threading.Event, say: Callable[[str], None]) -> None:
    said = ""
    while not stop.wait(SECONDS):
        try:
            copy.update()
        except KeyError:  # the study was deleted in the dashboard meanwhile
            continue
        except (EvoGrpoError, OSError) as error:
            if said != (said := str(error)):
                say(f"the rounds cannot be read now, so the dashboard is not updated: {error}")

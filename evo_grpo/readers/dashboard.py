"""Serves a copy of a run's study in optuna-dashboard, on the loopback address.

optuna-dashboard can rename and delete studies, change trials and write attributes; done to a copy,
this leaves the run unchanged. The copy is built from the run's log, so that no database password is
needed, and a run that stores no trials can be shown, too.
"""

import logging
import secrets
import threading
from collections.abc import Callable, Iterable
from http.cookies import CookieError, SimpleCookie
from importlib import import_module
from pathlib import Path
from socketserver import ThreadingMixIn
from types import SimpleNamespace
from typing import Any, final
from urllib.parse import parse_qs, quote
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from evo_grpo.errors import ConfigError, EngineUnavailable, EvoGrpoError
from evo_grpo.readers.report.figures.lineage import plot_lineage
from evo_grpo.record import columns, lineage, wording
from evo_grpo.record.folder import expect_run, read_config
from evo_grpo.record.log import START, RoundDone, RunFinished, entries
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.record.view import RunView, view_of
from evo_grpo.schema.problems import shown_value

FIGURE = "lineage"
"""Id of the family tree among the figures of the dashboard."""
HOST = "127.0.0.1"
SECONDS = 2.0
"""Seconds between two reads of the log of the run."""

_log = logging.getLogger(__name__)


@final
class StudyCopy:
    """An Optuna study in memory, built from the log of a run, with notes and the family tree."""

    def __init__(self, run: str | Path) -> None:
        try:
            # Untyped: type checkers may not have the package.
            self._pages: Any = import_module("optuna_dashboard")
        except ImportError as error:
            raise EngineUnavailable(
                f"dashboard: optuna_dashboard cannot be imported here ({error}); "
                'pip install "evo-grpo[dashboard]"'
            ) from error
        from optuna.storages import InMemoryStorage

        from evo_grpo.record.database import open_study

        self._folder = expect_run(run)
        config = read_config(self._folder)
        self.storage = InMemoryStorage()
        self._cursor = START
        self._last: RoundRecord | None = None
        further = config.evolve.fitness.further
        self._study = open_study(self.storage, self._folder.resolve().name, further=further)
        self._lineage = lineage.Lineage(self._study, config.search_space())
        self._show()
        self.update()

    def update(self) -> None:
        """Read the entries that the run has appended since the last call."""
        start = self._cursor
        for self._cursor, entry in entries(self._folder, self._cursor):  # noqa: B020 -- it advances
            if isinstance(entry, RoundDone):
                self._add(entry.record)
            elif isinstance(entry, RunFinished) and self._last is not None:
                self._lineage.record_mean(entry.summary, self._last)
        if self._cursor != start:
            self._show()

    def _show(self) -> None:
        """Update the note and the family tree in the study."""
        view = view_of(self._folder)
        if view.rounds:
            # A panel of the dashboard sets the height, and has room below.
            tree = plot_lineage(view).update_layout(
                title="Family tree",
                height=None,
                margin={"t": 60},
                legend={"yanchor": "top", "y": -0.3},
            )
            self._pages.save_plotly_graph_object(self._study, tree, graph_object_id=FIGURE)
        # Save the note last: once it names the winner, the tree is complete.
        self._pages.save_note(self._study, study_note(self._folder, view))

    def _add(self, record: RoundRecord) -> None:
        by_agent = {agent.agent: agent for agent in record.agents}
        for trial in self._lineage.record(record):
            note = trial_note(by_agent[trial.user_attrs["agent"]], record)
            # `save_note` takes an `optuna.Trial`, whose constructor would start sampling.
            noted = SimpleNamespace(
                storage=self.storage,
                study=self._study,
                _trial_id=trial._trial_id,  # pyright: ignore[reportPrivateUsage] -- save_note reads it
            )
            self._pages.save_note(noted, note)
        self._last = record


def trial_note(agent: AgentRecord, record: RoundRecord) -> str:
    """Return the note on a trial: its agent in a round, with parent, fitness and decisions."""
    lines = [f"**Agent {agent.agent} in round {record.round + 1}**, member {agent.member}", ""]
    if agent.parent is None:
        lines.append("- of the first population")
    else:
        lines.append(f"- from member {agent.parent}: {agent.mutation.op}")
    lines += [
        f"- {name}: {shown_value(old)} → {shown_value(new)}"
        for name, (old, new) in agent.mutation.changes.items()
    ]
    if agent.state == "ok" and agent.score is not None:
        fitness, error = columns.fitness(agent), columns.fitness_se(agent)
        remark = (
            f", on {wording.measured_on(agent.score)}: nothing was decided"
            if record.between
            else ""
        )
        lines.append(f"- fitness {fitness:.4f} ± {error:.4f}{remark}")
    else:
        lines.append(f"- failed: {_plain(agent.reason)}")
    texts = (decision.sentence for decision in record.decisions if decision.agent == agent.agent)
    return "\n".join([*lines, *(f"- {_plain(sentence)}" for sentence in texts)])


def study_note(folder: Path, view: RunView) -> str:
    """Return the note on the study: the run, its story, and the remark that this is a copy."""
    heading = list[str]()
    if (config := view.settings) is not None:
        population = config.population
        heading = [
            f"**{_plain(config.name)}**: {_code(config.model.name)} on {_code(config.env.kind)}, "
            f"{population.size} agents, {population.rounds} rounds of "
            f"{population.steps_per_round} steps, seed {config.seed}",
            "",
        ]
    ending = (
        f"A copy of the run in {_code(str(folder))}, made from its records and kept up to date "
        "with them. Changes that you make here are lost when this dashboard ends."
    )
    return "\n".join([*heading, *(_plain(sentence.text) + "\n" for sentence in view.story), ending])


def _plain(text: str) -> str:
    """Escape the characters of a text that have a meaning in Markdown or HTML."""
    return "".join(f"&#{ord(sign)};" if sign in "<>&`*_[]()|\\" else sign for sign in text)


def _code(text: str) -> str:
    return f"`{text.replace('`', '')}`"


class _Server(ThreadingMixIn, WSGIServer):
    """An HTTP server that handles several requests at once, because a page sends many."""

    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    """A request handler that logs requests instead of printing a line for each."""

    def log_message(self, format: str, *arguments: object) -> None:
        _log.debug(format, *arguments)


class _Guarded:
    """A WSGI application that serves only the browser that opened the printed address.

    Other web pages in the user's browser can send requests to the port, under another host name or
    from another origin, and any user of the machine can connect. A request must therefore name this
    host, come from this origin, and have the token of the printed address, or its cookie.
    """

    def __init__(self, app: Callable[..., Iterable[bytes]], port: int) -> None:
        self._app = app
        # A browser shares its cookies between all ports of a machine.
        self._cookie = f"evo-grpo-{port}"
        self.token = secrets.token_urlsafe()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        host, origin = environ.get("HTTP_HOST", ""), environ.get("HTTP_ORIGIN")
        # Accept any port: a user may forward another port to this one.
        if host.rpartition(":")[0] not in (HOST, "localhost"):
            return _refuse(start, f"expected the host {HOST} in the address, got another one")
        if origin is not None and origin != f"http://{host}":
            return _refuse(start, "expected a request of this page, got one of another origin")
        if self._same(parse_qs(environ.get("QUERY_STRING", "")).get("token", [""])[0]):
            # Redirect to the address without the token, to keep it out of histories and referrers.
            cookie = f"{self._cookie}={self.token}; HttpOnly; SameSite=Lax; Path=/"
            headers = [
                ("Location", "/" + quote(environ.get("PATH_INFO", "").lstrip("/"))),
                ("Set-Cookie", cookie),
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

    def _same(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self.token.encode())


def _refuse(start: Callable[..., Any], why: str) -> Iterable[bytes]:
    start("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
    return [f"refused: {why}\n".encode()]


def serve(run: str | Path, port: int, *, say: Callable[[str], None]) -> None:
    """Serve the dashboard of a run until the process is ended.

    Args:
        run: The run folder, finished or not.
        port: Port on the loopback address; 0 takes a free one.
        say: Called with the address when the server is ready, and with an error when the records
            cannot be read any more.
    """
    copy = StudyCopy(run)
    app = import_module("optuna_dashboard").wsgi(copy.storage)
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
    last_message = ""
    while not stop.wait(SECONDS):
        try:
            copy.update()
        except KeyError:  # the study was deleted in the dashboard
            return
        except (EvoGrpoError, OSError) as error:
            if last_message != (last_message := str(error)):
                say(f"the rounds cannot be read now, so the dashboard is not updated: {error}")

"""Defines the commands that train or steer a run: run, resume, steer.

`--nproc` starts the command once for each rank. torchrun is not used: it prints a page about each
stop, and after Ctrl-C it sends a SIGTERM, a second signal, after which a run ends without cleaning
up.
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
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from evo_grpo.cli.commands import options
from evo_grpo.cli.commands.options import app
from evo_grpo.cli.output import say, warn
from evo_grpo.cli.showing import RunOutput, show_run
from evo_grpo.errors import ConfigError, EvoGrpoError, RunNotFoundError
from evo_grpo.population.ranks.team import STORE, is_one_of_several, is_silent_rank

if TYPE_CHECKING:
    from evo_grpo.readers.terminal.progress import RunProgress
    from evo_grpo.record.steering import RunState
    from evo_grpo.types import Request

PANEL = "Training"
FORMS = {
    "stop-agent": "stop-agent AGENT",
    "clone": "clone FROM TO",
    "set": "set AGENT NAME=VALUE [NAME=VALUE ...]",
    "pause": "pause",
    "continue": "continue",
    "stop-after-round": "stop-after-round",
    "cancel": "cancel",
}
_AGENTS = {"stop-agent": 1, "clone": 2, "set": 1}
"""Operation of a request -> the number of agents that the request names."""
#: Seconds after the end of a rank until the remaining ranks are terminated.
SECONDS_TO_END = 15.0
_POLL_SECONDS = 0.05
_LAUNCHER = "EVO_GRPO_LAUNCHER"
"""Environment variable with the id of the process that started a rank; the rank ends with it."""


def _check_report(report: bool) -> None:
    """Raise EngineUnavailable if --report is given and plotly is not installed."""
    if report and not is_silent_rank():
        from evo_grpo.readers.report.figures.axes import graph_objects

        graph_objects("run --report")


@app.command(rich_help_panel=PANEL)
def run(  # noqa: PLR0913 -- one argument for each option
    file: options.File = Path("population.yaml"),
    settings: options.Settings = None,
    out: options.Out = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the run in the folder of --out.")
    ] = False,
    compare: options.Compare = False,
    report: options.Report = False,
    nproc: options.Ranks = None,
    quiet: options.Quiet = False,
    as_json: options.AsEvents = False,
    debug: options.Debug = False,
) -> None:
    """Train and evolve the population of a configuration."""
    from evo_grpo import settings as config
    from evo_grpo.places import searching
    from evo_grpo.record.folder import beside

    audience = RunOutput(quiet=quiet, as_json=as_json)
    with audience.errors(), reporting_early_errors(), searching(beside(file)):
        loaded = config.load(file, settings or ())
        _check_report(report)
        launch_ranks(nproc, sys.argv[1:])
        for warning in config.warnings(loaded):
            audience.warn(warning)
        if compare:
            from evo_grpo.settings.run import check_comparable

            check_comparable(loaded)

        def play(progress: RunProgress) -> Path:
            from evo_grpo.training.run import run as run_population

            return run_population(
                loaded, out=out, force=force, observer=audience.observer(progress), report=report
            )

        show_run(play, audience, loading=loaded.model.name, compare=compare, report=report)


def _finished(folder: Path) -> str:
    """Return a sentence which says that a run is finished, and which rule ended it, if any did."""
    from evo_grpo.record.stopping import why_it_ended
    from evo_grpo.record.summary import read_summary

    why = why_it_ended(read_summary(folder) or {})
    return f"this run is finished{why and f', {why}'}"


@app.command(rich_help_panel=PANEL)
def resume(  # noqa: PLR0913 -- one argument for each option
    folder: options.Run,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds",
            min=1,
            help="Number of rounds of the whole run, to extend it; more than were played.",
        ),
    ] = None,
    allow: options.Allow = None,
    code: options.Code = None,
    compare: options.Compare = False,
    report: options.Report = False,
    nproc: options.Ranks = None,
    quiet: options.Quiet = False,
    as_json: options.AsEvents = False,
    debug: options.Debug = False,
) -> None:
    """Continue an interrupted run with the same result, or extend a finished run by more rounds."""
    audience = RunOutput(quiet=quiet, as_json=as_json)

    def play(progress: RunProgress) -> Path:
        from evo_grpo.training.run import resume as resume_run

        resumed = resume_run(
            folder,
            rounds=rounds,
            allow=allow or (),
            observer=audience.observer(progress),
            report=report,
        )
        if not progress.began and audience.person:
            command = f"evo-grpo resume {folder} --rounds N"
            say(f"{folder}: {_finished(folder)}; to play more rounds: {command}")
        return resumed

    from evo_grpo.places import searching
    from evo_grpo.record.folder import code_folder, expect_run

    with audience.errors(), reporting_early_errors(), searching(code_folder(code), is_code=True):
        if folder.is_file() and folder.suffix in (".yaml", ".yml"):
            raise RunNotFoundError(
                f"{folder}: expected a run folder, got a file; start a run of this configuration "
                f"with: evo-grpo run {folder}"
            )
        if not is_silent_rank():  # the others may not see the folder
            expect_run(folder)
        _check_report(report)
        launch_ranks(nproc, sys.argv[1:])
        show_run(
            play,
            audience,
            loading=str(folder),
            compare=compare,
            folder=folder,
            allow=allow or (),
            report=report,
        )


@app.command(rich_help_panel=PANEL)
def steer(
    folder: options.Run,
    request: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[REQUEST]",
            help=f"One of: {'; '.join(FORMS.values())}. Without a request, show earlier ones.",
        ),
    ] = None,
    debug: options.Debug = False,
) -> None:
    """Change a run while it trains; requests are carried out between two rounds."""
    from evo_grpo.record.steering import ask, cancel, state_of

    if not request:
        _show(state_of(folder))
        return
    op, agents, values = _parse_request(request)
    if op == "cancel":
        withdrawn = cancel(folder)
        say(f"{folder}: {withdrawn} withdrawn" if withdrawn else f"{folder}: nothing was waiting")
        return
    agent, source = (agents[-1] if agents else None), (agents[0] if op == "clone" else None)
    recorded, state = ask(folder, op, agent=agent, source=source, values=values)
    say(f"{folder}: {recorded}: {_when_carried_out(recorded, state)}")


def _parse_request(request: Sequence[str]) -> tuple[str, list[int], dict[str, Any]]:
    """Return the operation of a request, its agents, and the hyperparameters of a "set"."""
    from evo_grpo.settings.yaml import parse

    op, *rest = request
    if op not in FORMS:
        raise ConfigError(f"steer: expected {', '.join(FORMS)}, got {op!r}")
    agents, values = rest[: _AGENTS.get(op, 0)], rest[_AGENTS.get(op, 0) :]
    pairs = [(name, text) for name, _, text in (value.partition("=") for value in values)]
    complete = len(agents) == _AGENTS.get(op, 0) and bool(pairs) == (op == "set")
    complete = complete and len(dict(pairs)) == len(pairs)  # each hyperparameter once
    numbers = all(agent.isascii() and agent.isdigit() and len(agent) < 10 for agent in agents)
    if not (complete and numbers and all(name and text.strip() for name, text in pairs)):
        raise ConfigError(
            f"steer: expected {FORMS[op]}, with agents by number, got {' '.join(request)!r}"
        )
    return op, [*map(int, agents)], {name: parse(t, f"steer set {name}") for name, t in pairs}


def _when_carried_out(request: Request, standing: RunState) -> str:
    """Return when a request will be carried out, in words."""
    played = len(standing.rounds)
    if not standing.trains:
        resume = f"evo-grpo resume {standing.folder}"
        when = "after its first round" if not played else f"before round {played + 1}"
        return f"no process trains this run; it is saved and carried out {when}, with: {resume}"
    if request.op == "continue":
        return f"round {played + 1} begins" if standing.paused else "the pause is cancelled"
    if standing.paused:
        return "carried out now, since the run is paused"
    if standing.in_last_round:
        resume = f"evo-grpo resume {standing.folder} --rounds N"
        return f"kept, for round {request.after + 1} is the last one; carried out by: {resume}"
    return f"carried out after round {request.after + 1}, or a round later if that has ended"


def _show(standing: RunState) -> None:
    """Print the state of a run, its pending requests, and the outcomes of earlier requests."""
    played, planned = len(standing.rounds), standing.config.population.rounds
    if standing.finished:
        state = f"finished after round {played}"
    elif not standing.trains:
        state = f"no process trains it; {played} of {planned} rounds are played"
    elif standing.paused:
        state = f"paused after round {played} of {planned}"
    elif standing.over:
        state = f"evaluates the base and the winner after round {played}, the last one"
    else:
        state = f"trains; {played} of {planned} rounds are played"
    say(f"{standing.folder}: {state}")
    for entry in standing.waiting:
        say(f"  waiting: {entry}, requested {_time_ago(entry.asked)}")
    for number, entry in standing.became:
        outcome = f"refused: {entry.refused}" if entry.refused else "done"
        say(f"  after round {number + 1}: {entry.request}: {outcome}")
    if not standing.waiting and not standing.became:
        say("  no requests")
    for text in standing.unread:
        warn(f"{text}; withdraw it with: evo-grpo steer {standing.folder} cancel")


def _time_ago(asked: float) -> str:
    seconds = max(0, round(time.time() - asked))
    if seconds < 120:
        return f"{seconds} s ago"
    return f"{seconds // 60} min ago" if seconds < 7200 else f"{seconds // 3600} h ago"


@contextmanager
def reporting_early_errors() -> Generator[None]:
    """If this process rank fails before the ranks are connected, report its error to the others."""
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
    """Start the process ranks of a run on this machine, wait for them, and exit with their code.

    This returns at once if `ranks` is None or 1, or if this process is a rank already. ConfigError
    is raised if this process is a rank and `ranks` differs from the number of ranks. `arguments`
    are those of the command.
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
    """Wait for all process ranks; if one has failed, end the others that do not end in time.

    Returns the exit code of rank 0 or, if that is 0, of the rank that failed first.
    """
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
    """Wait until the launcher has ended, even by SIGKILL; then send SIGTERM to this rank."""
    while os.getppid() == launcher:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)

"""Where vLLM runs: in a process of its own, or in this one."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import tempfile
import weakref
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol, final

from evo_grpo.errors import EngineUnavailable, RunFailedError
from evo_grpo.printable import cut, printable
from evo_grpo.rollout.vllm import server
from evo_grpo.rollout.vllm.server import Message, Session, receive, send

_log = logging.getLogger(__name__)

Arrays = Mapping[str, "array[Any]"]
LAST_LINES = 8
"""Of the log, which an error tells."""
_LOG_BYTES = 1 << 14
_DOING = {
    "start": "starting",
    "generate": "sampling",
    "sleep": "going to sleep",
    "wake": "waking",
}
_SECONDS_TO_END = 5.0


class Link(Protocol):
    """A vLLM that answers."""

    def ask(
        self, operation: str, values: Mapping[str, Any], arrays: Arrays | None = None
    ) -> Message:
        """Ask for an operation of `server.Session`, and wait for its answer.

        Raises:
            EngineUnavailable: vLLM does not start.
            RunFailedError: It failed, or its process ended; it is closed then.
        """
        ...

    def close(self) -> None:
        """End it. Closing twice is allowed."""
        ...


@final
class Child:
    """vLLM in a process of its own.

    It has a session of its own, so that Ctrl-C is for this process alone, which then ends it. Its
    output goes to a log among the temporary files, which stays where it fails.

    Args:
        python: The Python that runs it.
        environment: Its environment.
        folders: What it removes where this process is killed.
    """

    def __init__(
        self, python: str, environment: Mapping[str, str], folders: Sequence[Path] = ()
    ) -> None:
        self._python = python
        self._folders = [str(folder) for folder in folders]
        handle, name = tempfile.mkstemp(prefix="evo-grpo-vllm-", suffix=".log")
        self.log = Path(name)
        self._socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [python, server.__file__, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=handle,
                env=dict(environment),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            self._socket.close()
            self.log.unlink()
            raise EngineUnavailable(
                f"engine.vllm.python: {python!r} cannot be run: {error.strerror}; name the Python "
                "of an environment in which vLLM is installed"
            ) from error
        finally:
            theirs.close()
            os.close(handle)
        # Also where nobody closes it: at the end of the interpreter, or with the engine.
        self._end = weakref.finalize(self, _end, os.getpid(), self._process, self._socket, self.log)
        _log.info("vLLM starts as process %d; its log is %s", self.pid, self.log)

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def ask(
        self, operation: str, values: Mapping[str, Any], arrays: Arrays | None = None
    ) -> Message:
        """See `Link`."""
        asked = {**values, "operation": operation, "folders": self._folders}
        try:
            send(self._socket, Message(asked, dict(arrays or {})))
            answer = receive(self._socket)
        except (EOFError, OSError):
            self._ended(operation)
        except BaseException:  # Ctrl-C too: what it works on belongs to this question
            _kill(self._process)
            self.close()
            raise
        if "error" in answer.values:
            self._failed(operation, _raised(operation, *answer.values["error"]))
        return answer

    def close(self) -> None:
        """See `Link`."""
        self._end()

    def _ended(self, operation: str) -> NoReturn:
        try:
            code = self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._failed(operation, "closed its socket")
        how = f"ended with code {code}" if code >= 0 else f"was ended by {_signal(-code)}"
        self._failed(operation, f"{how} while {_DOING[operation]}")

    def _failed(self, operation: str, what: str) -> NoReturn:
        lines = last_lines(self.log)
        # The log stays: it is named here.
        self._end.detach()
        _end(os.getpid(), self._process, self._socket, None)
        error = failure(operation, f"vLLM's process {self.pid} ({self._python}) {what}", self.log)
        for line in lines:
            error.add_note(f"  {line}")
        raise error


@final
class Inside:
    """vLLM in this process.

    Args:
        environment: What vLLM reads; set where it is not.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        self._session: Session | None = Session()

    def ask(
        self, operation: str, values: Mapping[str, Any], arrays: Arrays | None = None
    ) -> Message:
        """See `Link`."""
        assert self._session is not None, "a closed engine is not used again"
        try:
            return self._session.answer(
                Message({**values, "operation": operation}, dict(arrays or {}))
            )
        except Exception as error:  # whatever vLLM raises
            told = _raised(operation, type(error).__name__, str(error))
            raise failure(operation, f"vLLM {told}", None) from error

    def close(self) -> None:
        """See `Link`; what vLLM has set for the process stays."""
        self._session = None


def _raised(operation: str, kind: str, text: str) -> str:
    return f"raised {kind} while {_DOING[operation]}: {text.strip().rstrip('.')}"


def failure(operation: str, what: str, log: Path | None) -> EngineUnavailable | RunFailedError:
    """Return the error of a vLLM that failed.

    Args:
        operation: What was asked of it; `start` is bad input, since no round was played.
        what: What happened.
        log: Its output, which follows as notes.
    """
    text = printable(cut(what, 1000))
    where = "" if log is None else f"; the last lines of its log {log} follow"
    if operation == "start":
        return EngineUnavailable(
            f"engine.rollout: {text}; mend what it says, or leave engine.rollout out, which "
            f"generates with the engine built in{where}"
        )
    return RunFailedError(
        f"engine.rollout: {text}; finished rounds are in the run folder: go on with: evo-grpo "
        f"resume RUN{where}"
    )


def _signal(number: int) -> str:
    with suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"


def last_lines(log: Path, most: int = LAST_LINES) -> list[str]:
    """Return the last lines of a log, each cut to fit."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [printable(cut(line)) for line in text.splitlines() if line.strip()][-most:]


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(
    owner: int, process: subprocess.Popen[bytes], link: socket.socket, log: Path | None
) -> None:
    """End a process and what it started; by the end of its socket, then by force."""
    link.close()
    if os.getpid() != owner:  # a fork of the one that started it, whose end is not ours
        return
    with suppress(subprocess.TimeoutExpired):
        process.wait(_SECONDS_TO_END)
    _kill(process)
    process.wait()
    if log is not None:
        log.unlink(missing_ok=True)

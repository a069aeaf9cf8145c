"""Where vLLM runs: in a process of its own, or in this one."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BufferedRWPair
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, final

from evo_grpo.errors import EngineUnavailable, RunFailedError
from evo_grpo.printable import cut, printable
from evo_grpo.rollout.vllm import server
from evo_grpo.rollout.vllm.server import Session, receive, send

_log = logging.getLogger(__name__)

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


@final
class Child:
    """vLLM in a process of its own.

    It has a session of its own, so that Ctrl-C is for this process alone, which then ends it. Its
    output goes to a log among the temporary files, which stays where it fails. It removes `folders`
    where this process is killed. After `timeout` seconds without progress it counts as hung; None
    waits for ever.
    """

    def __init__(
        self,
        python: str,
        environment: Mapping[str, str],
        folders: Sequence[Path] = (),
        timeout: float | None = None,
    ) -> None:
        self._python = python
        self._timeout = timeout
        self._folders = [str(folder) for folder in folders]
        handle, name = tempfile.mkstemp(prefix="evo-grpo-vllm-", suffix=".log")
        self.log = Path(name)
        ours, theirs = socket.socketpair()
        ours.settimeout(timeout)  # for a process that is stopped, and says nothing
        self._link = ours.makefile("rwb")
        ours.close()  # with the file
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
            self._link.close()
            self.log.unlink()
            raise EngineUnavailable(
                f"engine.vllm.python: {python!r} cannot be run: {error.strerror}; name the Python "
                "of an environment in which vLLM is installed"
            ) from error
        finally:
            theirs.close()
            os.close(handle)
        # Also where nobody closes it: at the end of the interpreter, or with the engine.
        self._end = weakref.finalize(self, _end, os.getpid(), self._process, self._link, self.log)
        _log.info("vLLM starts as process %d; its log is %s", self.pid, self.log)

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def ask(self, operation: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask for an operation of `server.Session`, and wait for its answer.

        Raises:
            EngineUnavailable: vLLM does not start.
            RunFailedError: It failed, or its process ended; it is closed then.
        """
        try:
            send(self._link, {**values, "operation": operation, "folders": self._folders})
            answer = self._answer()
        except TimeoutError:
            _kill(self._process)
            self._failed(
                operation,
                f"made no progress for {self._timeout:g} s while {_DOING[operation]} and was "
                "ended; where it may take so long, raise engine.vllm.timeout",
            )
        except (EOFError, OSError):
            self._ended(operation)
        except BaseException:  # Ctrl-C too: what it works on belongs to this question
            _kill(self._process)
            self.close()
            raise
        if "error" in answer:
            self._failed(operation, _raised(operation, *answer["error"]))
        return answer

    def close(self) -> None:
        """End it. Closing twice is allowed."""
        self._end()

    def _answer(self) -> Mapping[str, Any]:
        """Return the answer, however long it takes, as long as vLLM goes on.

        Raises:
            TimeoutError: It does not.
        """
        progress, since = None, time.monotonic()
        while True:
            message = receive(self._link)
            if "progress" not in message:
                return message
            if message["progress"] != progress:
                progress, since = message["progress"], time.monotonic()
            elif self._timeout is not None and time.monotonic() - since >= self._timeout:
                raise TimeoutError

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
        _end(os.getpid(), self._process, self._link, None)
        error = failure(operation, f"vLLM's process {self.pid} ({self._python}) {what}", self.log)
        for line in lines:
            error.add_note(f"  {line}")
        raise error


@final
class Inside:
    """vLLM in this process, whose environment gets what vLLM reads and is not set."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        self._session: Session | None = Session()

    def ask(self, operation: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Child`."""
        assert self._session is not None, "a closed engine is not used again"
        try:
            return self._session.answer({**values, "operation": operation})
        except Exception as error:  # whatever vLLM raises
            told = _raised(operation, type(error).__name__, str(error))
            raise failure(operation, f"vLLM {told}", None) from error

    def close(self) -> None:
        """See `Child`; what vLLM has set for the process stays."""
        self._session = None


Link: TypeAlias = Child | Inside


def _raised(operation: str, kind: str, text: str) -> str:
    return f"raised {kind} while {_DOING[operation]}: {text.strip().rstrip('.')}"


def failure(operation: str, what: str, log: Path | None) -> EngineUnavailable | RunFailedError:
    """Return the error of a vLLM that failed; the lines of its log follow as notes.

    If it was `start` that failed, this is bad input, since no round was played.
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
    owner: int, process: subprocess.Popen[bytes], link: BufferedRWPair, log: Path | None
) -> None:
    """End a process and what it started; by the end of its socket, then by force."""
    with suppress(OSError):  # a question that it did not take
        link.close()
    if os.getpid() != owner:  # a fork of the one that started it, whose end is not ours
        return
    with suppress(subprocess.TimeoutExpired):
        process.wait(_SECONDS_TO_END)
    _kill(process)
    process.wait()
    if log is not None:
        log.unlink(missing_ok=True)

"""The connection to vLLM, which runs in a child process."""

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
from typing import Any, NoReturn, final

from evo_grpo.errors import EngineUnavailable, RunFailedError
from evo_grpo.escaping import printable, shorten
from evo_grpo.rollout.vllm import server
from evo_grpo.rollout.vllm.server import receive, send

_log = logging.getLogger(__name__)

LAST_LINES = 8
"""Number of log lines that an error shows."""
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
    """Runs vLLM in a child process, and exchanges messages with it.

    The child has its own session, so Ctrl-C reaches only this process, which then ends the child.
    The child's output goes to a temporary log file, which is kept after a failure. `python` runs
    vLLM in `environment`. If this process is killed, the child removes `folders`. After `timeout`
    seconds without progress, vLLM counts as hung; None waits forever.
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
        ours.settimeout(timeout)  # for a process that is stopped and sends nothing
        self._link = ours.makefile("rwb")
        ours.close()  # takes effect when the file is closed
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
        # Also ends the child at the exit of the interpreter, or when the engine is collected.
        self._end = weakref.finalize(self, _end, os.getpid(), self._process, self._link, self.log)
        _log.info("vLLM starts as process %d; its log is %s", self.pid, self.log)

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def ask(self, operation: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Request an operation of `server.Session`, and wait for its answer."""
        try:
            send(self._link, {**values, "operation": operation, "folders": self._folders})
            answer = self._answer()
        except TimeoutError:
            _kill(self._process)
            self._failed(
                operation,
                f"made no progress for {self._timeout:g} s while {_DOING[operation]} and was "
                "ended; if that may take longer, raise engine.vllm.timeout",
            )
        except (EOFError, OSError):
            self._ended(operation)
        except BaseException:  # Ctrl-C too: the child would answer a request that is abandoned
            _kill(self._process)
            self.close()
            raise
        if "error" in answer:
            kind, text = answer["error"]
            text = text.strip().rstrip(".")
            self._failed(operation, f"raised {kind} while {_DOING[operation]}: {text}")
        return answer

    def close(self) -> None:
        """End the process. Closing twice is allowed."""
        self._end()

    def _answer(self) -> Mapping[str, Any]:
        """Wait for the answer as long as vLLM makes progress."""
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
        """End the process and raise an error, with the last lines of the log as notes.

        A failed `start` raises an input error, since no round has been trained.
        """
        lines = last_lines(self.log)
        # Keep the log, which the error names.
        self._end.detach()
        _end(os.getpid(), self._process, self._link, None)
        text = printable(shorten(f"vLLM's process {self.pid} ({self._python}) {what}", 1000))
        kind, remedy = RunFailedError, "finished rounds are in the run folder; continue with: "
        remedy += "evo-grpo resume RUN"
        if operation == "start":
            kind, remedy = EngineUnavailable, "fix that (its settings are engine.vllm), or leave "
            remedy += "engine.rollout out to generate with the built-in engine"
        log = f"the last lines of its log {self.log} follow"
        error = kind(f"engine.rollout: {text}; {remedy}; {log}")
        for line in lines:
            error.add_note(f"  {line}")
        raise error


def _signal(number: int) -> str:
    with suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"


def last_lines(log: Path) -> list[str]:
    """Return the last lines of a log, each shortened to fit an error."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [printable(shorten(line)) for line in text.splitlines() if line.strip()][-LAST_LINES:]


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(
    owner: int, process: subprocess.Popen[bytes], link: BufferedRWPair, log: Path | None
) -> None:
    """End a process and its children: close its socket, then kill them."""
    with suppress(OSError):  # a request that it did not read
        link.close()
    if os.getpid() != owner:  # a fork of the process that started it, and that alone ends it
        return
    with suppress(subprocess.TimeoutExpired):
        process.wait(_SECONDS_TO_END)
    _kill(process)
    process.wait()
    if log is not None:
        log.unlink(missing_ok=True)

"""Reward functions in a separate process, which is killed when a call hangs.

If a call hangs, exits or crashes, the run raises an error that names the call. The process receives
the functions, then batches, and sends the number of each call before making the call.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from typing import Any, final

from evo_grpo.envs.rewards.functions import RewardFunction
from evo_grpo.envs.rewards.scoring import CompletionBatch, Scored, calls_of, score_batch
from evo_grpo.envs.rewards.watch import Call, check_not_stopped
from evo_grpo.errors import ConfigError, EvoGrpoError, RewardAbortError
from evo_grpo.escaping import error_text
from evo_grpo.settings.env import RewardCalls

GRACE_SECONDS = 2.0
"""Seconds beyond the limit in which the process itself may report a late call."""

_LOOK_SECONDS = 0.5

# Not multiprocessing, which would run the user's script again. The path comes first, since names
# may need it.
_START = (
    "import sys; sys.path[:] = {path!r}; from evo_grpo.envs.rewards.process import serve; "
    "serve({descriptor}, {parent})"
)


@final
class RewardProcess:
    """Scores batches in a separate process, which is started for the first batch.

    Raises ConfigError if the process cannot import a function by its name.
    """

    def __init__(self, rewards: Sequence[RewardFunction], calls: RewardCalls) -> None:
        self._rewards = tuple(rewards)
        self._calls = calls
        for reward in rewards:
            _check_importable(reward)
        self._running: tuple[subprocess.Popen[bytes], Connection[Any, Any]] | None = None

    def score(self, batch: CompletionBatch) -> Scored:
        """Score a batch in the process; raise the error that it sends, or one if it ends early."""
        calls = calls_of(self._rewards, batch)
        try:
            connection = self._connected()
            _send(connection, replace(batch, rows=[dict(row) for row in batch.rows]))
            reply = self._reply(connection, calls)
        except BaseException:  # Ctrl-C too
            self.close()  # the process may still work on this batch
            raise
        if isinstance(reply, EvoGrpoError):
            raise reply
        return reply

    def close(self) -> int:
        """Kill the process and its children; return its exit code, or 0 if no process runs."""
        if self._running is None:
            return 0
        (process, connection), self._running = self._running, None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        connection.close()
        return process.wait()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def _connected(self) -> Connection[Any, Any]:
        """Return the connection to the process, after starting it if none runs."""
        if self._running is not None and self._running[0].poll() is None:
            return self._running[1]
        self.close()
        ours, theirs = Pipe()
        start = _START.format(path=sys.path, descriptor=theirs.fileno(), parent=os.getpid())
        process = subprocess.Popen(
            [sys.executable, "-c", start],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C reaches the run alone, which then kills this process
        )
        theirs.close()
        self._running = process, ours
        _send(ours, (self._rewards, self._calls))
        return ours

    def _reply(self, connection: Connection[Any, Any], calls: Sequence[Call]) -> Any:  # noqa: ANN401 -- Scored, or an error
        """Return the rewards or the error that the process sends; raise for a call that is late."""
        limit = self._calls.reward_timeout
        call: Call | None = None
        while _polled(connection, None if limit is None or call is None else limit + GRACE_SECONDS):
            try:
                message = connection.recv()
            except (EOFError, OSError):  # also in the middle of a message
                raise self._ended(call) from None
            if not isinstance(message, int):
                return message
            call = calls[message]
        title = "reward functions" if call is None else call.title()
        raise RewardAbortError(
            f"{title}: expected a result within {limit:g} s, got none; its process was "
            "stopped; mend what it waits for, or raise env.reward_timeout"
        )

    def _ended(self, call: Call | None) -> RewardAbortError:
        """Return the error of a process that ended during a call, or before the first one."""
        code = self.close()
        how = f"with code {code}" if code >= 0 else f"by signal {-code}"
        if call is None:
            return RewardAbortError(
                f"reward functions: their process ended {how} before the first call; see what it "
                "wrote above, or leave env.isolate out"
            )
        return RewardAbortError(
            f"{call.title()}: it ended its process {how}; expected a reward: return None for what "
            "cannot be scored"
        )


def _polled(connection: Connection[Any, Any], seconds: float | None) -> bool:
    """Wait up to `seconds` (None: without limit) for a message; return whether one has come."""
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        check_not_stopped()
        if connection.poll(_LOOK_SECONDS):
            return True
        if end is not None and time.monotonic() >= end:
            return False


def serve(descriptor: int, parent: int) -> None:
    """Score batches until the connection is closed, in the process of the reward functions.

    `descriptor` is the connection's file descriptor, `parent` the process id of the run.
    """
    process = os.getpid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    connection: Connection[Any, Any] = Connection(descriptor)
    with suppress(EOFError):
        rewards, how = connection.recv()
        while True:
            batch = connection.recv()
            try:
                reply = score_batch(rewards, batch, how, connection.send)
            except EvoGrpoError as error:
                reply = error
            if os.getpid() != process:
                break  # a reward function forked this copy
            connection.send(reply)
    os._exit(0)  # do not wait for threads that a reward function started


def _send(connection: Connection[Any, Any], message: object) -> None:
    with suppress(ConnectionError):  # waiting for the reply reports that the process has ended
        connection.send(message)


def _end_with(parent: int) -> None:
    """End this process when its parent, of process id `parent`, has ended, even during a call."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


def _check_importable(reward: RewardFunction) -> None:
    try:
        data = pickle.dumps(reward)
        is_importable = b"__main__" not in data
        why = "it is defined in the script that runs"
    except Exception as error:  # the state of a user's object may raise anything
        is_importable, why = False, error_text(error)
    if not is_importable:
        raise ConfigError(
            f"reward function {reward.name!r}: env.isolate: process needs a function that can be "
            f"imported by its name ({why}); define it at the top of a module, or leave isolate out"
        )

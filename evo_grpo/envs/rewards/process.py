"""Reward functions in a process of their own, which is stopped where a call hangs.

What it may do without harm: hang, also where no signal reaches it; exit, with whatever code; crash;
fork. It gets completions, rows and prompts as pickles, and answers in JSON. The number of the call
that it is at stands in memory that both processes see, so that it can be named when nothing else
comes.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn, final

import numpy as np

from evo_grpo.envs.rewards.functions import RewardFunction
from evo_grpo.envs.rewards.reward_values import CompletionBatch
from evo_grpo.envs.rewards.scoring import Failure, Scored, calls_of
from evo_grpo.errors import ConfigError, DataError, RewardAbortError, RewardError
from evo_grpo.printable import raised
from evo_grpo.settings.env import RewardCalls

NUMBER = struct.Struct("q")
"""The call that the process is at, and the length of a message."""
STARTING = -1

_ERRORS: dict[str, type[RewardError] | type[DataError]] = {
    "RewardAbortError": RewardAbortError,
    "RewardError": RewardError,
    "DataError": DataError,
}
#: How often the number of the call is looked at, at least.
_LOOK_SECONDS = 0.25
#: Seconds beyond the limit that the process has to report a call that is late itself.
_GRACE_SECONDS = 2.0
# Its own sys.path first, which names may need to be found by; then the module that serves.
_START = (
    "import sys; sys.path[:] = {path!r}; from evo_grpo.envs.rewards.child import serve; "
    "serve({fds!r}, {parent})"
)


@final
class RewardProcess:
    """Scores batches in a process that is started for the first of them.

    Args:
        rewards: Functions that can be imported by their names.
        calls: How they are called.

    Raises:
        ConfigError: A function cannot be imported there.
    """

    def __init__(self, rewards: Sequence[RewardFunction], calls: RewardCalls) -> None:
        self._rewards = tuple(rewards)
        self._calls = calls
        for reward in rewards:
            _check_importable(reward)
        self._process: subprocess.Popen[bytes] | None = None
        self._memory: mmap.mmap | None = None
        self._to = self._from = -1
        self._code = 0
        self._at = STARTING

    def score(self, batch: CompletionBatch) -> Scored:
        """Score completions; see `scoring.score_batch`.

        Raises:
            RewardAbortError: A call took too long, or ended the process.
        """
        calls = calls_of(self._rewards, batch)  # a missing column is named here
        if self._process is None or self._process.poll() is not None:
            self._start()
        request = (list(batch.completions), [dict(row) for row in batch.rows])
        try:
            send(self._to, pickle.dumps((*request, list(batch.prompts), list(batch.numbers))))
            reply = json.loads(self._receive(calls))
        except BaseException as error:  # Ctrl-C too; it goes on as it is, behind a clean end
            self.close()  # whatever it still works on belongs to this batch
            if isinstance(error, BrokenPipeError | EOFError):
                self._ended(calls)
            raise
        if "error" in reply:
            kind, text = reply["error"]
            raise _ERRORS.get(kind, RewardError)(text)
        failures = [Failure(positions, text) for positions, text in reply["failures"]]
        table = np.array(reply["rewards"], dtype=np.float64)
        return Scored(table.reshape(len(batch.completions), len(self._rewards)), failures)

    def close(self) -> None:
        """Stop the process, and whatever it started."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        self._code = process.wait()
        self._at = self._number()
        if self._memory is not None:
            self._memory.close()
        for descriptor in (self._to, self._from):
            os.close(descriptor)

    def __del__(self) -> None:
        """Stop the process with the environment that it belongs to."""
        with suppress(Exception):
            self.close()

    def _start(self) -> None:
        self.close()
        with tempfile.TemporaryFile() as file:
            file.write(NUMBER.pack(STARTING))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), NUMBER.size)
            theirs_in, self._to = os.pipe()
            self._from, theirs_out = os.pipe()
            fds = (theirs_in, theirs_out, file.fileno())
            start = _START.format(path=sys.path, fds=fds, parent=os.getpid())
            self._process = subprocess.Popen(
                [sys.executable, "-c", start],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C is for the run, which then ends this process
            )
            os.close(theirs_in)
            os.close(theirs_out)
        with suppress(BrokenPipeError):  # its end is reported by the first batch
            send(self._to, pickle.dumps((self._rewards, self._calls.reward_errors)))
            limit = self._calls.reward_timeout
            send(self._to, pickle.dumps(limit))

    def _receive(self, calls: Sequence[Any]) -> bytes:
        """Wait for the reply, as long as no call takes too long."""
        limit = self._calls.reward_timeout
        pause = _LOOK_SECONDS if limit is None else min(_LOOK_SECONDS, limit / 4)
        at, since = STARTING, time.monotonic()
        while not select.select([self._from], [], [], pause)[0]:
            now = self._number()
            if now != at:
                at, since = now, time.monotonic()
            late = limit is not None and time.monotonic() - since >= limit + _GRACE_SECONDS
            if late and 0 <= at < len(calls):
                raise RewardAbortError(
                    f"{calls[at].title()}: expected a result within {limit:g} s, got none; its "
                    "process was stopped; mend what it waits for, or raise env.reward_timeout"
                )
        return receive(self._from)

    def _number(self) -> int:
        """Return the call that the process is at."""
        return STARTING if self._memory is None else NUMBER.unpack_from(self._memory)[0]

    def _ended(self, calls: Sequence[Any]) -> NoReturn:
        code = f"with code {self._code}" if self._code >= 0 else f"by signal {-self._code}"
        if not 0 <= self._at < len(calls):
            raise RewardAbortError(
                f"reward functions: their process ended {code} before the first call; see what it "
                "wrote above, or leave env.isolate out"
            ) from None
        raise RewardAbortError(
            f"{calls[self._at].title()}: it ended its process {code}; expected a reward: do not "
            "exit in a reward function, return None for what cannot be scored"
        ) from None


def send(descriptor: int, message: bytes) -> None:
    """Write a message with its length to a pipe."""
    view = memoryview(NUMBER.pack(len(message)) + message)
    while view:
        view = view[os.write(descriptor, view) :]


def receive(descriptor: int) -> bytes:
    """Read a message with its length from a pipe.

    Raises:
        EOFError: The other side is closed.
    """
    (length,) = NUMBER.unpack(_read(descriptor, NUMBER.size))
    return _read(descriptor, length)


def _read(descriptor: int, size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = os.read(descriptor, min(size, 1 << 20))
        if not part:
            raise EOFError("the other side of the pipe is closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _check_importable(reward: RewardFunction) -> None:
    try:
        data = pickle.dumps(reward)
        known = b"__main__" not in data
        why = "it is defined in the script that runs"
    except Exception as error:  # the state of a user's object may raise anything
        known, why = False, raised(error)
    if not known:
        raise ConfigError(
            f"reward function {reward.name!r}: env.isolate: process needs a function that can be "
            f"imported by its name ({why}); define it at the top of a module, or leave isolate out"
        )

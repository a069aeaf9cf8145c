"""Handles Ctrl-C and SIGTERM in the command line.

The first signal ends a command with clean-up and prints how to continue; the second signal ends the
process at once. Outside of `interruptible` there is nothing to clean up, and the first signal ends
the process at once. Inside, the first signal raises an exception in the main thread, as Ctrl-C does
in Python, and the command must end within `SECONDS_TO_END`. Python runs a signal handler only
between bytecodes of the main thread: late during a long backward pass, and never if a C function
hangs. So a second thread measures the time and receives the second signal, through a pipe to which
Python writes the number of each signal at once.

`evo_grpo.run` in a user's program does not change its signal handlers. The command line loads this
module first, so it imports little: until `install` has run, Ctrl-C prints a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType

TYPE_CHECKING = False

INTERRUPTED = 130
TERMINATED = 143
SECONDS_TO_END = 9.0
"""Time from the first signal until the process is ended. Supervisors such as Docker kill a process
10 seconds after SIGTERM."""

_CODES = {int(signal.SIGINT): INTERRUPTED, int(signal.SIGTERM): TERMINATED}
_MOMENT = 0.05
_SHOW_CURSOR = b"\x1b[?25h\n"


class Terminated(KeyboardInterrupt):
    """Raised by SIGTERM; a KeyboardInterrupt, so that it is handled like Ctrl-C everywhere."""


def _stopped() -> str:
    return "stopped"


class _State:
    """The state of signal handling, one per process.

    Attributes:
        signal: The first signal, None before there is one.
        raises: Whether the first signal raises an exception, so that the command can clean up.
        messages: A list with the function that returns the last message; empty once it is printed.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.raises = False
        self.messages: list[Callable[[], str]] = [_stopped]


_state = _State()


def install() -> None:
    """Install the handlers of both signals; call this first, from the main thread."""
    for number in _CODES:
        # A signal that the parent process ignores, as `nohup` does, stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle)
    import threading  # imported late; see the module's docstring

    # Open descriptors 0 to 2 if they are closed (`>&-`), so that none of them becomes the pipe.
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(spare)
    heard, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(heard,), name="signals", daemon=True).start()
    os.register_at_fork(after_in_child=_leave_to_child)


def leave() -> None:
    """Restore the default handlers: a signal during Python's shutdown ends the process at once.

    After a first signal, the thread of `_watch` still ends a shutdown that takes too long.
    """
    for number in _CODES:
        if signal.getsignal(number) is _handle:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def interruptible(message: Callable[[], str]) -> Generator[Callable[[], None]]:
    """Let a signal interrupt the body, then print a message and exit with 130 or 143.

    `message` returns one printable line. If the body hangs, another thread calls `message`.

    Yields:
        A function to call when the work begins. Before that call, a signal ends the process at
        once, because libraries interrupted while loading print tracebacks or swallow the interrupt.
    """
    _state.messages = [message]
    try:
        yield _begin
    except (Exception, KeyboardInterrupt) as error:
        # Some libraries convert the interrupt into an error of another type.
        if _state.signal is None and not isinstance(error, KeyboardInterrupt):
            raise
        if sys.stderr is not None:  # None after `2>&-`
            sys.stderr.write(_last_message())
        sys.exit(_code(error))
    finally:
        _state.raises = False
        if _state.messages:
            _state.messages = [_stopped]


def _begin() -> None:
    _state.raises = True


def _code(error: BaseException) -> int:
    if _state.signal is not None:
        return _CODES[_state.signal]
    return TERMINATED if isinstance(error, Terminated) else INTERRUPTED


def _handle(number: int, frame: FrameType | None) -> None:
    """Raise an exception; on a second signal, or outside `interruptible`, end the process."""
    del frame
    if _state.signal is not None or not _state.raises:
        _end(_CODES[number])
    _state.signal = number
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def _watch(heard: int) -> None:
    """Read the numbers of signals; end the process on the second one or after the deadline."""
    import select

    first_signal: int | None = None
    deadline = 0.0
    while True:
        timeout = None if first_signal is None else max(0.0, deadline - time.monotonic())
        if not select.select([heard], [], [], timeout)[0] and first_signal is not None:
            _end(_CODES[first_signal])
        for number in os.read(heard, 64):
            if number not in _CODES or signal.getsignal(number) is not _handle:
                continue  # another signal, or one with a handler of the user's code
            if first_signal is None and _state.raises:
                first_signal, deadline = number, time.monotonic() + SECONDS_TO_END
            else:
                _end(_CODES[number])


def _leave_to_child() -> None:
    """Restore Python's signal handlers in a forked child process."""
    try:
        signal.set_wakeup_fd(-1)
        for number, usual in (
            (signal.SIGINT, signal.default_int_handler),
            (signal.SIGTERM, signal.SIG_DFL),
        ):
            if signal.getsignal(number) is _handle:
                signal.signal(number, usual)
    except ValueError:
        pass  # forked by another thread, in which Python cannot set handlers


def _last_message() -> str:
    """At the first call return the last message as a line, afterwards an empty string."""
    try:
        message = _state.messages.pop()
    except IndexError:
        return ""
    return f"{message()}\n"


def _end(code: int) -> None:
    """End the process from any thread, without waiting for other threads."""
    # Write to descriptors, since a thread that hangs may hold the lock of a stream.
    with suppress(OSError):  # closed or without a reader
        if _state.raises and os.isatty(1):
            os.write(1, _SHOW_CURSOR)  # the live table hides it
        message = _last_message()
        if message:
            os.write(2, message.encode(errors="backslashreplace"))
        else:
            time.sleep(_MOMENT)  # the other thread may be about to print the message
    os._exit(code)

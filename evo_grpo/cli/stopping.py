"""Ctrl-C and SIGTERM: a command says how to go on and ends; asked a second time, it ends at once.

Outside `interruptible` nothing has to be put in order, and either signal ends the process where it
stands. Within, the first one raises in the main thread, as Ctrl-C always does in Python, and the
command has `SECONDS_TO_END` to end. Python runs a handler only when the main thread comes back to
its bytecode, which a long backward pass does late and a function that hangs in C never. So a thread
keeps the time and hears a second signal: Python writes the number of each into a pipe at once.

It belongs to the command alone: `evo_grpo.run` in a program of the user's leaves its signals be. It
is the first module that the command loads, so it imports hardly anything: until `install` has run,
Ctrl-C is a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import contextmanager, suppress

# Python's own, in whose place stands an error while a reward function runs.
from os import _exit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import FrameType

INTERRUPTED = 130
TERMINATED = 143
SECONDS_TO_END = 9.0
"""From the first signal until the process is ended, wherever it is: with a second to spare of the
ten that those wait who send a SIGTERM and then kill."""

_CODES = {int(signal.SIGINT): INTERRUPTED, int(signal.SIGTERM): TERMINATED}
_SWALLOWED = 0
"""In the pipe, where no signal has this number: the interrupt was lost, and is to be sent again."""
_MOMENT = 0.05
_SHOW_CURSOR = b"\x1b[?25h\n"


class Terminated(KeyboardInterrupt):
    """SIGTERM came: what lets Ctrl-C pass lets this pass too."""


def _stopped() -> str:
    return "stopped"


class _State:
    """What is known in this process; signals belong to all of it.

    Attributes:
        signal: The first that came, None before.
        raises: Whether the first signal raises, so that something can be put in order.
        say: Returns how to go on; the list is empty once that was said.
        again: Whether the next call of the handler repeats an interrupt that was lost.
        repeats: Signals on their way that repeat one, and are no second one.
        wake: Where to write to the thread that watches, None without one.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.raises = False
        self.say: list[Callable[[], str]] = [_stopped]
        self.again = False
        self.repeats = 0
        self.wake: int | None = None


_state = _State()


def install() -> None:
    """Handle both signals from now on; call it from the main thread, before all else."""
    for number in _CODES:
        # Ignored by whoever started the process, as `nohup` does: that stays so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle)
    import threading  # only now: see the docstring of the module

    # A standard stream that was closed (`>&-`) must not become the pipe: others print into it.
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(spare)
    heard, _state.wake = os.pipe()
    os.set_blocking(_state.wake, False)
    signal.set_wakeup_fd(_state.wake, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(heard,), name="signals", daemon=True).start()
    sys.unraisablehook = _report_unraisable
    os.register_at_fork(after_in_child=_leave_to_child)


def leave() -> None:
    """End with the command: what comes while Python takes itself apart ends the process at once.

    The thread still watches that this comes to an end.
    """
    for number in _CODES:
        if signal.getsignal(number) is _handle:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def interruptible(say: Callable[[], str]) -> Generator[Callable[[], None]]:
    """Put in order what a signal interrupts; then say how to go on, and exit with 130 or 143.

    `say` returns how to go on, one printable line; another thread may call it, while the work
    hangs.

    Yields:
        A function to call when the work begins. Before, a signal still ends the process at once:
        libraries that are interrupted while they load print tracebacks, or swallow the interrupt.
    """
    _state.say = [say]
    try:
        yield _begin
    except (Exception, KeyboardInterrupt) as error:
        # Some libraries turn the interrupt into an error of their own.
        if _state.signal is None and not isinstance(error, KeyboardInterrupt):
            raise
        if sys.stderr is not None:  # as after `2>&-`
            sys.stderr.write(_last_words())
        sys.exit(_code(error))
    finally:
        _state.raises = False
        if _state.say:
            _state.say = [_stopped]


def _begin() -> None:
    _state.raises = True


def _code(error: BaseException) -> int:
    if _state.signal is not None:
        return _CODES[_state.signal]
    return TERMINATED if isinstance(error, Terminated) else INTERRUPTED


def _handle(number: int, frame: FrameType | None) -> None:
    """Raise in the main thread; a second signal, or one with nothing to put in order, ends it."""
    del frame
    if _state.again and _state.signal is not None:
        _state.again = False
        if not _state.raises:
            return
        number = _state.signal
    elif _state.signal is not None or not _state.raises:
        _end(_CODES[number])
    _state.signal = number
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def _watch(heard: int) -> None:
    """Read the signals' numbers; end the process on the second, or when its time is over."""
    import select
    import threading

    first: int | None = None
    deadline = 0.0
    while True:
        left = None if first is None else max(0.0, deadline - time.monotonic())
        if not select.select([heard], [], [], left)[0] and first is not None:
            _end(_CODES[first])
        for number in os.read(heard, 64):
            if number == _SWALLOWED and first is not None:
                time.sleep(_MOMENT)  # until the main thread can be interrupted again
                _state.again, _state.repeats = True, _state.repeats + 1
                signal.pthread_kill(threading.main_thread().ident or 0, first)
            elif number not in _CODES or signal.getsignal(number) is not _handle:
                continue  # of a reward function's watch, or taken over by code of the user's
            elif _state.repeats:
                _state.repeats -= 1
            elif first is None and _state.raises:
                first, deadline = number, time.monotonic() + SECONDS_TO_END
            else:
                _end(_CODES[number])


def _report_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Send an interrupt again that came where Python can raise nothing, as in a `__del__`."""
    lost = issubclass(unraisable.exc_type, KeyboardInterrupt)
    if lost and _state.signal is not None and _state.wake is not None:
        os.write(_state.wake, bytes([_SWALLOWED]))
    else:
        sys.__unraisablehook__(unraisable)


def _leave_to_child() -> None:
    """Give a fork Python's own handlers: a signal to it is none to its parent."""
    _state.wake = None
    try:
        signal.set_wakeup_fd(-1)
        for number, usual in (
            (signal.SIGINT, signal.default_int_handler),
            (signal.SIGTERM, signal.SIG_DFL),
        ):
            if signal.getsignal(number) is _handle:
                signal.signal(number, usual)
    except ValueError:
        pass  # forked by a thread, in which Python sets no handlers


def _last_words() -> str:
    """Return how to go on, as a line; an empty string where another thread or time said it."""
    try:
        say = _state.say.pop()
    except IndexError:
        return ""
    return f"{say()}\n"


def _end(code: int) -> None:
    """End the process from any thread, without waiting for another."""
    # To the descriptors: the thread that hangs may hold the lock of a stream.
    with suppress(OSError):  # closed, or nobody reads it any more
        if _state.raises and os.isatty(1):
            os.write(1, _SHOW_CURSOR)  # which the live table hides
        words = _last_words()
        if words:
            os.write(2, words.encode(errors="backslashreplace"))
        else:
            time.sleep(_MOMENT)  # perhaps the other thread is just about to say it
    _exit(code)

"""Ranks over torch.distributed, started by accelerate, torchrun, Slurm or `evo-grpo run --nproc`.

Messages go through a gloo group of their own, on the CPU, whatever the devices talk with: they are
kilobytes, and gloo notices at once when a process is gone. A thread waits for each of them, so that
the rank can leave when `evo_grpo.population.ranks.heartbeat` finds another one lost.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from evo_grpo.errors import ConfigError, EvoGrpoError, LostRankError, OtherRankError
from evo_grpo.population.ranks.heartbeat import THREAD, Heartbeat, limit_of_silence
from evo_grpo.population.ranks.lockstep import Lockstep
from evo_grpo.population.ranks.team import Team, announced
from evo_grpo.printable import raised

T = TypeVar("T")
#: Ranks wait for each other as long as a round takes; the heartbeat says when one is lost.
PATIENCE = timedelta(days=365)
#: How long the ranks may take to start.
TO_MEET = timedelta(minutes=10)
#: How long a rank that failed before waits to tell the others.
TO_TELL = timedelta(minutes=1)


_THREAD = "exchange between ranks"
#: Of the process, as the group of torch.distributed is.
_heartbeat: Heartbeat | None = None


@final
class Ranks(Team):
    """The ranks of a run in several processes, which talk over a gloo group; see `Team`."""

    def __init__(self, rank: int, size: int, group: Any, heartbeat: Heartbeat) -> None:  # noqa: ANN401 -- torch's group
        self.rank = rank
        self.size = size
        self._group = group
        self._heartbeat = heartbeat
        self._exchanges = 0
        self._lockstep: Lockstep | None = None
        self._broken = False

    def gather(self, work: Callable[[], T]) -> list[T]:
        """See `Team`."""
        part, error = _attempt(work)
        self._let_others_finish(error)
        parts: list[Any] = [None] * self.size
        mine = (part, _told(error))
        self._meet("gather", lambda: dist.all_gather_object(parts, mine, group=self._group), error)
        self._agree([said for _, said in parts], error)
        return [found for found, _ in parts]

    def lead(self, work: Callable[[], T]) -> T:
        """See `Team`."""
        part, error = _attempt(work) if self.rank == 0 else (None, None)
        self._let_others_finish(error)
        message: list[Any] = [(part, _told(error))]
        self._meet(
            "lead", lambda: dist.broadcast_object_list(message, src=0, group=self._group), error
        )
        ((found, said),) = message
        self._agree([said], error)
        return found

    def send(self, values: object, to: int) -> None:
        """See `Team`."""
        self._meet("send", lambda: dist.send_object_list([values], to, group=self._group), other=to)

    def receive(self, source: int) -> Any:  # noqa: ANN401 -- what was sent
        """See `Team`."""
        found: list[Any] = [None]
        self._meet(
            "receive",
            lambda: dist.recv_object_list(found, source, group=self._group),
            other=source,
        )
        return found[0]

    def in_lockstep(
        self, join_forward: Callable[[], None], join_backward: Callable[[], None]
    ) -> Lockstep:
        """See `Team`."""
        named = self._together(None)
        self._lockstep = Lockstep(self._highest, named(join_forward), named(join_backward))
        return self._lockstep

    @contextmanager
    def exchange(self) -> Generator[None]:
        """See `Team`."""
        self._broken = True
        try:
            yield
        except (OtherRankError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise self._other_ended(error) if _of_exchange(error) else error from error
        self._broken = False

    def _highest(self, number: int) -> int:
        told = torch.tensor([number])
        self._meet("passes", lambda: dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group))
        return int(told)

    def _meet(
        self,
        kind: str,
        exchange: Callable[[], object],
        error: BaseException | None = None,
        *,
        other: int | None = None,
    ) -> None:
        """Exchange a message with other ranks, which may come late, unless one of them is lost.

        All ranks that take part come to the same `kind`; `other` is the one rank with which it is,
        None for all. An error of this rank's own is raised where the message does not arrive.
        """
        if other is None:
            self._exchanges += 1
        result: Future[object] = Future()

        def run() -> None:
            try:
                result.set_result(exchange())
            except BaseException as error:
                result.set_exception(error)

        broken, self._broken = self._broken, True  # by Ctrl-C too: half a message was exchanged
        threading.Thread(target=run, name=_THREAD, daemon=True).start()
        place = (kind, self._exchanges, other)
        why = self._heartbeat.wait(lambda s: bool(wait_for([result], s).done), place)
        if why:
            raise self._lost(why)
        with self._together(error):
            result.result()
        self._broken = broken

    def _let_others_finish(self, error: BaseException | None) -> None:
        """Take part in the passes of ranks that still work, before all meet.

        After an error in the middle of a pass this rank cannot: it ends, and the others notice.
        """
        broken = self._broken or (self._lockstep is not None and self._lockstep.broken)
        if error is not None and broken:
            raise self._other_ended(error) if _of_exchange(error) else error
        if self._lockstep is not None:
            self._lockstep.idle()

    @contextmanager
    def _together(self, error: BaseException | None) -> Generator[None]:
        """Name what happened where a message does not arrive."""
        try:
            yield
        except (OtherRankError, torch.OutOfMemoryError):
            raise
        except RuntimeError as failure:
            raise error or self._other_ended(failure) from failure

    def _other_ended(self, failure: BaseException) -> LostRankError:
        why = self._heartbeat.closed() or f"another rank has ended ({raised(failure)})"
        return self._lost(why)

    def _lost(self, why: str) -> LostRankError:
        return LostRankError(
            f"rank {self.rank} of {self.size} ends, since {why}; finished rounds are in the run "
            "folder; go on with: evo-grpo resume RUN"
        )

    def _agree(self, told: list[str | None], error: BaseException | None) -> None:
        """Raise on all ranks where one of them failed, so that none goes on without it."""
        if error is not None:
            raise error
        for rank, said in enumerate(told):
            if said is not None:
                raise OtherRankError(f"rank {rank} of {self.size} failed: {said}")


def _attempt(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:  # Ctrl-C too: the others wait for an answer
        return None, error


def _of_exchange(error: BaseException) -> bool:
    """Return whether an error in the middle of a pass came from the exchange between ranks."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )


def _told(error: BaseException | None) -> str | None:
    return None if error is None else raised(error)


def end_process(code: int) -> None:
    """End this process now with an exit code, where a thread of it may still wait for other ranks.

    The thread comes back when those end. If Python takes itself apart at that moment, the process
    aborts, and its exit code is lost. That of the heartbeat may wait for the store, too.
    """
    if _is_waiting():
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage] -- os._exit leaves them out
        _flush_and_exit(code)


@atexit.register
def _end_failed() -> None:
    """Do the same at the end of a script whose error nobody caught."""
    if _is_waiting() and hasattr(sys, "last_type"):
        _flush_and_exit(1)


def _is_waiting() -> bool:
    return any(thread.name in (_THREAD, THREAD) for thread in threading.enumerate())


def _flush_and_exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextmanager
def telling_others() -> Generator[None]:
    """Tell the other ranks of an error before this one has met them; they would wait for it."""
    try:
        yield
    except EvoGrpoError as error:
        if announced() and not dist.is_initialized():
            with suppress(ConfigError):  # nobody is there
                _tell(error)
        raise


def _tell(error: EvoGrpoError) -> None:
    def fail() -> None:
        raise error

    find_team(TO_TELL).gather(fail)


def find_team(to_meet: timedelta = TO_MEET) -> Team:
    """Return the ranks that this process was started with; joins them at the first call.

    Raises:
        ConfigError: The others do not start within `to_meet` or cannot be reached, or an address or
            a number is missing.
    """
    if not announced():
        return Team()
    if not dist.is_initialized():
        try:
            _join(to_meet)
        except (RuntimeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"ranks: expected {os.environ.get('WORLD_SIZE')} processes that reach each other "
                f"at MASTER_ADDR={os.environ.get('MASTER_ADDR')} "
                f"MASTER_PORT={os.environ.get('MASTER_PORT')}, got: {raised(error)}; choose a "
                "free port, and start all of them with one launcher: evo-grpo run --nproc, "
                "torchrun or accelerate launch"
            ) from error
    global _heartbeat
    begins = _heartbeat is None
    if _heartbeat is None:
        # The one over which the ranks have met: no other port, and it has no public name. A client
        # of its own, since torch holds the other one while it waits for a rank.
        store: Any = distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage] -- no public one
        store = distributed_c10d.PrefixStore("evo-grpo", store.clone())
        rank, size = dist.get_rank(), dist.get_world_size()
        _heartbeat = Heartbeat(rank, size, store, limit_of_silence())
    # All ranks have written their first sign once they have this group.
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    if begins:
        _heartbeat.start()
    return Ranks(dist.get_rank(), dist.get_world_size(), group, _heartbeat)


def _join(to_meet: timedelta) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    # Not by accelerate's PartialState, which looks for MPI first on a CPU and sets the threads; it
    # takes over a group that is there. Nothing goes from device to device, so there is no NCCL.
    dist.init_process_group("gloo", timeout=to_meet)

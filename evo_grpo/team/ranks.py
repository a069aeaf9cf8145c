"""Ranks over torch.distributed, started by accelerate, torchrun, Slurm or `evo-grpo run --nproc`.

Messages go through a gloo group of their own, on the CPU, whatever the devices talk with: they are
kilobytes, and gloo notices at once when a process is gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from safetensors.torch import load, save

from evo_grpo.errors import ConfigError, OtherRankError
from evo_grpo.printable import raised
from evo_grpo.team.lockstep import Lockstep
from evo_grpo.team.team import Alone, Team

T = TypeVar("T")
#: Ranks wait for each other as long as a round takes; one that is gone is noticed at once.
PATIENCE = timedelta(days=2)
#: How long the ranks may take to start.
TO_MEET = timedelta(minutes=10)


@final
class Ranks:
    """The ranks of a run in several processes; see `Team`.

    Args:
        rank: Number of this process.
        size: How many there are.
        group: Over which they talk.
    """

    def __init__(self, rank: int, size: int, group: Any) -> None:  # noqa: ANN401 -- torch's group
        self.rank = rank
        self.size = size
        self._group = group
        self._lockstep: Lockstep | None = None
        self._broken = False

    def gather(self, work: Callable[[], T]) -> list[T]:
        """See `Team`."""
        part, error = _attempt(work)
        self._let_others_finish(error)
        parts: list[Any] = [None] * self.size
        with self._together(error):
            dist.all_gather_object(parts, (part, _told(error)), group=self._group)
        self._agree([said for _, said in parts], error)
        return [found for found, _ in parts]

    def lead(self, work: Callable[[], T]) -> T:
        """See `Team`."""
        part, error = _attempt(work) if self.rank == 0 else (None, None)
        self._let_others_finish(error)
        message: list[Any] = [(part, _told(error))]
        with self._together(error):
            dist.broadcast_object_list(message, src=0, group=self._group)
        ((found, said),) = message
        self._agree([said], error)
        return found

    def send(self, tensors: dict[str, Any], to: int) -> None:
        """See `Team`."""
        data = torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)
        with self._together(None):
            dist.send(torch.tensor([len(data)]), dst=to, group=self._group)
            dist.send(data, dst=to, group=self._group)

    def receive(self, source: int) -> dict[str, Any]:
        """See `Team`."""
        length = torch.zeros(1, dtype=torch.int64)
        with self._together(None):
            dist.recv(length, src=source, group=self._group)
            data = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(data, src=source, group=self._group)
        return load(data.numpy().tobytes())

    def in_lockstep(
        self, join_forward: Callable[[], None], join_backward: Callable[[], None]
    ) -> Lockstep:
        """See `Team`."""
        self._lockstep = Lockstep(
            self._highest, self._exchanging(join_forward), self._exchanging(join_backward)
        )
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

    def _exchanging(self, join: Callable[[], None]) -> Callable[[], None]:
        def named() -> None:
            with self._together(None):
                join()

        return named

    def _highest(self, number: int) -> int:
        told = torch.tensor([number])
        with self._together(None):
            dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group)
        return int(told)

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

    def _other_ended(self, failure: BaseException) -> OtherRankError:
        return OtherRankError(
            f"rank {self.rank} of {self.size}: another rank has ended, so this one ends too "
            f"({raised(failure)}); see its own message; go on with: evo-grpo resume RUN"
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


def announced() -> bool:
    """Return whether this process was started as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def find_team() -> Team:
    """Return the ranks that this process was started with; joins them at the first call.

    Raises:
        ConfigError: The others cannot be reached, or an address or a number is missing.
    """
    if not announced():
        return Alone()
    if not dist.is_initialized():
        try:
            _join()
        except (RuntimeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"ranks: expected {os.environ.get('WORLD_SIZE')} processes that reach each other "
                f"at MASTER_ADDR={os.environ.get('MASTER_ADDR')} "
                f"MASTER_PORT={os.environ.get('MASTER_PORT')}, got: {raised(error)}; choose a "
                "free port, and start all of them with one launcher: evo-grpo run --nproc, "
                "torchrun or accelerate launch"
            ) from error
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    return Ranks(dist.get_rank(), dist.get_world_size(), group)


def _join() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    # Not by accelerate's PartialState, which looks for MPI first on a CPU and sets the threads; it
    # takes over a group that is there. Nothing goes from device to device, so there is no NCCL.
    dist.init_process_group("gloo", timeout=TO_MEET)

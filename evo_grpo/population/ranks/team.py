"""Defines the team of ranks of a run: exchanges of messages, division of agents, joint passes.

This module does not import torch, so that the command line can call `is_one_of_several`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Any, TypeVar, cast, final

from evo_grpo.envs.rewards.functions import Board
from evo_grpo.errors import RunFailedError

STORE = "EVO_GRPO_STORE"
"""Environment variable with the descriptor of the socket on which the first rank of `--nproc` is to
listen; the launcher has bound it."""

T = TypeVar("T")
R = TypeVar("R")


def is_one_of_several() -> bool:
    """Return whether this process was started as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_silent_rank() -> bool:
    """Return whether this process is a rank without output; only the first rank has output."""
    return is_one_of_several() and int(os.environ.get("RANK", "0")) > 0


class Team:
    """The ranks of a run. This class is for a single process; `Ranks` is for several.

    All ranks make the same exchanges in the same order. Between two exchanges each rank works
    independently, and may run any number of passes over a divided base. `rank` is the number of
    this process (0-based), `size` the number of processes.
    """

    rank: int = 0
    size: int = 1

    def agree(self, part: T, decide: Callable[[list[T]], R]) -> R:
        """Return, on every rank, the decision of the first rank from the parts of all ranks.

        `part` and the decision are pickled. Only the first rank calls `decide`, with all parts in
        the order of the ranks; `decide` must not run passes over a divided base, because the other
        ranks wait. Raises errors of `decide`, and OtherRankError if another rank failed or died.
        """
        return decide([part])

    @final
    def gather(self, part: T) -> list[T]:
        """Return the parts of all ranks, in the order of the ranks, on every rank."""
        return self.agree(part, lambda parts: parts)

    @final
    def first(self, value: T) -> T:
        """Return the value of the first rank on every rank; ignore the values of other ranks."""
        part = value if self.rank == 0 else None
        return self.agree(part, lambda parts: cast("T", parts[0]))

    @final
    def wait_for_all(self) -> None:
        """Wait until every rank has made this call without an error."""
        self.agree(None, lambda _: None)

    def sharing_errors(self) -> AbstractContextManager[None]:
        """Return a context that sends an error of this rank to the other ranks, and raises it.

        Other ranks raise `OtherRankError` at their next exchange.
        """
        return nullcontext()

    def send(self, values: object, to: int) -> None:
        """Send a value, pickled except for its CPU tensors, to a rank that calls `receive`."""
        raise AssertionError(f"rank {to} is not the only one of this run")

    def receive(self, source: int) -> Any:  # noqa: ANN401 -- what was sent
        """Return the value that a rank sends."""
        raise AssertionError(f"rank {source} is not the only one of this run")

    def board(self) -> Board | None:
        """Return a new board, on which all ranks read and write small texts; None for one process.

        All ranks call this equally often. A board may be used at any time, in any thread.
        """
        return None

    def in_lockstep(
        self, join_forward: Callable[[], None], join_backward: Callable[[], None]
    ) -> Lockstep:
        """Return the object that runs all later passes of this rank.

        All ranks call this with equal arguments. A rank that waits at an exchange takes part in the
        passes of other ranks with `join_forward` and `join_backward`, which compute nothing.
        """
        return Lockstep(lambda number: number, join_forward, join_backward)

    def exchange(self) -> AbstractContextManager[None]:
        """Return a context in which other code exchanges tensors between all ranks.

        An error in the context ends this rank, because the other ranks wait for its tensors.
        """
        return nullcontext()


def deal(agents: Sequence[T], shards: int) -> tuple[tuple[T, ...], ...]:
    """Distribute agents among `shards` >= 1 shards, in order and as evenly as possible.

    The agents of a shard generate and learn in one batch, which affects how sums are rounded. The
    number of shards is fixed for a run, so any number of ranks gives the same result. The first
    shards are larger; with fewer agents than shards, the last shards are empty.
    """
    least, remainder = divmod(len(agents), shards)
    ends = accumulate((least + (number < remainder) for number in range(shards)), initial=0)
    return tuple(tuple(agents[start:end]) for start, end in pairwise(ends))


def order_transfers(transfers: Iterable[T], ends: Callable[[T], tuple[int, int]]) -> list[T]:
    """Order transfers between ranks so that many run at the same time.

    Every rank goes through the transfers in the returned order, and in each transfer of its own it
    waits for the other rank. Therefore transfers are divided into consecutive groups in which no
    rank has two transfers, and each transfer is put into the earliest possible group. `ends`
    returns the two ranks of a transfer; a transfer within a rank never waits.
    """
    groups: list[set[int]] = []
    numbered: list[tuple[int, T]] = []
    for transfer in transfers:
        busy = set(ends(transfer))
        if len(busy) == 1:
            busy = set[int]()
        number = next((n for n, group in enumerate(groups) if not group & busy), len(groups))
        if number == len(groups):
            groups.append(set())
        groups[number] |= busy
        numbered.append((number, transfer))
    return [transfer for _, transfer in sorted(numbered, key=lambda pair: pair[0])]


class Pass(IntEnum):
    """The kinds of passes. If ranks request different kinds, the kind of greatest value runs first.

    Forwards therefore run before a backward, and all ranks run the costly backward together. IDLE
    requests no pass.
    """

    IDLE = 0
    BACKWARD = 1
    FORWARD = 2


@final
class Lockstep:
    """Runs the passes of one rank over a divided base in lockstep with those of the other ranks.

    A divided base is assembled layer by layer in every pass, which requires all ranks. Ranks have
    different numbers of passes, because completions differ in length and rows in number, and a
    single rank may evaluate alone. So before a pass the ranks agree on its kind. Ranks that
    requested this kind compute; other ranks only provide their part of the base.

    `highest` sends a number to all ranks, and returns the highest that any rank sent.
    `join_forward` and `join_backward` take part in a pass of other ranks without computing
    anything. After an error of this rank in a pass, `broken` is true, and no exchange is possible.
    """

    def __init__(
        self,
        highest: Callable[[int], int],
        join_forward: Callable[[], None],
        join_backward: Callable[[], None],
    ) -> None:
        self._highest = highest
        self._join = {Pass.FORWARD: join_forward, Pass.BACKWARD: join_backward}
        self.broken = False

    def forward(self) -> AbstractContextManager[None]:
        """Return a context for a forward; on entry, first take part in passes of other ranks."""
        return self._pass(Pass.FORWARD)

    def backward(self) -> AbstractContextManager[None]:
        """Return a context for a backward; on entry, first take part in passes of other ranks."""
        return self._pass(Pass.BACKWARD)

    def idle(self) -> None:
        """Take part in the passes of other ranks until none requests one."""
        with self._pass(Pass.IDLE):
            pass

    @contextmanager
    def _pass(self, kind: Pass) -> Generator[None]:
        """Return a context for a pass of a kind; after an error in the pass, `broken` is true."""
        if self.broken:
            raise RunFailedError(
                "engine.base: expected every pass over the sharded base to be finished by all "
                "ranks, got an error in the middle of one; continue with: evo-grpo resume RUN"
            )
        self.broken = True
        while (coming := self._highest(kind)) != kind:
            self._join[Pass(coming)]()
        yield
        self.broken = False

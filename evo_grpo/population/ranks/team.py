"""Defines the team of ranks, the processes of a run, for the case of a single process.

This module does not import torch, so that the command line can call `is_one_of_several`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from evo_grpo.envs.rewards.scorer import Board
from evo_grpo.population.ranks.lockstep import Lockstep

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
    """The ranks of a run: this class for a single process, `Ranks` for several.

    All ranks make the same exchanges in the same order. Between two exchanges each rank works
    independently, and may run any number of passes over a divided base. `rank` is the number of
    this process (0-based), `size` the number of processes.
    """

    rank: int = 0
    size: int = 1

    def agree(self, part: T, decide: Callable[[list[T]], R]) -> R:
        """Return, on every rank, the decision of the first rank from the parts of all ranks.

        `part` and the decision are pickled. Only the first rank calls `decide`, with all parts in
        the order of the ranks; it must not run passes over a divided base, since the other ranks
        wait.

        Raises:
            OtherRankError: Another rank failed before the exchange or in `decide`, or died.
            BaseException: Raised by `decide`, on the first rank.
        """
        return decide([part])

    def gather(self, part: T) -> list[T]:
        """Return the parts of all ranks, in the order of the ranks, on every rank."""
        return [part]

    def first(self, value: T) -> T:
        """Return the value of the first rank on every rank; ignore the values of other ranks."""
        return value

    def wait_for_all(self) -> None:
        """Wait until every rank has made this call without an error."""

    def sharing_errors(self) -> AbstractContextManager[None]:
        """Return a context that sends an error of this rank to the others before it is raised.

        The others raise `OtherRankError` at their next exchange.
        """
        return nullcontext()

    def send(self, values: object, to: int) -> None:
        """Send a value, pickled except for its CPU tensors, to a rank that calls `receive`."""
        raise AssertionError(f"rank {to} is not the only one of this run")

    def receive(self, source: int) -> Any:  # noqa: ANN401 -- what was sent
        """Return the value that a rank sends."""
        raise AssertionError(f"rank {source} is not the only one of this run")

    def board(self) -> Board | None:
        """Return a new board for small texts of all ranks, None for one process.

        All ranks call this equally often. A rank may use a board at any time, in any thread.
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

"""A task as plain values: rows, how a row becomes a prompt, what scores a completion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast, overload

from evo_grpo.envs.rewards.functions import RewardFunction

Row = Mapping[str, Any]
Split = Literal["train", "validation", "test"]

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
DEFAULT_MAX_OUTPUT_TOKENS = 32


class LaterRows(Sequence[Row]):
    """Rows that are made when the first of them is asked for; how many there are is known before.

    Args:
        count: Number of rows.
        make: Makes them all; called once.
    """

    def __init__(self, count: int, make: Callable[[], Sequence[Row]]) -> None:
        self._count = count
        self._make = make

    @cached_property
    def _rows(self) -> Sequence[Row]:
        return self._make()

    def __len__(self) -> int:
        """Return how many there are; makes none."""
        return self._count

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        """Return a row, or several."""
        return self._rows[index]

    def __eq__(self, other: object) -> bool:
        """Compare the rows, as lists do."""
        return isinstance(other, Sequence) and list(self) == list(cast("Sequence[Row]", other))

    __hash__ = None  # pyright: ignore[reportAssignmentType] -- as of a list: rows are mutable

    def __repr__(self) -> str:
        """Show how many rows there are; makes none."""
        return f"LaterRows({self._count} rows)"


@dataclass(frozen=True)
class Task:
    r"""What to learn, before any tokenizer is known.

    Attributes:
        name: How messages and records call it.
        splits: Rows of train (learned from), validation (selection) and test (judged once, at the
            end).
        rewards: The reward functions, at least one.
        prompt: A raw template such as "{question}\nA:", or None.
        conversation: Messages with templates as content, sent through the tokenizer's chat
            template, or None.
        max_output_tokens: Hint: tokens that hold a usual answer, its end token included, >= 1.
    """

    name: str
    splits: Mapping[Split, Sequence[Row]]
    rewards: tuple[RewardFunction, ...]
    prompt: str | None = None
    conversation: tuple[Mapping[str, str], ...] | None = None
    max_output_tokens: int = DEFAULT_MAX_OUTPUT_TOKENS

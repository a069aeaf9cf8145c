"""Defines `Task`: rows, prompt template and reward functions, without a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from evo_grpo.envs.messages import listed
from evo_grpo.envs.rewards.functions import RewardFunction
from evo_grpo.errors import ConfigError
from evo_grpo.settings.algorithm import DEFAULT_OUTPUT_TOKENS
from evo_grpo.settings.env import RewardCalls, ThinkingTags, TooLong

#: One row of a dataset: column -> value.
DatasetRow = Mapping[str, Any]
RawTemplate = str | tuple[Mapping[str, str], ...]
"""A raw template, or the messages of a conversation."""
Split = Literal["train", "validation", "test"]

SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class LazyRows(Sequence[DatasetRow]):
    """Rows of a known number that are built on the first access."""

    def __init__(self, count: int, make: Callable[[], Sequence[DatasetRow]]) -> None:
        self._count = count
        self._made = cache(make)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 -- a row, or several of a slice
        return self._made()[index]


@dataclass(frozen=True)
class Task:
    r"""A task, independent of a tokenizer: rows, template and reward functions.

    Attributes:
        name: Name in messages and records.
        splits: Rows of train (learned from), validation (selection) and test (final evaluation).
        rewards: The reward functions, at least one.
        prompt: A raw template such as "{question}\nA:", or None.
        conversation: Messages with templates as content, for the chat template, or None.
        max_output_tokens: Tokens of a usual answer with its end token, >= 1; a hint.
        calls: How the reward functions are called.
        keywords: Keyword arguments of the chat template.
        prompts: The templates of `env.prompts` by name, the first of which is `prompt` or
            `conversation`; empty if there is one template.
        thinking: The tags around the thinking part of a completion, which is not part of the
            answer; None if there is none.
        too_long: What happens to rows whose prompts leave no room for a completion.
    """

    name: str
    splits: Mapping[Split, Sequence[DatasetRow]]
    rewards: tuple[RewardFunction, ...]
    prompt: str | None = None
    conversation: tuple[Mapping[str, str], ...] | None = None
    max_output_tokens: int = DEFAULT_OUTPUT_TOKENS
    calls: RewardCalls = field(default_factory=RewardCalls)
    keywords: Mapping[str, Any] = field(default_factory=dict[str, Any])
    thinking: ThinkingTags | None = None
    prompts: Mapping[str, RawTemplate] = field(default_factory=dict[str, "RawTemplate"])
    too_long: TooLong = "error"

    def __post_init__(self) -> None:
        """Check that every split has rows, and that there is one template."""
        missing = [split for split in SPLITS if not self.splits.get(split)]
        if missing or (self.prompt is None) == (self.conversation is None):
            got = f"no rows for {listed(missing)}" if missing else "both or neither of the two"
            raise ConfigError(
                f"task {self.name!r}: expected rows for {listed(SPLITS)} and either a prompt or a "
                f"conversation, got {got}"
            )

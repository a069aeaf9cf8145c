"""A task as plain values: rows, how a row becomes a prompt, what scores a completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from evo_grpo.envs.rewards import RewardFunction

Row = Mapping[str, Any]
Split = Literal["train", "validation", "test"]

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
DEFAULT_MAX_OUTPUT_TOKENS = 32


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

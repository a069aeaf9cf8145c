"""Calls of reward functions that were written for TRL: `env.reward_style: trl`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evo_grpo.schema.validation import LARGEST_REWARD as LARGEST

PASSED = (
    *("completion_ids", "completions", "prompts"),
    *("log_extra", "log_metric", "trainer_state"),
)
"""What TRL passes beside the columns of the rows."""
_NO_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns that TRL does not pass on."""


@dataclass(frozen=True)
class TrainerState:
    """The supported part of TRL's `trainer_state`.

    Attributes:
        global_step: Number of training prompts before the call, divided by the prompts of a step; 0
            in evaluations and outside a run.
    """

    global_step: int


@dataclass(frozen=True)
class Samples:
    """Arguments of functions in TRL's style for B completions, beside texts and columns.

    Attributes:
        token_ids: Sampled ids of each completion, the end token included.
        messages: The conversation that each completion answers; None for a prompt of plain text.
        step: See `TrainerState`.
    """

    token_ids: Sequence[Sequence[int]]
    messages: Sequence[Sequence[Mapping[str, Any]] | None]
    step: int = 0


@dataclass
class Log:
    """The values that reward functions log with `log_metric`, by name."""

    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def log_metric(self, name: str, value: float) -> None:
        """Add a value of a metric."""
        self.values[str(name)].append(float(value))

    def log_extra(self, column: str, values: Sequence[object]) -> None:
        """Do nothing, because `completions/` has all columns and rewards."""

    def means(self) -> dict[str, float]:
        """Return the mean of the values of each name, without those beyond 1e15."""
        usable = {
            name: [n for n in values if abs(n) <= LARGEST] for name, values in self.values.items()
        }
        return {name: math.fsum(values) / len(values) for name, values in usable.items() if values}


def arguments(
    completions: Sequence[str],
    prompts: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    samples: Samples | None,
    log: Log,
) -> dict[str, Any]:
    """Return the keyword arguments of a call, as TRL 1.16 makes it: texts, or lists of messages."""
    trl_samples = samples or Samples([()] * len(completions), [None] * len(completions))
    chats = trl_samples.messages
    columns = dict.fromkeys(column for row in rows for column in row if column not in _NO_COLUMNS)
    return {
        **{column: [row.get(column) for row in rows] for column in columns},
        "prompts": [
            text if chat is None else [dict(message) for message in chat]
            for text, chat in zip(prompts, chats, strict=True)
        ],
        "completions": [
            text if chat is None else [{"role": "assistant", "content": text}]
            for text, chat in zip(completions, chats, strict=True)
        ],
        "completion_ids": [list(ids) for ids in trl_samples.token_ids],
        "trainer_state": TrainerState(trl_samples.step),
        "log_metric": log.log_metric,
        "log_extra": log.log_extra,
    }

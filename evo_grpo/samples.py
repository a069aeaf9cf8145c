"""What goes in and comes out of a rollout, as plain values: text and token ids, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One prompt of a batch.

    Attributes:
        index: Position in its split, stable over the run (0-based).
        text: The prompt after the conversation and chat templates.
        token_ids: The prompt's token ids, not padded, at least one.
        columns: The dataset row it came from; what reward functions receive by name.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Completion:
    """One sampled continuation of a prompt.

    Attributes:
        token_ids: Sampled ids, the end token included when it was sampled, never padding.
        text: Decoded text without special tokens.
        logprobs: Log-probability of each sampled token under logits / temperature (nats), one per
            id.
        ended: True when the end token was sampled; False when the length limit cut it.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    ended: bool


@dataclass(frozen=True)
class Group:
    """The G completions of one prompt by one agent.

    Attributes:
        agent: Slot of the agent (0-based).
        prompt: The prompt all completions continue.
        completions: G completions.
    """

    agent: int
    prompt: Prompt
    completions: tuple[Completion, ...]

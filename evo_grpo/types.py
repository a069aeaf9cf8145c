"""Plain values that cross stages: what a rollout takes and gives, and who an agent is; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Annotated, Any, NewType

from pydantic import BeforeValidator

Slot = NewType("Slot", int)
"""An agent's number within its population, >= 0: given once, kept for life, never reused. Records,
checkpoints and random streams know an agent by it."""

Position = NewType("Position", int)
"""The place of an agent in the sequence of those that play a round, 0 to N - 1. It lasts for the
round: only a selection and its plan speak of positions."""

Number = Annotated[float, BeforeValidator(lambda value: nan if value is None else value)]
"""A number that may be NaN, which is null in JSON."""

KEPT_SCORES = 100
"""Scores that an agent's history keeps, the latest: what is kept in memory and in every checkpoint
must not grow with its age. The records of a run have them all."""


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
            id; None where the engine's own numbers mean something else.
        ended: True when the end token was sampled, or what an engine was told to stop at; False
            when the length limit cut it.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...] | None
    ended: bool


@dataclass(frozen=True)
class CompletionGroup:
    """The G completions of one prompt by one agent.

    Attributes:
        agent: Slot of the agent (0-based).
        prompt: The prompt all completions continue.
        completions: G completions.
    """

    agent: int
    prompt: Prompt
    completions: tuple[Completion, ...]


@dataclass(frozen=True)
class Trajectory:
    """What one policy did from a start to its end: one completion, or an episode of many turns.

    Attributes:
        prompt: The text it began with.
        text: What followed: the completion, or the turns of the episode one below the other.
        token_ids: All token ids, the prompt's too, never padding; empty when `error` says why.
        mask: One per id, True where the policy sampled it (end tokens too), False for the prompt,
            the environment and the chat template.
        logprobs: Log-probability of each sampled token (nats), one per True in `mask`; None where
            the engine did not tell them for every token.
        ended: True when the last completion sampled the end token.
        turns: Completions in it, >= 1 unless `error`.
        end: Why it ended: "completion" after its only completion, or terminated, truncated,
            max_turns or context of an episode, or "error".
        error: Why it was dropped, empty when it was not: the environment raised.
    """

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...] | None
    ended: bool
    turns: int = 1
    end: str = "completion"
    error: str = ""

    @property
    def sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(self.mask)


@dataclass(frozen=True)
class Mutation:
    """How a member came to be.

    Attributes:
        op: "init" (first population), "clone" (copy of a parent), "mutate" (copy or survivor with
            changed values), "restore" (the best agent ever, at a lower lr) or "mean" (of the
            adapters of two parents). By hand: "steer-clone" (copy of an agent), "steer-set"
            (changed values, of a survivor or of a copy that selection made) or "steer-restore" (as
            "restore", then copied or changed by hand).
        changes: Parameter -> (old, new); clip pairs appear as clip_low and clip_high.
    """

    op: str = "init"
    # Both types are named so that a whole number is one still when it is read from a file.
    changes: Mapping[str, tuple[int | float, int | float]] = field(
        default_factory=dict[str, tuple[int | float, int | float]]
    )

    @property
    def restores(self) -> bool:
        """Whether the weights are those of the best agent ever, as it was when it was the best."""
        return self.op in ("restore", "steer-restore")


@dataclass(frozen=True)
class Member:
    """One life of an agent.

    Attributes:
        id: Never reused within a run.
        agent: The agent's number, which is its slot.
        parent: Member id it was copied from, or None in the first population.
        born: Round before which it was made (0-based).
        mutation: What made it.
        second_parent: Member id of the other parent of a mean, else None.
    """

    id: int
    agent: Slot
    parent: int | None = None
    born: int = 0
    mutation: Mutation = field(default_factory=Mutation)
    second_parent: int | None = None


@dataclass(frozen=True)
class Score:
    """Fitness of one agent in one round.

    Attributes:
        mean: Mean evaluation reward over prompts and samples.
        se: Standard error of the mean over prompts (samples of one prompt are averaged first); NaN
            from a single sample.
        n: Number of prompts.
        per_prompt: Mean reward of each prompt (NaN where all reward functions abstained), in the
            order all agents share; for paired
            comparison.
    """

    mean: Number
    se: Number
    n: int
    per_prompt: tuple[Number, ...] = ()


@dataclass(frozen=True)
class Decision:
    """What was decided about one agent between two rounds, and why.

    Attributes:
        kind: "copied" (took another agent's weights), "kept" (a copy was planned, but its parent
            cannot be told from this agent), "restored" (took those of the best agent ever),
            "collapsed" (can no longer learn), "left" (has no place in the next round), "steered"
            (what a person asked for was done), "refused" (it was not).
        agent: Whom it is about.
        other: The agent that it was compared with, None where it was compared with none.
        difference: Mean reward by which `other` is ahead, per shared prompt; NaN without one.
        error: Standard error of that mean, NaN from fewer than two prompts.
        prompts: Prompts that both answered.
        sentence: All that in plain words.
    """

    kind: str
    agent: Slot
    other: Slot | None
    difference: Number
    error: Number
    prompts: int
    sentence: str


@dataclass(frozen=True)
class Request:
    """What a person asks of a run while it trains.

    Attributes:
        id: By which it is known; requests are carried out in the order of their ids.
        op: "stop-agent", "clone", "set", "pause", "continue" or "stop-after-round".
        agent: The agent that is stopped, overwritten or changed; None where it is about none.
        source: The agent that is cloned, else None.
        values: Hyperparameter -> value, of a set; a clip pair is a list.
        after: The round (0-based) after which it may be carried out at the earliest: the one that
            was being played when it was asked for, or the last finished one where none was.
        asked: When, in seconds since 1970 (UTC); for people alone, since clocks differ and step.
    """

    id: str
    op: str
    agent: int | None = None
    source: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    after: int = 0
    asked: float = 0.0

    def __str__(self) -> str:
        """Return it as the command takes it."""
        agents = [self.source, self.agent] if self.op == "clone" else [self.agent]
        named = [str(agent) for agent in agents if agent is not None]
        values = [f"{name}={value}" for name, value in self.values.items()]
        return " ".join([self.op, *named, *values])


@dataclass(frozen=True)
class Steering:
    """What became of a request.

    Attributes:
        request: It.
        refused: Why it was not carried out, empty where it was.
    """

    request: Request
    refused: str = ""

"""Plain values that modules exchange: prompts, completions, members, scores; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, isnan, nan
from typing import Annotated, Any, NewType

from pydantic import BeforeValidator

Slot = NewType("Slot", int)
"""An agent's number within its population, >= 0: assigned once and never reused. Records,
checkpoints and random streams identify an agent by it."""

Position = NewType("Position", int)
"""The index of an agent among the N agents that play a round, 0 to N - 1. It is valid for that
round only; selections and their plans use positions."""

Number = Annotated[float, BeforeValidator(lambda value: nan if value is None else value)]
"""A number that may be NaN, which JSON stores as null."""

_Value = bool | int | float | str
# `int | float`, not `float`: an integer that is read back from a file stays an integer.

KEPT_SCORES = 100
"""Maximum number of scores in an agent's history, the latest; it bounds the agent's memory and
checkpoint. The records of a run have all scores."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a batch.

    Attributes:
        index: Position in its split, stable over the run (0-based).
        text: The prompt after the conversation and chat templates.
        token_ids: The prompt's token ids, not padded, at least one.
        columns: The dataset row of the prompt; reward functions receive its columns by name.
        step: Number of training prompts before this prompt, divided (//) by the prompts of a step;
            0 in an evaluation, and in tasks whose reward functions do not read the step.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    step: int = 0


@dataclass(frozen=True)
class Completion:
    """One sampled continuation of a prompt.

    Attributes:
        token_ids: Sampled ids without padding, including the end token if it was sampled.
        text: Decoded text without special tokens.
        logprobs: Log-probability of each sampled token under logits / temperature (nats), one per
            id; None if the engine does not return these.
        ended: True if the end token or a stop string ended the completion; False if the length
            limit did.
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
        prompt: The prompt of all completions.
        completions: G completions.
    """

    agent: int
    prompt: Prompt
    completions: tuple[Completion, ...]


@dataclass(frozen=True)
class Trajectory:
    """One completion, or one episode of several turns, by one policy.

    Attributes:
        prompt: Text of the first prompt.
        text: Text after the prompt: the completion, or the turns of the episode on separate lines.
        token_ids: All token ids including those of the prompt, without padding; empty if `error` is
            set.
        mask: One per id: True for ids that the policy sampled (including end tokens), False for ids
            of the prompt, the environment and the chat template.
        logprobs: Log-probability of each sampled token (nats), one per True in `mask`; None if the
            engine did not return them for every token.
        ended: True if an end token or a stop string ended the last completion.
        turns: Number of completions, >= 1 unless `error` is set.
        end: Reason for the end: "completion" for a single completion; "terminated", "truncated",
            "max_turns" or "context" for an episode; or "error".
        error: The environment's error because of which the trajectory was dropped, else empty.
        answer: The right answer in the dataset, for display; empty if there is none.
        row: The dataset row of the prompt; empty for an episode.
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
    answer: str = ""
    row: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(self.mask)


@dataclass(frozen=True)
class Mutation:
    """The operation that made a member.

    Attributes:
        op: "init" (first population), "clone" (copy of a parent), "mutate" (copy or survivor with
            changed values), "restore" (the best agent ever, at a lower lr) or "mean" (of the
            adapters of two parents, at the end). At the request of the user: "steer-clone" (copy of
            an agent), "steer-set" (survivor or copy with values that the user set) or
            "steer-restore" (copy of, or values set in, an agent restored after the same round).
        changes: Parameter -> (old, new); clip pairs appear as clip_low and clip_high.
    """

    op: str = "init"
    changes: Mapping[str, tuple[_Value, _Value]] = field(
        default_factory=dict[str, tuple[_Value, _Value]]
    )

    @property
    def restores(self) -> bool:
        """Whether the weights are copied from the archive, the best agent ever."""
        return self.op in ("restore", "steer-restore")


@dataclass(frozen=True)
class Member:
    """One life of an agent; a copy or a mutation begins the agent's next life.

    Attributes:
        id: Number of the member, never reused within a run.
        agent: Slot of the agent.
        parent: Id of the member that this one was copied from, or of a mean's better parent; None
            in the first population.
        born: First round that it plays (0-based).
        mutation: The operation that made the member.
        second_parent: Id of the other parent of a mean, else None.
    """

    id: int
    agent: Slot
    parent: int | None = None
    born: int = 0
    mutation: Mutation = field(default_factory=Mutation)
    second_parent: int | None = None


@dataclass(frozen=True)
class Objective:
    """The value of an objective other than fitness, of one agent in one round.

    Attributes:
        name: Name of the measure: a reward function or "tokens".
        minimize: Whether smaller values are better.
        mean: Mean over prompts, in units of the measure.
        se: Standard error of the mean over prompts; NaN for a single sample.
        per_prompt: Mean of each prompt, ordered as `Score.per_prompt`; NaN for a prompt without a
            value.
    """

    name: str
    minimize: bool
    mean: Number
    se: Number
    per_prompt: tuple[Number, ...] = ()

    @property
    def upward(self) -> Score:
        """The objective as a score to maximize: minimized values are negated."""
        prompts = sum(not isnan(value) for value in self.per_prompt)
        if not self.minimize:
            return Score(self.mean, self.se, prompts, self.per_prompt)
        return Score(-self.mean, self.se, prompts, tuple(-value for value in self.per_prompt))


@dataclass(frozen=True)
class RewardScore:
    """The unweighted mean of one reward function in an evaluation of one agent.

    Attributes:
        name: Name of the function.
        mean: Mean over prompts.
        se: Standard error of the mean over prompts; NaN for a single sample.
        n: Number of prompts on which the function did not abstain.
    """

    name: str
    mean: Number
    se: Number
    n: int


@dataclass(frozen=True)
class Score:
    """Fitness of one agent in one round.

    Attributes:
        mean: Mean evaluation reward over prompts and samples.
        se: Standard error of the mean over prompts (samples of one prompt are averaged first); NaN
            for a single sample.
        n: Number of prompts.
        per_prompt: Mean reward of each prompt, NaN if all reward functions abstained. All agents
            have the same prompts in the same order, so scores can be compared in pairs.
        further: The other objectives of `evolve.fitness.objectives`, of which fitness is the first;
            empty in a run with one objective.
        first_look: `per_prompt` of the first evaluation if racing evaluated the agent again, else
            empty.
        steps: Number of training steps whose rewards are in the score, 0 for an evaluation. If
            fitness is the mean reward of a round's training, `n` is the same number and
            `per_prompt` is empty. For a decision, `with_training` appends an entry for each step
            to `per_prompt` of an evaluation, and scales all entries.
        rewards: The score of each reward function in the first evaluation; empty without an
            evaluation, or if the environment does not name its functions.
    """

    mean: Number
    se: Number
    n: int
    per_prompt: tuple[Number, ...] = ()
    further: tuple[Objective, ...] = ()
    first_look: tuple[Number, ...] = ()
    steps: int = 0
    rewards: tuple[RewardScore, ...] = ()

    @property
    def goals(self) -> tuple[Score, ...]:
        """All objectives as scores to maximize; fitness is the first."""
        return (self, *(objective.upward for objective in self.further))

    @property
    def is_finite(self) -> bool:
        """Whether every objective is a finite number."""
        return all(isfinite(goal.mean) for goal in (self, *self.further))


@dataclass(frozen=True)
class Decision:
    """A decision about one agent between two rounds, and its reason.

    Attributes:
        kind: "copied" (took another agent's weights), "kept" (a copy was planned, but its parent is
            not significantly better than this agent), "restored" (took the weights of the best
            agent ever), "collapsed" (can no longer learn), "left" (plays no further round),
            "steered" (a request of the user was carried out), "refused" (a request was refused).
        agent: Slot of the agent.
        other: Slot of the agent with which `agent` was compared, None if with no agent.
        difference: Mean over shared prompts of the reward by which `other` is ahead; NaN without
            `other`.
        error: Standard error of `difference`; NaN for fewer than two prompts.
        prompts: Number of prompts that both agents answered.
        sentence: The decision in plain words.
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
    """A request of the user to a run that trains.

    Attributes:
        id: Unique id; requests are carried out in the order of their ids.
        op: "stop-agent", "clone", "set", "pause", "continue" or "stop-after-round".
        agent: The agent to stop, overwrite or change; None for an operation on the run.
        source: The agent to clone, else None.
        values: Hyperparameter -> value of "set"; a clip pair is a list.
        after: The round (0-based) after which the request may be carried out at the earliest: the
            round that was being played at the time of the request, else the last finished round.
        asked: Time of the request, in seconds since 1970 (UTC). For display only: clocks differ
            between machines and may be set back.
    """

    id: str
    op: str
    agent: int | None = None
    source: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    after: int = 0
    asked: float = 0.0

    def __str__(self) -> str:
        """Return the request as arguments of `evo-grpo steer`."""
        agents = [self.source, self.agent] if self.op == "clone" else [self.agent]
        numbers = [str(agent) for agent in agents if agent is not None]
        values = [f"{name}={value}" for name, value in self.values.items()]
        return " ".join([self.op, *numbers, *values])


@dataclass(frozen=True)
class RequestOutcome:
    """The outcome of a request.

    Attributes:
        request: The request.
        refused: Why the request was refused; empty if it was carried out.
    """

    request: Request
    refused: str = ""

"""The records of a run, as frozen values that JSON can hold: no torch, no pandas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any

from pydantic import AfterValidator, TypeAdapter

from evo_grpo.errors import RunDirError
from evo_grpo.record.files import plain_value
from evo_grpo.record.plain import CheckpointPath, RelativePath
from evo_grpo.schema.hparams import CLIP_ENDS, Hparams
from evo_grpo.schema.validated import validated
from evo_grpo.schema.validation import shown
from evo_grpo.types import Decision, Member, Mutation, Number, Score, Slot, Steering

_HYPERPARAMETERS = frozenset((*Hparams.model_fields, *CLIP_ENDS))


def _check_hyperparameter(name: str) -> str:
    if name not in _HYPERPARAMETERS:
        raise ValueError(f"expected names of hyperparameters, got {shown(name)}")
    return name


HyperparameterName = Annotated[str, AfterValidator(_check_hyperparameter)]
"""A hyperparameter, or an end of the clip range: tables and pages look values up by this name."""

#: Version of a line of rounds.jsonl. Lines of evo-grpo 0.1 carry none and count as version 1.
FORMAT = 4


@dataclass(frozen=True)
class SavedAgent:
    """A checkpoint as records name it; all None where none was written.

    Attributes:
        path: Its folder, relative to the run folder where it lies in one.
        adapter_sha256: Digest of the actor's safetensors.
        optimizer_sha256: Digest of optimizer.safetensors, None where none was saved.
    """

    path: str | None = None
    adapter_sha256: str | None = None
    optimizer_sha256: str | None = None


@dataclass(frozen=True)
class AgentRecord:
    """One agent in one round.

    Attributes:
        agent: The agent's number, which is its slot.
        member: Member id.
        parent: Parent member id, or None.
        round: 0-based round.
        state: "ok" or "failed" (its update or its evaluation was not finite).
        hparams: What it trained with this round.
        score: Its fitness, None when failed.
        metrics: Training means of the round: reward, kl, loss, zero_variance, clip_fraction,
            entropy, grad_norm, ...
        tokens: Tokens sampled by this agent in training, this round.
        wall_seconds: The round's wall time divided among agents by their share of tokens.
        checkpoint: Path relative to the run folder, or None.
        adapter_sha256: Digest of the actor's safetensors, or None.
        optimizer_sha256: Digest of optimizer.safetensors, or None where none was saved.
        mutation: What made the member.
        seed: Seed of the member's sampling stream this round.
        reason: Why it failed, empty when ok.
        step_rewards: Mean training reward of each step of the round, None where a step had none.
    """

    agent: Slot
    member: int
    parent: int | None
    round: int
    state: str
    hparams: Hparams
    score: Score | None
    metrics: Mapping[str, Number]
    tokens: int
    wall_seconds: float
    checkpoint: CheckpointPath | None = None
    adapter_sha256: str | None = None
    mutation: Mutation = field(default_factory=Mutation)
    seed: int = 0
    reason: str = ""
    optimizer_sha256: str | None = None
    step_rewards: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class RoundRecord:
    """One finished round: a line of rounds.jsonl.

    Attributes:
        round: 0-based.
        agents: One record per agent that played it, by slot.
        seconds: Phase -> wall seconds (generate, reward, learn, evaluate, evolve, checkpoint).
        members: The members that train in the NEXT round, by slot (the plan already applied); an
            agent of this round that has none among them leaves.
        next_hparams: Their hyperparameters, in the same order.
        mutable: Names of the hyperparameters that may mutate in this run, whether they have moved
            yet or not: the columns of its tables follow from the records alone.
        decisions: What was decided about the agents after the round, and why.
        starts: Training prompts, or episode seeds, that were handed out up to its end.
        evaluation_tokens: Tokens sampled to measure the agents' fitness after it.
        files: SHA-256 of each file that was written for it, by its path in the run folder; empty
            before they are written, and where none is.
        reduced: Settings of the engine that the device had no memory for, and what they were
            lowered to while the run went on; the least of all processes.
        started: When it began, in seconds since 1970 (UTC); None in records of earlier versions.
        ended: When it was over, likewise.
        steering: What a person asked for between it and the next round, in order, and what became
            of it; `members`, `next_hparams` and `decisions` have it in them.
        next_member: Member ids below it are taken; 0 where nobody asked for anything.
        stopped: Rules of population.stop that ended the run with it.
        went_on: Whether the run was given more rounds all the same.
    """

    round: int
    agents: tuple[AgentRecord, ...]
    seconds: Mapping[str, float]
    members: tuple[Member, ...] = ()
    next_hparams: tuple[Hparams, ...] = ()
    mutable: tuple[HyperparameterName, ...] = ()
    decisions: tuple[Decision, ...] = ()
    starts: int = 0
    evaluation_tokens: int = 0
    files: Mapping[RelativePath, str] = field(default_factory=dict[str, str])
    reduced: Mapping[str, int] = field(default_factory=dict[str, int])
    started: float | None = None
    ended: float | None = None
    steering: tuple[Steering, ...] = ()
    next_member: int = 0
    stopped: tuple[str, ...] = ()
    went_on: bool = False

    @property
    def is_end(self) -> bool:
        """Whether a rule ended the run with it."""
        return bool(self.stopped) and not self.went_on

    @property
    def paused_by(self) -> str | None:
        """Id of the request by which the run pauses after it, None where it goes on."""
        found: str | None = None
        for one in self.steering:
            if not one.refused and one.request.op in ("pause", "continue", "stop-after-round"):
                found = one.request.id if one.request.op == "pause" else None
        return found

    @property
    def unsaved(self) -> bool:
        """Whether it was recorded without checkpoints."""
        return all(agent.checkpoint is None for agent in self.agents)

    def files_of(self, checkpoint: str) -> dict[str, str]:
        """Return the digests of a checkpoint's files, by their paths below it."""
        below = f"{checkpoint}/"
        return {
            name.removeprefix(below): digest
            for name, digest in self.files.items()
            if name.startswith(below)
        }


@dataclass(frozen=True)
class Amendment:
    """What a person asked for once a round had been recorded: a line of rounds.jsonl below its own.

    The other fields take the place of those of the record.

    Attributes:
        amends: The round (0-based), which is the last one before the line.
    """

    amends: int
    members: tuple[Member, ...]
    next_hparams: tuple[Hparams, ...]
    decisions: tuple[Decision, ...]
    steering: tuple[Steering, ...]
    next_member: int

    @classmethod
    def of(cls, record: RoundRecord) -> Amendment:
        """Return the line by which a recorded round becomes this one."""
        own = {field.name: getattr(record, field.name) for field in fields(cls)[1:]}
        return cls(record.round, **own)

    def applied(self, record: RoundRecord) -> RoundRecord:
        """Return the record of its round as it is from now on."""
        own = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return replace(record, **own)


def outline(record: RoundRecord) -> RoundRecord:
    """Return what the rounds that follow, and the end of a run, still ask an earlier round for.

    Metrics, rewards by prompt, decisions and digests are most of a record, and rounds.jsonl has
    them: a long run keeps the outlines of its rounds and the whole of its last one.
    """
    agents = tuple(
        replace(
            agent,
            score=None if agent.score is None else replace(agent.score, per_prompt=()),
            metrics={},
            step_rewards=(),
        )
        for agent in record.agents
    )
    return replace(record, agents=agents, decisions=(), files={}, seconds={})


def to_json(record: RoundRecord | Amendment) -> dict[str, Any]:
    """Return what a line of rounds.jsonl holds, as `plain_value` does."""
    return {"format": FORMAT, **plain_value(asdict(record))}


def check_format(data: Mapping[str, Any], where: str) -> None:
    """Refuse a line of rounds.jsonl that another version of this library wrote, with the remedy."""
    found = data.get("format", 1)
    if found == FORMAT:
        return
    remedy = (
        "finish or read it with evo-grpo 0.1, or start anew"
        if found == 1
        else "finish or read it with the evo-grpo that wrote it, or start anew"
    )
    raise RunDirError(
        f"{where}: expected a run in format {FORMAT}, got format {found!r}; {remedy} "
        "in another folder"
    )


def round_from_json(data: Mapping[str, Any]) -> RoundRecord:
    """Build a RoundRecord from what `to_json` wrote, or raise ValueError, which names the field."""
    record = validated(_ROUND, data)
    _check_changes((*record.agents, *record.members))
    return record


def amendment_from_json(data: Mapping[str, Any]) -> Amendment:
    """Build an Amendment from what `to_json` wrote, or raise ValueError, which names the field."""
    amendment = validated(_AMENDMENT, data)
    _check_changes(amendment.members)
    return amendment


def score_from_json(data: Mapping[str, Any]) -> Score:
    """Build a Score from its fields, or raise ValueError, which names the field."""
    return validated(_SCORE, data)


def member_from_json(data: Mapping[str, Any]) -> Member:
    """Build a Member from its fields, or raise ValueError, which names the field."""
    return validated(_MEMBER, data)


_ROUND, _SCORE, _MEMBER = TypeAdapter(RoundRecord), TypeAdapter(Score), TypeAdapter(Member)
_AMENDMENT = TypeAdapter(Amendment)


def _check_changes(those: Iterable[AgentRecord | Member]) -> None:
    for one in those:
        for name in one.mutation.changes:
            _check_hyperparameter(name)

"""The records of a run, as frozen values that JSON can hold: no torch, no pandas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, cast

from pydantic import TypeAdapter

from evo_grpo.errors import RunDirError
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.validated import validated
from evo_grpo.types import Decision, Member, Mutation, Score, Slot, Steering

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
    metrics: Mapping[str, float]
    tokens: int
    wall_seconds: float
    checkpoint: str | None = None
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
    mutable: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()
    starts: int = 0
    evaluation_tokens: int = 0
    files: Mapping[str, str] = field(default_factory=dict[str, str])
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

    Attributes:
        amends: The round (0-based), which is the last one before the line.
        members: In place of those of its record, like the other fields.
        next_hparams: Likewise.
        decisions: Likewise.
        steering: Likewise.
        next_member: Likewise.
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
    """Return a JSON-able mapping; non-finite floats become None, since JSON has no NaN."""
    return {"format": FORMAT, **_plain(asdict(record))}


def check_format(data: Mapping[str, Any], where: str) -> None:
    """Refuse a line of rounds.jsonl that another version of this library wrote.

    Args:
        data: What the line holds.
        where: File and line, for the message.

    Raises:
        RunDirError: With the version found, the version expected and the remedy.
    """
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
    """Build a RoundRecord from what `to_json` wrote.

    Raises:
        ValueError: It names the field that is not what `to_json` writes.
    """
    values = {
        **data,
        "agents": _each(data.get("agents"), _with_nan_in_numbers),
        "decisions": _decisions(data),
    }
    return validated(_ROUND, values)


def amendment_from_json(data: Mapping[str, Any]) -> Amendment:
    """Build an Amendment from what `to_json` wrote.

    Raises:
        ValueError: It names the field that is not what `to_json` writes.
    """
    return validated(_AMENDMENT, {**data, "decisions": _decisions(data)})


def score_from_json(data: Mapping[str, Any]) -> Score:
    """Build a Score from the mapping of its fields, lists where it holds tuples.

    Raises:
        ValueError: It names the field that is no field of a Score, or not of its type.
    """
    return validated(_SCORE, _with_nan(data))


def member_from_json(data: Mapping[str, Any]) -> Member:
    """Build a Member from the mapping of its fields.

    Raises:
        ValueError: It names the field that is no field of a Member, or not of its type.
    """
    return validated(_MEMBER, data)


def _plain(value: Any) -> Any:  # noqa: ANN401 -- any value of a record, made JSON-able
    if isinstance(value, Hparams):
        return _plain(value.to_dict())
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _with_nan(data: Any, *names: str) -> Any:  # noqa: ANN401 -- any JSON value
    """Undo `_plain` in a mapping: None stands for what was not finite.

    Args:
        data: The mapping; anything else is returned as it is.
        *names: Its numbers; all of its values, and those of its lists, where none is named.
    """
    if isinstance(data, dict):
        mapping = cast("dict[str, Any]", data)
        return {k: _with_nan([v])[0] if not names or k in names else v for k, v in mapping.items()}
    if isinstance(data, list):
        values = cast("list[Any]", data)
        return [math.nan if v is None else _with_nan(v) for v in values]
    return data


def _with_nan_in_numbers(agent: dict[str, Any]) -> dict[str, Any]:
    numbers = {name: _with_nan(agent.get(name)) for name in ("score", "metrics")}
    return {**agent, **numbers}


def _decisions(data: Mapping[str, Any]) -> Any:  # noqa: ANN401 -- any JSON value
    return _each(data.get("decisions"), lambda d: _with_nan(d, "difference", "error"))


def _each(values: Any, change: Callable[[dict[str, Any]], Any]) -> Any:  # noqa: ANN401 -- any JSON value
    """Change the mappings of a list; whatever else there is, the schema names."""
    if not isinstance(values, list):
        return values
    entries = cast("list[Any]", values)
    return [change(entry) if isinstance(entry, dict) else entry for entry in entries]


_ROUND, _SCORE, _MEMBER = TypeAdapter(RoundRecord), TypeAdapter(Score), TypeAdapter(Member)
_AMENDMENT = TypeAdapter(Amendment)

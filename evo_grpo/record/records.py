"""The records of a run, as frozen values that JSON can hold: no torch, no pandas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from evo_grpo.errors import RunDirError
from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Decision, Member, Mutation, Score, Slot

#: Version of a line of rounds.jsonl. Lines of evo-grpo 0.1 carry none and count as version 1.
FORMAT = 3


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


def to_json(record: RoundRecord) -> dict[str, Any]:
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
    """Build a RoundRecord from what `to_json` wrote."""
    return RoundRecord(
        round=data["round"],
        agents=tuple(_agent(a) for a in data["agents"]),
        seconds=dict(data["seconds"]),
        members=tuple(member_from_json(m) for m in data["members"]),
        next_hparams=tuple(Hparams.from_dict(h) for h in data["next_hparams"]),
        mutable=tuple(data["mutable"]),
        decisions=tuple(_decision(d) for d in data["decisions"]),
        starts=data["starts"],
        evaluation_tokens=data["evaluation_tokens"],
    )


def score_from_json(data: Mapping[str, Any]) -> Score:
    """Build a Score from the mapping of its fields, lists where it holds tuples."""
    values: dict[str, Any] = {
        **data,
        "mean": _number(data["mean"]),
        "se": _number(data["se"]),
        "per_prompt": tuple(_number(v) for v in data["per_prompt"]),
    }
    return Score(**values)


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


def _number(value: float | None) -> float:
    """Undo `_plain`: None stands for what was not finite."""
    return math.nan if value is None else value


def _mutation(data: Mapping[str, Any]) -> Mutation:
    return Mutation(op=data["op"], changes={k: (v[0], v[1]) for k, v in data["changes"].items()})


def _decision(data: Mapping[str, Any]) -> Decision:
    values: dict[str, Any] = {name: _number(data[name]) for name in ("difference", "error")}
    return Decision(**{**data, **values})


def member_from_json(data: Mapping[str, Any]) -> Member:
    """Build a Member from the mapping of its fields."""
    values: dict[str, Any] = {**data, "mutation": _mutation(data["mutation"])}
    return Member(**values)


def _agent(data: Mapping[str, Any]) -> AgentRecord:
    score = data["score"]
    values: dict[str, Any] = {
        **data,
        "hparams": Hparams.from_dict(data["hparams"]),
        "score": None if score is None else score_from_json(score),
        "metrics": {k: _number(v) for k, v in data["metrics"].items()},
        "mutation": _mutation(data["mutation"]),
    }
    return AgentRecord(**values)

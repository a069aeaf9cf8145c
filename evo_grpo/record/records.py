"""What a run remembers, as JSON-able frozen values: no torch, no pandas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Member, Mutation, Score


@dataclass(frozen=True)
class AgentRecord:
    """One agent in one round.

    Attributes:
        agent: Slot.
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
        optimizer_sha256: Digest of optimizer.safetensors, or None: nothing was saved, or the record
            is older than this field.
        mutation: What made the member.
        seed: Seed of the member's sampling stream this round.
        reason: Why it failed, empty when ok.
    """

    agent: int
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
        agents: One record per agent, by slot.
        seconds: Phase -> wall seconds (generate, reward, learn, evaluate, evolve, checkpoint).
        members: The members that train in the NEXT round, by slot (the plan already applied).
        next_hparams: Their hyperparameters, by slot.
    """

    round: int
    agents: tuple[AgentRecord, ...]
    seconds: Mapping[str, float]
    members: tuple[Member, ...] = ()
    next_hparams: tuple[Hparams, ...] = ()


def to_json(record: RoundRecord) -> dict[str, Any]:
    """Return a JSON-able mapping; non-finite floats become None, since JSON has no NaN."""
    return _plain(asdict(record))


def round_from_json(data: Mapping[str, Any]) -> RoundRecord:
    """Build a RoundRecord from what `to_json` wrote."""
    return RoundRecord(
        round=data["round"],
        agents=tuple(_agent(a) for a in data["agents"]),
        seconds=dict(data["seconds"]),
        members=tuple(_member(m) for m in data["members"]),
        next_hparams=tuple(Hparams.from_dict(h) for h in data["next_hparams"]),
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
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Hparams):
        return _plain(value.to_dict())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _number(value: float | None) -> float:
    """Undo `_plain`: None stands for what was not finite."""
    return math.nan if value is None else value


def _mutation(data: Mapping[str, Any]) -> Mutation:
    return Mutation(op=data["op"], changes={k: (v[0], v[1]) for k, v in data["changes"].items()})


def _member(data: Mapping[str, Any]) -> Member:
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

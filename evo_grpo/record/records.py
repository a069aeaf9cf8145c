"""The records of a run: frozen values that are stored as JSON. Imports no torch and no pandas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, TypeAdapter

from evo_grpo.errors import ConfigError, RunDirError
from evo_grpo.record.files import plain_value
from evo_grpo.record.plain import CheckpointPath, RelativePath
from evo_grpo.schema.hparams import Hparams, is_mutable
from evo_grpo.schema.problems import validated
from evo_grpo.schema.validation import shown
from evo_grpo.types import Decision, Member, Mutation, Number, RequestOutcome, Score, Slot


def _check_hyperparameter(name: str) -> str:
    if not is_mutable(name):
        raise ValueError(f"expected names of hyperparameters, got {shown(name)}")
    return name


HyperparameterName = Annotated[str, AfterValidator(_check_hyperparameter)]
"""Name of a hyperparameter, or `clip_low` or `clip_high`."""

_built = lru_cache(maxsize=4096, typed=True)(Hparams)


def _shared(value: Any) -> Any:  # noqa: ANN401 -- any JSON value
    """Build Hparams from a mapping; equal mappings share one object, because building is slow."""
    try:
        return _built(**value)
    except (TypeError, ConfigError):  # a clip pair or weights have no hash, or a value is invalid
        return value


SharedHparams = Annotated[Hparams, BeforeValidator(_shared)]
"""Hyperparameters of an agent. When records are read, agents with equal values share an object."""

#: Version of the format of rounds.jsonl.
FORMAT = 4


@dataclass(frozen=True)
class AgentRecord:
    """One agent in one round (0-based).

    Attributes:
        parent: Member id of the parent, or None.
        state: "ok", or "failed" if the agent's update or evaluation was not finite.
        score: Fitness after the round, None if the agent failed.
        metrics: Means, sums or maxima over the round's steps, by the names of `record.vocabulary`.
        tokens: Tokens that the agent sampled in training in this round.
        wall_seconds: The round's wall time, divided among the agents by their share of tokens.
        checkpoint: Path relative to the run folder, or None.
        adapter_sha256: SHA-256 of the actor's safetensors, None before it is written.
        optimizer_sha256: SHA-256 of optimizer.safetensors, None if it is not written.
        mutation: The mutation that made the member.
        seed: Seed of the member's sampling stream in this round.
        reason: Why the agent failed, empty if `state` is "ok".
        step_rewards: Mean training reward of each step of the round, None for a step without one.
    """

    agent: Slot
    member: int
    parent: int | None
    round: int
    state: str
    hparams: SharedHparams
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
class NextAgents:
    """Members and hyperparameters of the next round, sorted by slot, and decisions about agents."""

    members: tuple[Member, ...]
    hparams: tuple[SharedHparams, ...]
    decisions: tuple[Decision, ...]


@dataclass(frozen=True)
class RoundRecord:
    """One finished round (0-based): a line of rounds.jsonl.

    Attributes:
        agents: One record per agent that played the round, sorted by slot.
        seconds: Phase -> wall seconds (generate, reward, learn, evaluate, evolve, checkpoint).
        members, next_hparams: The members that train in the NEXT round with their hyperparameters,
            sorted by slot. Agents of this round that are missing here leave the population.
        mutable: Names of the hyperparameters that may mutate in this run.
        decisions: Decisions about the agents after the round, with reasons.
        starts: Number of training prompts, or episode seeds, used since the start of the run.
        evaluation_tokens: Tokens sampled to evaluate the agents after the round.
        files: SHA-256 of each file of the round, by its path in the run folder.
        reduced: Engine settings that were lowered because the device ran out of memory, with their
            current values; with several processes, the smallest values.
        decodes_by: Names of the implementations that sampled; each has other rounding errors.
        started, ended: Times in seconds since 1970 (UTC); None if unknown.
        steering: Requests of the user between this round and the next round, in order, with their
            outcomes. `members`, `next_hparams` and `decisions` include the outcomes.
        next_member: The next free member id after requests of the user; 0 without requests.
        stopped: Rules of population.stop that ended the run after this round.
        went_on: Whether the run was extended after a stop rule had ended it.
        plan: The agents of the next round if the run is extended; None if a round follows anyway.
        between: Whether nothing was decided after the round, so that its scores are from few
            validation prompts or from the rewards of its training.
        archived: (round, member) of the agent in the archive after the round, if any.
        fresh: Scores of the archive and of the best agent on new samples, by which neither was
            selected; None if not measured.
    """

    round: int
    agents: tuple[AgentRecord, ...]
    seconds: Mapping[str, float]
    members: tuple[Member, ...] = ()
    next_hparams: tuple[SharedHparams, ...] = ()
    mutable: tuple[HyperparameterName, ...] = ()
    decisions: tuple[Decision, ...] = ()
    starts: int = 0
    evaluation_tokens: int = 0
    files: Mapping[RelativePath, str] = field(default_factory=dict[str, str])
    reduced: Mapping[str, int] = field(default_factory=dict[str, int])
    decodes_by: tuple[str, ...] = ()
    started: float | None = None
    ended: float | None = None
    steering: tuple[RequestOutcome, ...] = ()
    next_member: int = 0
    stopped: tuple[str, ...] = ()
    went_on: bool = False
    between: bool = False
    archived: tuple[int, int] | None = None
    fresh: tuple[Score, Score] | None = None
    plan: NextAgents | None = None

    @property
    def is_end(self) -> bool:
        """Whether a rule of population.stop ended the run after this round."""
        return bool(self.stopped) and not self.went_on

    @property
    def paused_by(self) -> str | None:
        """Id of the request that pauses the run after this round, None if it is not paused."""
        pause: str | None = None
        for outcome in self.steering:
            request = outcome.request
            if not outcome.refused and request.op in ("pause", "continue", "stop-after-round"):
                pause = request.id if request.op == "pause" else None
        return pause

    @property
    def ends_process(self) -> bool:
        """Whether the user requested that the process ends after the round."""
        return any(
            outcome.request.op == "stop-after-round" and not outcome.refused
            for outcome in self.steering
        )

    @property
    def unsaved(self) -> bool:
        """Whether the round has no checkpoints."""
        return all(agent.checkpoint is None for agent in self.agents)

    def extended(self) -> RoundRecord:
        """Return the record of a run's last round with its plan applied, to extend the run."""
        if self.plan is None:
            return self
        plan = self.plan
        return replace(
            self,
            members=plan.members,
            next_hparams=plan.hparams,
            decisions=plan.decisions,
            went_on=bool(self.stopped),
            plan=None,
        )

    def files_of(self, checkpoint: str) -> dict[str, str]:
        """Return the SHA-256 of a checkpoint's files, by their paths within the checkpoint."""
        below = f"{checkpoint}/"
        return {
            name.removeprefix(below): digest
            for name, digest in self.files.items()
            if name.startswith(below)
        }


@dataclass(frozen=True)
class Amendment:
    """Changes to the last recorded round, by requests or by an extension of the run.

    It is a line of rounds.jsonl below the line of round `amends` (0-based). All other fields
    replace the fields of the round's record.
    """

    amends: int
    members: tuple[Member, ...]
    next_hparams: tuple[SharedHparams, ...]
    decisions: tuple[Decision, ...]
    steering: tuple[RequestOutcome, ...]
    next_member: int
    went_on: bool = False
    plan: NextAgents | None = None

    @classmethod
    def of(cls, record: RoundRecord) -> Amendment:
        """Return the amendment that turns the recorded round into `record`."""
        changed = {field.name: getattr(record, field.name) for field in fields(cls)[1:]}
        return cls(record.round, **changed)

    def applied(self, record: RoundRecord) -> RoundRecord:
        """Return a copy of the round's record to which this amendment is applied."""
        changed = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return replace(record, **changed)


def outline(record: RoundRecord) -> RoundRecord:
    """Return a copy of a record without decisions, digests, rewards by prompt and most metrics.

    Of all rounds but the last, a run keeps only outlines in memory. The metric zero_variance is
    kept, because the rules of population.stop read it.
    """
    agents = tuple(
        replace(
            agent,
            score=None if agent.score is None else _without_prompts(agent.score),
            metrics={k: v for k, v in agent.metrics.items() if k == "zero_variance"},
        )
        for agent in record.agents
    )
    return replace(record, agents=agents, decisions=(), files={}, fresh=None)


def _without_prompts(score: Score) -> Score:
    further = tuple(replace(goal, per_prompt=()) for goal in score.further)
    return replace(score, per_prompt=(), further=further, first_look=(), rewards=())


def to_json(record: RoundRecord | Amendment) -> dict[str, Any]:
    """Return a round or an amendment as plain JSON values, as in its line of rounds.jsonl."""
    return {"format": FORMAT, **plain_value(asdict(record))}


def check_format(data: Mapping[str, Any], where: str) -> None:
    """Raise RunDirError for a line of rounds.jsonl in the format of another version."""
    if (version := data.get("format")) != FORMAT:
        raise RunDirError(
            f"{where}: expected a run in format {FORMAT}, got {shown(version)}: another version of "
            "evo-grpo wrote it; finish or read it with that version, or start a new run in another "
            "folder"
        )


def round_from_json(data: Mapping[str, Any] | bytes) -> RoundRecord:
    """Build a RoundRecord from the mapping of `to_json` or from its JSON, or raise ValueError."""
    record = validated(_ROUND, data)
    plan = () if record.plan is None else record.plan.members
    _check_changes((*record.agents, *record.members, *plan))
    return record


def amendment_from_json(data: Mapping[str, Any] | bytes) -> Amendment:
    """Build an Amendment from the mapping of `to_json` or from its JSON, or raise ValueError."""
    amendment = validated(_AMENDMENT, data)
    _check_changes(amendment.members)
    return amendment


def score_from_json(data: Mapping[str, Any]) -> Score:
    """Build a Score from its fields; a ValueError names an invalid field."""
    return validated(_SCORE, data)


def member_from_json(data: Mapping[str, Any]) -> Member:
    """Build a Member from its fields; a ValueError names an invalid field."""
    return validated(_MEMBER, data)


_ROUND, _SCORE, _MEMBER = TypeAdapter(RoundRecord), TypeAdapter(Score), TypeAdapter(Member)
_AMENDMENT = TypeAdapter(Amendment)


def _check_changes(members: Iterable[AgentRecord | Member]) -> None:
    for member in members:
        for name in member.mutation.changes:
            _check_hyperparameter(name)

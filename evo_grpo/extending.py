"""More rounds for a finished run: the plan that its last round did not make, from its records.

After its last round a run selects nobody, for nothing trains any more. Where more rounds are asked
for, that selection is made up with the round's own random stream, so that the longer run is the one
that it would have been from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from evo_grpo.assemble import settings_of_rounds
from evo_grpo.errors import ConfigError
from evo_grpo.record.family import best_ever, next_member_id
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.round import next_agents, why_each_collapsed
from evo_grpo.schema.hparams import Hparams
from evo_grpo.settings import RunConfig
from evo_grpo.types import Member, Score, Slot

_ARCHIVE = Slot(-1)
"""Stands for the slot of the best agent ever, which records do not know."""


@dataclass(frozen=True)
class _Recorded:
    """What evolution reads of an agent, from its records."""

    slot: Slot
    member: Member
    hparams: Hparams
    history: Sequence[Score]
    collapsed: str = ""


def check_rounds(rounds: int, played: int, planned: int) -> None:
    """Refuse a number of rounds that a run cannot have any more.

    Args:
        rounds: What is asked for.
        played: Rounds that are finished.
        planned: What the run has now.

    Raises:
        ConfigError: It is not above the rounds that were played, nor what the run has.
    """
    if rounds <= played and rounds != planned:
        raise ConfigError(
            f"rounds: expected more than the {played} that this run has played, got {rounds}; "
            "rounds that are finished are never dropped"
        )


def with_plan(config: RunConfig, rounds: Sequence[RoundRecord]) -> RoundRecord:
    """Return the last round as it would have been had more rounds followed.

    Args:
        config: The run's settings, with more rounds than were played.
        rounds: All rounds of the run, first to last.
    """
    settings, (*past, last) = settings_of_rounds(config), rounds
    members = members_of(rounds)
    agents = [
        _Recorded(a.agent, members[a.member], a.hparams, history_of(rounds, a.member))
        for a in last.agents
    ]
    scores = [a.score for a in last.agents]
    # A round selects before its own best agent may take the archive's place.
    best = best_ever(past) if settings.archive else None
    archive = None
    if best is not None and best.score is not None:
        archive = _Recorded(_ARCHIVE, members[best.member], best.hparams, [best.score])
    reasons = why_each_collapsed(
        settings,
        scores,
        [a.metrics.get("kl", 0.0) for a in last.agents],
        [int(a.metrics["dead_steps"]) for a in last.agents],
        archive,
        last=False,
    )
    generation, decisions = next_agents(
        settings,
        [replace(agent, collapsed=reason) for agent, reason in zip(agents, reasons, strict=True)],
        scores,
        archive,
        past,
        round=last.round,
        hp_config=config.agents().search_space(),
        seed=config.seed,
        # Without a plan that the last round has by now, where this is done once more after a kill.
        next_id=next_member_id([*past, replace(last, members=())]),
    )
    return replace(
        last,
        members=generation.members,
        next_hparams=generation.hparams,
        decisions=decisions,
        went_on=bool(last.stopped),
    )


def members_of(rounds: Sequence[RoundRecord]) -> dict[int, Member]:
    """Return all members of a run by id."""
    first = {a.member: _founder(a) for a in rounds[0].agents}
    return first | {member.id: member for record in rounds for member in record.members}


def history_of(rounds: Sequence[RoundRecord], member: int) -> list[Score]:
    """Return a member's scores since its last failure, which cleared its history."""
    history: list[Score] = []
    for record in (agent for played in rounds for agent in played.agents):
        if record.member == member:
            if record.score is None:
                history.clear()
            else:
                history.append(record.score)
    return history


def _founder(record: AgentRecord) -> Member:
    """Return a member of the first population."""
    return Member(record.member, record.agent, mutation=record.mutation)

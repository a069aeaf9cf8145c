"""Plans the generation after the last round of a finished run, so that more rounds can follow.

A run does not select after its last round, because no training follows. When a finished run is
extended, this module makes the selection with the random stream of that round. The extended run
therefore equals a run that had as many rounds from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evo_grpo.errors import ConfigError
from evo_grpo.evolve.decide import Standing
from evo_grpo.population.plan import find_collapsed, next_agents
from evo_grpo.population.rules import RoundSettings
from evo_grpo.record.family import archived_agent, best_agent, next_member_id
from evo_grpo.record.records import RoundRecord
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.schema.validation import whole
from evo_grpo.settings import RunConfig
from evo_grpo.training.assemble import settings_of_rounds
from evo_grpo.types import Member, Score, Slot

_ARCHIVE = Slot(-1)
"""Stands for the slot of the best agent so far, which records do not contain."""


def check_rounds(rounds: int, played: int, planned: int) -> None:
    """Refuse a number of rounds unless it exceeds `played` or equals `planned`."""
    whole(1).check("rounds", rounds)
    if rounds <= played and rounds != planned:
        raise ConfigError(
            f"rounds: expected more than the {played} that this run has played, got {rounds}; "
            "rounds that are finished are never dropped"
        )


def with_plan(
    config: RunConfig, rounds: Sequence[RoundRecord], settings: RoundSettings | None = None
) -> RoundRecord:
    """Return the record of the last round, with a plan for a further round.

    `settings` are those of the rounds; None derives them from `config`.
    """
    return planned(
        settings or settings_of_rounds(config),
        rounds,
        hp_config=config.search_space(),
        seed=config.seed,
    )


def planned(
    settings: RoundSettings,
    rounds: Sequence[RoundRecord],
    *,
    hp_config: HyperparameterConfig,
    seed: int,
    archive: bool = True,
    past: Sequence[RoundRecord] | None = None,
) -> RoundRecord:
    """Return the record of the last round, with a plan for a further round.

    `archive` is False to ignore the archive even if the settings enable it. `past` are the rounds
    that an exploration learns from; None means all rounds before the last one.
    """
    *earlier, last = rounds
    members, histories = members_of(rounds), histories_of(rounds)
    standings = [
        Standing(a.agent, members[a.member], a.hparams, histories[a.member]) for a in last.agents
    ]
    scores = [a.score for a in last.agents]
    # A round selects before its best agent replaces the archive.
    best = archived_agent(earlier) if settings.evolve.keeps_archive and archive else None
    kept, fresh = None, dict[Slot, Score]()
    if best is not None and best.score is not None:
        kept = Standing(_ARCHIVE, members[best.member], best.hparams, [best.score])
        measured = best_agent(last)
        if last.fresh is not None and measured is not None:
            fresh = {_ARCHIVE: last.fresh[0], measured.agent: last.fresh[1]}
    standings = find_collapsed(
        settings,
        standings,
        scores,
        [a.metrics.get("kl", 0.0) for a in last.agents],
        [int(a.metrics["dead_steps"]) for a in last.agents],
        last=False,
    )
    generation, decisions = next_agents(
        settings,
        standings,
        [a.step_rewards for a in last.agents],
        kept,
        earlier if past is None else past,
        fresh=fresh,
        round=last.round,
        hp_config=hp_config,
        seed=seed,
        # After a kill the last record may already have a plan: ignore the members of that plan.
        next_id=next_member_id([*earlier, replace(last, members=())]),
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
    first = {
        a.member: Member(a.member, a.agent, a.parent, mutation=a.mutation) for a in rounds[0].agents
    }
    return first | {member.id: member for record in rounds for member in record.members}


def histories_of(rounds: Sequence[RoundRecord]) -> dict[int, list[Score]]:
    """Return the scores of all members by id since their last failure, which cleared them."""
    histories: dict[int, list[Score]] = {}
    for record in (agent for played in rounds for agent in played.agents):
        history = histories.setdefault(record.member, [])
        if record.score is None:
            history.clear()
        else:
            history.append(record.score)
    return histories

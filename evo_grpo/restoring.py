"""A cohort brought to where it stood after the last round that its run recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evo_grpo.assemble import Prepared
from evo_grpo.checkpoints.manifest import read_attributes
from evo_grpo.checkpoints.read import load_agent
from evo_grpo.cohort.cohort import Cohort
from evo_grpo.errors import CheckpointError, RunDirError
from evo_grpo.evolve.generation import Generation
from evo_grpo.extending import history_of, members_of
from evo_grpo.model.digest import base_digest, comparable_digests
from evo_grpo.record.digests import check_digests
from evo_grpo.record.family import best_ever, next_member_id
from evo_grpo.record.names import BEST
from evo_grpo.record.plain import inside
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.round import apply, recorded_parents
from evo_grpo.run_writer import sees_folder
from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Score, Slot

Restored = tuple[Hparams, list[Score], int, int]
"""Of an agent: hyperparameters, history, steps, and updates of its reference."""


def restore(prepared: Prepared, rounds: Sequence[RoundRecord], folder: Path) -> tuple[Slot, ...]:
    """Bring a cohort to where it stood after the last whole round: load, then evolve as recorded.

    Args:
        prepared: The run as it was before its first round.
        rounds: The finished rounds, first to last; at least one.
        folder: The run folder.

    Returns:
        The slots of the agents that play the next round.

    Raises:
        RunDirError: Ranks that train together do not all see the folder.
        CheckpointError: The population had another size, or a checkpoint of the last round is
            missing or was changed since.
    """
    first, last, cohort = rounds[0], rounds[-1], prepared.cohort
    if len(first.agents) != len(prepared.slots):
        raise CheckpointError(
            f"run {folder}: population.yaml asks for {len(prepared.slots)} agents, but its rounds "
            f"were played by {len(first.agents)}; put population.size back"
        )
    slots = tuple(record.agent for record in last.agents)
    # Where a rank does not see the checkpoints, the first one loads and sends them.
    apart = not sees_folder(folder, cohort.team)
    if apart and cohort.together:
        raise RunDirError(
            f"run {folder}: expected all {cohort.team.size} processes to see it, which train each "
            "agent together (engine.zero), got one that does not; put it on a common disk"
        )
    cohort.place(slots, weights=False)
    home = {slot: cohort.agents[slot].rank for slot in slots}
    if apart:
        cohort.move(dict.fromkeys(slots, 0), weights=False)
    for slot in sorted(set(prepared.slots) - set(slots)):
        cohort.remove(slot)
    members = members_of(rounds)
    for record in last.agents:
        _restore_agent(cohort, record, last, folder)
        # A new member begins without a history, so the member comes first.
        cohort.set_member(record.agent, members[record.member])
        state = cohort.agents[record.agent]
        state.history = history_of(rounds, record.member)
        state.dead_steps = int(record.metrics.get("dead_steps", 0))
    archive = None
    best = best_ever(rounds) if prepared.round_settings.archive else None
    if best is not None and best.score is not None:
        archive = cohort.add_spare(members[best.member], best.hparams)
        _restore_agent(cohort, replace(best, agent=archive.slot), rounds[best.round], folder, BEST)
        archive.history = [best.score]
        cohort.archive = archive
    if apart:
        cohort.move(home)
    previous = [cohort.agents[slot].member for slot in slots]
    parents = recorded_parents(last, previous, None if archive is None else archive.slot)
    generation = Generation(last.members, last.next_hparams, parents, cohort.next_member)
    inherit = prepared.round_settings.inherit_optimizer
    apply(cohort, slots, generation, inherit_optimizer=inherit)
    cohort.reserve_members(next_member_id(rounds))
    return generation.slots


def _restore_agent(
    cohort: Cohort,
    record: AgentRecord,
    played: RoundRecord,
    folder: Path,
    copy: str | None = None,
) -> None:
    """Load the checkpoint of an agent as a round recorded it, or a copy of it."""
    if record.checkpoint is None:
        raise CheckpointError(
            f"run {folder}: round {record.round + 1} has no checkpoint of agent {record.agent}"
        )
    name, state = record.checkpoint, cohort.agents[record.agent]

    def load() -> Restored | None:
        if not cohort.here(state.slot):
            return None
        place = inside(folder, copy or name)
        who = f"round {record.round + 1} recorded for agent {record.agent}"
        check_digests(place, played.files_of(name), who)
        saved = str(read_attributes(place)["base_digest"])
        live = base_digest(cohort.base)
        if comparable_digests(saved, live) and saved != live:
            raise CheckpointError(
                f"checkpoint {place}: it was trained over base {cohort.base.name!r} with other "
                "weights than it has now; put the base back as it was"
            )
        load_agent(cohort, record.agent, place, load_optimizer=True)
        return state.hparams, state.history, state.steps, state.reference_updates

    # The ranks that do not have its weights know all else about it.
    told = cohort.team.gather(load)[state.rank]
    assert told is not None, "the rank that has it has loaded it"
    state.hparams, state.history, state.steps, state.reference_updates = told

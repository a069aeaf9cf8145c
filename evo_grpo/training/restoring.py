"""A cohort brought to where it stood after the last round that its run recorded."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evo_grpo.errors import CheckpointError, RunDirError
from evo_grpo.model.digest import base_digest, comparable_digests
from evo_grpo.population.checkpoints.manifest import read_attributes
from evo_grpo.population.checkpoints.read import load_agent
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.round import apply, recorded_generation
from evo_grpo.record.digests import check_digests
from evo_grpo.record.family import best_ever, next_member_id
from evo_grpo.record.names import BEST
from evo_grpo.record.plain import inside
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.training.assemble import Prepared
from evo_grpo.training.extending import history_of, members_of
from evo_grpo.training.writer import sees_folder
from evo_grpo.types import Slot


def restore(prepared: Prepared, rounds: Sequence[RoundRecord], folder: Path) -> tuple[Slot, ...]:
    """Bring a cohort to where it stood after the last whole round: load, then evolve as recorded.

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
    if cohort.references.start and cohort.team.rank == 0:
        _say_of_reference(prepared, last, folder)
    members = members_of(rounds)
    for record in last.agents:
        _restore_agent(cohort, record, last, folder)
        # A new member begins without a history, so the member comes first.
        cohort.set_member(record.agent, members[record.member])
        state = cohort.agents[record.agent]
        state.history = history_of(rounds, record.member)
        state.dead_steps = int(record.metrics.get("dead_steps", 0))
    best = best_ever(rounds) if prepared.round_settings.evolve.archive else None
    if best is not None and best.score is not None:
        archive = cohort.add_spare(members[best.member], best.hparams)
        _restore_agent(cohort, replace(best, agent=archive.slot), rounds[best.round], folder, BEST)
        archive.history = [best.score]
        cohort.archive = archive
    if apart:
        cohort.move(home)
    generation = recorded_generation(cohort, slots, last)
    inherit = prepared.round_settings.evolve.inherit_optimizer
    apply(cohort, slots, generation, inherit_optimizer=inherit)
    cohort.reserve_members(next_member_id(rounds))
    return generation.slots


def _say_of_reference(prepared: Prepared, last: RoundRecord, folder: Path) -> None:
    """Say where the rounds so far were held to the base, and those to come to the start adapter."""
    cohort, name = prepared.cohort, last.agents[0].checkpoint
    held = "beta" in cohort.hp_config.names() or any(h.beta > 0 for h in last.next_hparams)
    if held and name is not None and "reference" not in read_attributes(inside(folder, name)):
        warnings.warn(
            f"run {folder}: an earlier release played its rounds so far with the base as the "
            "reference of the KL term; from here on the reference is model.adapter, the adapter "
            "that its agents started from",
            UserWarning,
            stacklevel=2,
        )


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

    def load() -> tuple[int, int] | None:
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
        return state.steps, state.reference_updates

    # The ranks that do not have its weights know all else about it: the rest is in the records.
    told = cohort.team.gather(load)[state.rank]
    assert told is not None, "the rank that has it has loaded it"
    state.steps, state.reference_updates = told

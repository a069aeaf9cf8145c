"""Restores a cohort to its state after the last recorded round of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from evo_grpo.errors import CheckpointError, RunDirError
from evo_grpo.model.digest import base_digest, comparable_digests
from evo_grpo.model.lora.configs import read_config as read_adapter_config
from evo_grpo.model.lora.load import fit_slot
from evo_grpo.population.checkpoints.read import load_agent, read_attributes
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.round import apply, recorded_generation
from evo_grpo.record import family, names, plain
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.training.assemble import Prepared
from evo_grpo.training.writer import sees_folder
from evo_grpo.types import Member, Score, Slot


def restore(prepared: Prepared, rounds: Sequence[RoundRecord], folder: Path) -> tuple[Slot, ...]:
    """Restore a cohort to its state after the last of `rounds`; return the next round's slots.

    Loads the checkpoints of that round, then repeats its recorded evolution. Raises CheckpointError
    for a population of another size, and for a checkpoint that is missing or modified.
    """
    first_round, final, cohort = rounds[0], rounds[-1], prepared.cohort
    if len(first_round.agents) != len(prepared.slots):
        raise CheckpointError(
            f"run {folder}: population.yaml asks for {len(prepared.slots)} agents, but its rounds "
            f"were played by {len(first_round.agents)}; put population.size back"
        )
    slots = tuple(record.agent for record in final.agents)
    # If some rank does not see the checkpoints, the first rank loads and sends them.
    unshared = not sees_folder(folder, cohort.team)
    if unshared and cohort.trains_jointly:
        raise RunDirError(
            f"run {folder}: expected all {cohort.team.size} processes to see it, which train each "
            "agent together (engine.zero), got one that does not; put it on a common disk"
        )
    cohort.place(slots, weights=False)
    ranks = {slot: cohort.agents[slot].rank for slot in slots}
    if unshared:
        cohort.move(dict.fromkeys(slots, 0), weights=False)
    for slot in sorted(set(prepared.slots) - set(slots)):
        cohort.remove(slot)
    members, histories = _members_of(rounds), _histories_of(rounds)
    checkpoints = {record.agent: _checkpoint(folder, record, final) for record in final.agents}
    best = family.archived_agent(rounds) if prepared.round_settings.evolve.keeps_archive else None
    if best is not None and best.score is not None:
        cohort.archive = cohort.add_spare(members[best.member], best.hparams)
        place = _checkpoint(folder, best, rounds[best.round], names.BEST)
        checkpoints[cohort.archive.slot] = place
    _load(cohort, checkpoints)
    for record in final.agents:
        state = cohort.agents[record.agent]
        saved, recorded = list(state.history), histories[record.member]
        # Set the member before the history: a new member clears the history.
        cohort.set_member(record.agent, members[record.member])
        # Only a checkpoint has the scores of an agent from before the run.
        state.history = saved if recorded and saved[-len(recorded) :] == recorded else recorded
        state.dead_steps = int(record.metrics.get("dead_steps", 0))
    if cohort.archive is not None and best is not None and best.score is not None:
        cohort.archive.history = [best.score]
    if unshared:
        cohort.move(ranks)
    generation = recorded_generation(cohort, slots, final)
    inherit = prepared.round_settings.evolve.inherit_optimizer
    apply(cohort, slots, generation, inherit_optimizer=inherit)
    cohort.reserve_members(family.next_member_id(rounds))
    return generation.slots


_Checkpoint = tuple[Path, Mapping[str, str], str]
"""A checkpoint to load: its folder, the digests of its files, and a phrase on their origin."""


def _checkpoint(
    folder: Path, record: AgentRecord, played: RoundRecord, copy: str | None = None
) -> _Checkpoint:
    """Return the checkpoint that the round `played` recorded for an agent, or the one in `copy`."""
    if record.checkpoint is None:
        raise CheckpointError(
            f"run {folder}: round {record.round + 1} has no checkpoint of agent {record.agent}"
        )
    origin = f"round {record.round + 1} recorded for agent {record.agent}"
    files = played.files_of(record.checkpoint)
    return plain.inside(folder, copy or record.checkpoint), files, origin


def _fit(cohort: Cohort, slot: Slot, place: Path) -> None:
    """Rebuild an agent's adapter and reference with the LoRA configurations in its checkpoint."""
    state = cohort.agents[slot]
    if cohort.trains_jointly:  # such a run starts from new agents, and all have one configuration
        return
    if cohort.team.size == 1 and read_attributes(place).get("reference") == "own":
        cohort.add_reference(slot)
    fit_slot(cohort.slots, state.adapter, read_adapter_config(place / "actor"))
    reference = place / "reference"
    if state.has_reference and reference.is_dir():
        fit_slot(cohort.slots, state.reference, read_adapter_config(reference))


def _load(cohort: Cohort, checkpoints: Mapping[Slot, _Checkpoint]) -> None:
    """Load the checkpoints of this rank's agents; send the agents' counters to all ranks."""
    counted: dict[Slot, dict[str, int]] = {}
    for slot, (place, files, origin) in checkpoints.items():
        if not cohort.is_local(slot):
            continue
        plain.check_digests(place, files, origin)
        saved = str(read_attributes(place)["base_digest"])
        live = base_digest(cohort.base)
        if comparable_digests(saved, live) and saved != live:
            raise CheckpointError(
                f"checkpoint {place}: it was trained over base {cohort.base.name!r} with other "
                "weights than it has now; put the base back as it was"
            )
        _fit(cohort, slot, place)
        load_agent(cohort, slot, place, load_optimizer=True)
        counted[slot] = cohort.agents[slot].counters
    for part in cohort.team.gather(counted):
        for slot, counters in part.items():
            cohort.agents[slot].counters = counters


def _members_of(rounds: Sequence[RoundRecord]) -> dict[int, Member]:
    first_members = {
        a.member: Member(a.member, a.agent, a.parent, mutation=a.mutation) for a in rounds[0].agents
    }
    return first_members | {member.id: member for record in rounds for member in record.members}


def _histories_of(rounds: Sequence[RoundRecord]) -> dict[int, list[Score]]:
    """Return, by member id, each member's scores since its last round without a score."""
    histories: dict[int, list[Score]] = {}
    for record in (agent for played in rounds for agent in played.agents):
        history = histories.setdefault(record.member, [])
        if record.score is None:
            history.clear()
        else:
            history.append(record.score)
    return histories

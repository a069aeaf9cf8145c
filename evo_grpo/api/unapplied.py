"""Keeps the plan after the last round of a `train` call, for the next call to carry out.

Several calls thus give the same result as one. If the user has changed agents between the calls,
the next call does not carry out the plan, and warns.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.round import apply, next_slots, recorded_generation
from evo_grpo.record.records import RoundRecord
from evo_grpo.types import Slot


@dataclass(frozen=True, eq=False)
class Unapplied:
    """A plan that is not carried out yet.

    Attributes:
        record: The last round of the call, with the plan.
        marks: By slot, the state of each agent at the end of the call, to detect later changes.
    """

    record: RoundRecord
    marks: Mapping[Slot, object]


def _mark(cohort: Cohort, slot: Slot) -> object:
    if slot not in cohort.agents:
        return None
    state = cohort.agents[slot]
    # The version is None if another process has the weights. A new optimizer has other moments.
    version = cohort.slots.versions[state.adapter] if cohort.is_local(slot) else None
    return version, state.steps, state.hparams, state.member.id, state.optimizer


def note(cohort: Cohort, record: RoundRecord) -> None:
    """Remember that the plan of a round is not carried out yet."""
    slots = next_slots(record)
    withdraw(cohort, slots)
    cohort.unapplied.append(Unapplied(record, {slot: _mark(cohort, slot) for slot in slots}))
    if record.plan is not None:  # so that a clone gets none of the ids of the plan
        cohort.reserve_members(1 + max(member.id for member in record.plan.members))


def find(cohort: Cohort, slots: Sequence[Slot]) -> RoundRecord | None:
    """Return the record of the round whose plan for these agents is pending, or None."""
    unapplied = _find(cohort, slots)
    return None if unapplied is None else unapplied.record


def withdraw(cohort: Cohort, slots: Sequence[Slot]) -> None:
    """Drop the pending plan for these agents, if any, because the user has made another plan."""
    if (unapplied := _find(cohort, slots)) is not None:
        cohort.unapplied.remove(unapplied)


def is_unchanged(cohort: Cohort, slots: Sequence[Slot]) -> bool:
    """Return whether these agents have a pending plan and are unchanged since its round."""
    unapplied = _find(cohort, slots)
    return unapplied is not None and not _changed(cohort, slots, unapplied)


def make_up(
    cohort: Cohort, slots: Sequence[Slot], *, inherit_optimizer: bool
) -> RoundRecord | None:
    """Carry out the pending plan for these agents, if there is one and no agent was changed.

    Returns the record of the last round with the plan carried out; None if nothing was done.
    """
    unapplied = _find(cohort, slots)
    if unapplied is None:
        return None
    cohort.unapplied.remove(unapplied)
    why = "the round ended without a plan" if unapplied.record.plan is None else ""
    if changed := _changed(cohort, slots, unapplied):
        why = f"agents were changed ({', '.join(map(str, changed))})"
    if why:
        warnings.warn(
            f"the selection after round {unapplied.record.round + 1} is skipped, since {why}: the "
            "agents continue unchanged. To have agents selected, change them after the next round",
            UserWarning,
            stacklevel=4,
        )
        return None
    record = unapplied.record.extended()
    generation = recorded_generation(cohort, slots, record)
    apply(cohort, slots, generation, inherit_optimizer=inherit_optimizer)
    return record


def _find(cohort: Cohort, slots: Sequence[Slot]) -> Unapplied | None:
    plans = (plan for plan in cohort.unapplied if isinstance(plan, Unapplied))
    return next((plan for plan in plans if not plan.marks.keys().isdisjoint(slots)), None)


def _changed(cohort: Cohort, slots: Sequence[Slot], unapplied: Unapplied) -> list[Slot]:
    """Return the slots of agents changed since the plan; all if the plan is for other agents."""
    if list(slots) != list(unapplied.marks):
        return list(slots)
    return [slot for slot, mark in unapplied.marks.items() if _mark(cohort, slot) != mark]

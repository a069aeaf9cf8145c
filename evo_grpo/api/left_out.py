"""The selection after the last round of a `train` call, which the next call carries out.

The last round of a call selects no agents, since none trains afterwards. The next call carries out
that selection before its first round, with its own settings and the random stream of that last
round: several calls give the same result as one. If the user has changed agents between the calls,
the next call does not select and warns.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.round import apply, next_slots, recorded_generation
from evo_grpo.population.rules import RoundSettings
from evo_grpo.record.records import RoundRecord
from evo_grpo.training.extending import planned
from evo_grpo.types import Slot


@dataclass(frozen=True, eq=False)
class LeftOut:
    """A selection that was left out.

    Attributes:
        rounds: The rounds so far, first to last.
        marks: State of each agent of the last round at the end of the call, by name, including
            agents that left after the round. A user may have changed the state since.
    """

    rounds: Sequence[RoundRecord]
    marks: Mapping[Slot, Mapping[str, object]]


def _mark(cohort: Cohort, slot: Slot) -> dict[str, object]:
    state = cohort.agents[slot]
    # The version is None if another rank has the weights. A replaced optimizer has other moments.
    version = cohort.slots.versions[state.adapter] if cohort.is_local(slot) else None
    return {
        "weights": (version, state.steps),
        "hyperparameters": state.hparams,
        "member": state.member.id,
        "optimizer": state.optimizer,
    }


def note(cohort: Cohort, rounds: Sequence[RoundRecord]) -> None:
    """Remember that the last of these rounds has left out its selection."""
    slots = [a.agent for a in rounds[-1].agents if a.agent in cohort.agents]
    _take(cohort, slots)
    cohort.left_out.append(LeftOut(tuple(rounds), {slot: _mark(cohort, slot) for slot in slots}))


def find(cohort: Cohort, slots: Sequence[Slot]) -> LeftOut | None:
    """Return the selection that was left out among these agents, or None."""
    known = (left for left in cohort.left_out if isinstance(left, LeftOut))
    return next((left for left in known if not left.marks.keys().isdisjoint(slots)), None)


def leavers(cohort: Cohort, slots: Sequence[Slot]) -> list[Slot] | None:
    """Return the agents that left and are needed for a selection that was left out.

    None if no selection was left out, or if it cannot be carried out any more.
    """
    left = find(cohort, slots)
    if left is None or _changes(cohort, slots, left):
        return None
    return sorted(set(left.marks) - set(slots))


def withdraw(cohort: Cohort, slots: Sequence[Slot]) -> None:
    """Drop the selection that was left out among these agents: the user has made one."""
    if (left := _take(cohort, slots)) is not None:
        _free_leavers(cohort, left)


def make_up(
    cohort: Cohort,
    slots: Sequence[Slot],
    settings: RoundSettings,
    *,
    past: Sequence[RoundRecord] | None = None,
) -> tuple[RoundRecord, tuple[Slot, ...]] | None:
    """Carry out the selection that the last round left out, if there is one.

    Args:
        cohort: The cohort of the agents.
        slots: Slots of the agents for the next round.
        settings: Settings of the next rounds.
        past: Rounds that an exploration learns from; None takes all before the last one.

    Returns:
        The record of the last round with its selection, and the slots of the agents for the next
        round; None if no selection was made.
    """
    left = _take(cohort, slots)
    if left is None:
        return None
    last = left.rounds[-1]
    if changes := _changes(cohort, slots, left):
        _free_leavers(cohort, left)
        warnings.warn(
            f"the selection after round {last.round + 1} is skipped, since its agents were changed "
            f"({'; '.join(changes)}); they continue unchanged. To have them selected, change them "
            "after the next round",
            UserWarning,
            stacklevel=4,
        )
        return None
    record = cohort.team.agree(
        None,
        lambda _: planned(
            settings,
            left.rounds,
            hp_config=cohort.hp_config,
            seed=cohort.seed,
            archive=cohort.archive is not None,
            past=past,
        ),
    )
    everyone = [a.agent for a in last.agents]
    generation = recorded_generation(cohort, everyone, record)
    apply(cohort, everyone, generation, inherit_optimizer=settings.evolve.inherit_optimizer)
    return record, generation.slots


def _take(cohort: Cohort, slots: Sequence[Slot]) -> LeftOut | None:
    left = find(cohort, slots)
    if left is not None:
        cohort.left_out.remove(left)
    return left


def _free_leavers(cohort: Cohort, left: LeftOut) -> None:
    """Free the memory of agents that left after the last round and were kept for its selection."""
    for slot in set(left.marks) - set(next_slots(left.rounds[-1])):
        if slot in cohort.agents and len(cohort.agents) > 1:
            cohort.remove(slot)


def _changes(cohort: Cohort, slots: Sequence[Slot], left: LeftOut) -> list[str]:
    """Return descriptions of the changes to the agents since the last round."""
    last = left.rounds[-1]
    if list(slots) != list(next_slots(last)):
        before, now = (", ".join(map(str, s)) for s in (next_slots(last), slots))
        return [f"they were agents {before}, and are agents {now}"]
    found: list[str] = []
    for record in last.agents:
        slot, before = record.agent, left.marks.get(record.agent)
        if before is None or slot not in cohort.agents:
            found.append(f"agent {slot} is gone")
            continue
        now = _mark(cohort, slot)
        changed = [name for name, value in now.items() if value != before[name]]
        if changed:
            found.append(f"agent {slot}: {', '.join(changed)}")
    return found


def went_on(rounds: list[RoundRecord]) -> None:
    """Record that the population continues after a rule has ended the last call."""
    rounds[-1:] = [replace(r, went_on=bool(r.stopped)) for r in rounds[-1:]]

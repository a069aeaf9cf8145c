"""The selection that the last round of a call left out, made up by the next call.

After the last round nothing trains, so nothing is selected. A call that goes on needs that
selection first, or rounds that are played one call at a time would never evolve. It is made by the
settings of the call that goes on, with the random stream of the round, so that several calls are
one. What a person changed in between stays: then there is no selection, and a warning says so.
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
        marks: All agents of the last round, also those that left after it; of each, as the call
            left it, what a person may change, by name.
    """

    rounds: Sequence[RoundRecord]
    marks: Mapping[Slot, Mapping[str, object]]


def _mark(cohort: Cohort, slot: Slot) -> dict[str, object]:
    state = cohort.agents[slot]
    # The version is None where another rank has the weights; moments belong to their optimizer.
    version = cohort.slots.versions[state.adapter] if cohort.here(slot) else None
    return {
        "weights": (version, state.steps),
        "hyperparameters": state.hparams,
        "member": state.member.id,
        "optimizer": state.optimizer,
    }


def note(cohort: Cohort, rounds: Sequence[RoundRecord]) -> None:
    """Note that the last of some rounds left its selection out."""
    slots = [a.agent for a in rounds[-1].agents if a.agent in cohort.agents]
    _take(cohort, slots)
    cohort.left_out.append(LeftOut(tuple(rounds), {slot: _mark(cohort, slot) for slot in slots}))


def find(cohort: Cohort, slots: Sequence[Slot]) -> LeftOut | None:
    """Return the selection that was left out among some agents, if there is one."""
    known = (left for left in cohort.left_out if isinstance(left, LeftOut))
    return next((left for left in known if not left.marks.keys().isdisjoint(slots)), None)


def leavers(cohort: Cohort, slots: Sequence[Slot]) -> list[Slot] | None:
    """Return the agents that left, which a selection needs that was left out; None without one."""
    left = find(cohort, slots)
    if left is None or _changes(cohort, slots, left):
        return None
    return sorted(set(left.marks) - set(slots))


def withdraw(cohort: Cohort, slots: Sequence[Slot]) -> None:
    """Make no selection up among some agents: it has been made by hand."""
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
        cohort: The agents.
        slots: Those that are to play the next round.
        settings: How the rounds to come are played.
        past: The rounds that an exploration learns from; None takes all before the last one.

    Returns:
        The last round as it is with its selection, and the slots of the agents that play the next
        one; None where nothing is selected.
    """
    left = _take(cohort, slots)
    if left is None:
        return None
    last = left.rounds[-1]
    if changes := _changes(cohort, slots, left):
        _free_leavers(cohort, left)
        warnings.warn(
            f"the selection that round {last.round + 1} left out is not made up, since its agents "
            f"have changed since then ({'; '.join(changes)}); they go on as they are. To have them "
            "selected, change them after the next round",
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
    """Free the memory of agents that left after the last round, kept for its selection alone."""
    for slot in set(left.marks) - set(next_slots(left.rounds[-1])):
        if slot in cohort.agents and len(cohort.agents) > 1:
            cohort.remove(slot)


def _changes(cohort: Cohort, slots: Sequence[Slot], left: LeftOut) -> list[str]:
    """Return what is not as it was after the last round, in words."""
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
        words = [word for word, value in now.items() if value != before[word]]
        if words:
            found.append(f"agent {slot}: {', '.join(words)}")
    return found


def went_on(rounds: list[RoundRecord]) -> None:
    """Note that a rule which ended the last call does not end this one before it has begun."""
    rounds[-1:] = [replace(r, went_on=bool(r.stopped)) for r in rounds[-1:]]

"""Pure functions that apply a user's requests to the plan of the next round."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from evo_grpo.errors import ConfigError
from evo_grpo.evolve.generation import changes_between
from evo_grpo.evolve.protocols import Changes
from evo_grpo.evolve.start import with_values
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.problems import Problem, refuse
from evo_grpo.schema.search_space import HyperparameterConfig, outside
from evo_grpo.types import Decision, Member, Mutation, Request, RequestOutcome, Slot

ON_AGENTS = ("stop-agent", "clone", "set")
"""Requests that change the agents of the next round or their hyperparameters."""
ON_RUN = ("pause", "continue", "stop-after-round")
"""Requests that change when the next round is played, or whether."""

_SUPERSEDED = ("copied", "kept", "restored")
"""Kinds of decisions about an agent that are dropped when a request stops or overwrites it."""


class NextRound(NamedTuple):
    """The agents of the next round, in ascending order of slot, and the decisions about them."""

    members: tuple[Member, ...]
    hparams: tuple[Hparams, ...]
    decisions: tuple[Decision, ...]


@dataclass(frozen=True)
class RoundEnd:
    """The state of a run between two rounds, after `round` (0-based).

    `played` maps the id of each member that played the round to its slot, `hp_config` has the
    ranges, and `next_id` is an id that no member of the run has had.
    """

    round: int
    played: Mapping[int, Slot]
    hp_config: HyperparameterConfig
    next_id: int


def steer(
    plan: NextRound, request: Request, boundary: RoundEnd
) -> tuple[NextRound, RequestOutcome]:
    """Carry out a request about agents; return the new plan, and the outcome of the request.

    The parent of a clone is the member whose weights it copies: a member that finished the round,
    or the best agent ever. A member that has not trained yet passes its id on to the member that
    replaces it. A refused request changes no agent.
    """
    why = ""
    try:
        plan, sentence = _carried_out(plan, request, boundary)
        source = request.source if request.op == "clone" else None
        outcome = _decision("steered", request.agent, source, sentence)
    except ConfigError as error:
        why = " ".join(str(error).split())
        outcome = _decision("refused", request.agent, request.source, f"{request}: refused: {why}")
    return plan._replace(decisions=(*plan.decisions, outcome)), RequestOutcome(request, why)


def _carried_out(plan: NextRound, request: Request, boundary: RoundEnd) -> tuple[NextRound, str]:
    """Return the plan with a request carried out, and a sentence that describes the change."""
    if request.op == "stop-agent":
        return _stopped(plan, _index(plan, request.agent, boundary))
    if request.op == "clone":
        source = _index(plan, request.source, boundary)
        return _cloned(plan, source, _index(plan, request.agent, boundary), boundary)
    if request.op == "set":
        return _set(plan, _index(plan, request.agent, boundary), request.values, boundary)
    raise ConfigError(f"expected one of {', '.join(ON_AGENTS)}, got {request.op!r}")


def _index(plan: NextRound, agent: int | None, boundary: RoundEnd) -> int:
    slots = [member.agent for member in plan.members]
    if agent is not None and agent in slots:
        return slots.index(Slot(agent))
    ended = ", which left after this round" if agent in boundary.played.values() else ""
    raise ConfigError(
        f"agent {agent}: expected one that trains in round {boundary.round + 2}, "
        f"{', '.join(map(str, slots))}, got {agent}{ended}"
    )


def _stopped(plan: NextRound, index: int) -> tuple[NextRound, str]:
    agent = plan.members[index].agent
    if len(plan.members) == 1:
        raise ConfigError(
            f"agent {agent}: expected another one that trains on, got the only one; end the run "
            "with stop-after-round"
        )
    stopped = NextRound(
        plan.members[:index] + plan.members[index + 1 :],
        plan.hparams[:index] + plan.hparams[index + 1 :],
        _without(plan.decisions, agent),
    )
    return stopped, f"agent {agent} was stopped by hand"


def _cloned(plan: NextRound, source: int, target: int, boundary: RoundEnd) -> tuple[NextRound, str]:
    parent, old = plan.members[source], plan.members[target]
    if source == target:
        raise ConfigError(
            f"agent {old.agent}: expected another agent to clone, got itself; it has these weights "
            "already"
        )
    newborn = parent.id not in boundary.played
    op = "steer-restore" if newborn and parent.mutation.restores else "steer-clone"
    mutation = replace(parent.mutation if newborn else Mutation(), op=op)
    hparams = plan.hparams[source]
    cloned = _with_child(plan, target, parent, mutation, hparams, boundary)
    if _swaps(cloned.members, boundary.played):
        raise ConfigError(
            f"agent {old.agent}: expected no cycle of agents that take each other's weights "
            f"between the same two rounds, got {parent.agent} after other clones; repeat the "
            "request after the next round"
        )
    text = f"agent {old.agent} took agent {parent.agent}'s weights by hand, at lr {hparams.lr:.2g}"
    return cloned._replace(decisions=_without(cloned.decisions, old.agent)), text


def _set(
    plan: NextRound, index: int, values: Mapping[str, object], boundary: RoundEnd
) -> tuple[NextRound, str]:
    member, old = plan.members[index], plan.hparams[index]
    if not values:
        raise ConfigError(f"agent {member.agent}: expected a hyperparameter to set, got none")
    new = with_values(old, values, boundary.hp_config.names())
    before = set(outside(old, boundary.hp_config))
    beyond = [value for value in outside(new, boundary.hp_config) if value not in before]
    remedy = "what it may be is in evolve.hyperparameters"
    refuse(Problem((value.name,), value.told(remedy=remedy)) for value in beyond)
    assignments = ", ".join(f"{name} {value}" for name, value in values.items())
    if new == old:
        raise ConfigError(
            f"agent {member.agent}: expected a change, got its present values: {assignments}"
        )
    newborn = member.id not in boundary.played
    changes: Changes = dict(member.mutation.changes) if newborn else {}
    for name, (value, after) in changes_between(old, new, boundary.hp_config).items():
        changes[name] = (changes.get(name, (value,))[0], after)
    op = "steer-set"
    if newborn and (member.mutation.restores or member.mutation.op == "steer-clone"):
        op = "steer-restore" if member.mutation.restores else "steer-clone"
    child = _with_child(plan, index, member, Mutation(op, changes), new, boundary)
    return child, f"agent {member.agent} was set by hand: {assignments}"


def _swaps(members: Sequence[Member], played: Mapping[int, Slot]) -> bool:
    """Return whether copies form a cycle, in which each overwrites what another one copies."""
    sources = {
        member.agent: played[member.parent]
        for member in members
        if member.id not in played
        and member.parent is not None
        and member.parent in played
        and not member.mutation.restores
    }
    for start in sources:
        slot, visited = start, set[Slot]()
        while slot in sources and sources[slot] != slot and slot not in visited:
            visited.add(slot)
            slot = sources[slot]
        if slot in visited:
            return True
    return False


def _with_child(
    plan: NextRound,
    index: int,
    parent: Member,
    mutation: Mutation,
    hparams: Hparams,
    boundary: RoundEnd,
) -> NextRound:
    """Replace a member by a child, which takes the member's id if the member has not trained."""
    old, played = plan.members[index], boundary.played
    unused_id = max([boundary.next_id - 1, *(member.id for member in plan.members)]) + 1
    source = parent.id if parent.id in played else parent.parent
    child_id = unused_id if old.id in played else old.id
    child = Member(child_id, old.agent, source, boundary.round + 1, mutation)
    members, values = list(plan.members), list(plan.hparams)
    members[index], values[index] = child, hparams
    return plan._replace(members=tuple(members), hparams=tuple(values))


def _without(decisions: Sequence[Decision], agent: Slot) -> tuple[Decision, ...]:
    return tuple(d for d in decisions if d.agent != agent or d.kind not in _SUPERSEDED)


def _decision(kind: str, agent: int | None, other: int | None, sentence: str) -> Decision:
    slot = Slot(-1 if agent is None else agent)
    source = None if other is None else Slot(other)
    return Decision(kind, slot, source, math.nan, math.nan, 0, sentence)

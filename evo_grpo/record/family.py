"""The family tree of a run, from its records alone: parents, offspring and mutations."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evo_grpo.errors import RunNotFoundError
from evo_grpo.record.columns import fitness
from evo_grpo.record.leaderboard import best_agent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from evo_grpo.record.records import AgentRecord, RoundRecord
    from evo_grpo.schema.hparams import Hparams
    from evo_grpo.types import Mutation


@dataclass(frozen=True)
class FamilyMember:
    """A member with its offspring, by id.

    Attributes:
        agent: Number of its agent.
        parent: Member id of its parent, None in the first population.
        born: Its first round (0-based).
        fitness: Its mean evaluation reward, round by round from `born` on; None where it failed.
        alive: Whether it takes part in the last round.
    """

    id: int
    agent: int
    parent: int | None
    born: int
    mutation: Mutation
    hparams: Hparams
    fitness: tuple[float | None, ...]
    alive: bool
    children: tuple[FamilyMember, ...]


def tree(rounds: Sequence[RoundRecord]) -> tuple[FamilyMember, ...]:
    """Return the first population, each with its offspring below it.

    Members created for a round that has not finished are not included.
    """
    lives: dict[int, list[AgentRecord]] = defaultdict(list)
    for record in rounds:
        for agent in record.agents:
            lives[agent.member].append(agent)
    last = {agent.member for agent in rounds[-1].agents} if rounds else set[int]()
    children: dict[int | None, list[FamilyMember]] = defaultdict(list)
    # Ids grow with time: from the youngest to the oldest, children come before their parents.
    for member in sorted(lives, reverse=True):
        life = lives[member]
        first = life[0]
        children[first.parent].append(
            FamilyMember(
                id=member,
                agent=first.agent,
                parent=first.parent,
                born=first.round,
                mutation=first.mutation,
                hparams=first.hparams,
                fitness=tuple(None if one.score is None else one.score.mean for one in life),
                alive=member in last,
                children=tuple(reversed(children.pop(member, []))),
            )
        )
    return tuple(reversed(children[None]))


def family_document(
    rounds: Sequence[RoundRecord], summary: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the family as plain values that JSON has.

    Returns:
        `rounds`, how many there are; `best`, what the summary holds under `best`, None before the
        end; `members` by id, each with the fields of a `FamilyMember` but its children, with `op`
        and `changes` for its mutation. A mean that won is no member of a round: `best` has it.
    """

    def flat(member: FamilyMember) -> list[FamilyMember]:
        return [member, *(one for child in member.children for one in flat(child))]

    members = [one for founder in tree(rounds) for one in flat(founder)]
    return {
        "rounds": len(rounds),
        "best": None if summary is None else summary["best"],
        "members": [
            {
                "id": one.id,
                "agent": one.agent,
                "parent": one.parent,
                "born": one.born,
                "alive": one.alive,
                "op": one.mutation.op,
                "changes": {name: list(ends) for name, ends in one.mutation.changes.items()},
                "hparams": one.hparams.to_dict(),
                "fitness": list(one.fitness),
            }
            for one in sorted(members, key=lambda one: one.id)
        ],
    }


def ancestry(rounds: Sequence[RoundRecord], member: int) -> list[AgentRecord]:
    """Return the rounds that led to a member, first to last: the schedule that produced it.

    One record per round: the member's own, before them its parent's up to its birth, and so on.

    Raises:
        RunNotFoundError: When no finished round has that member.
    """
    path: list[AgentRecord] = []
    wanted: int | None = member
    until: int | None = None
    for record in reversed(rounds):
        if until is not None and record.round > until:
            continue
        found = next((agent for agent in record.agents if agent.member == wanted), None)
        if found is None and path:
            wanted = path[-1].parent
            if path[-1].mutation.restores and until is None:
                # Its weights are those of the best agent ever, as it was when it was the best.
                best = best_ever(rounds[: record.round + 1])
                until = record.round if best is None else best.round
                if record.round > until:
                    continue
            found = next((agent for agent in record.agents if agent.member == wanted), None)
        if found is not None:
            path.append(found)
            until = None
    if not path:
        ids = sorted({agent.member for record in rounds for agent in record.agents})
        raise RunNotFoundError(
            f"member {member}: expected one that finished a round, "
            f"among {ids if ids else 'none yet'}; see `evo-grpo lineage RUN`"
        )
    return path[::-1]


def best_ever(rounds: Sequence[RoundRecord]) -> AgentRecord | None:
    """Return the agent with the greatest fitness of all rounds, the first of equals.

    It is its record in the round in which it had that fitness; None when no agent was ranked.
    """
    best = [one for record in rounds if (one := best_agent(record)) is not None]
    return max(best, key=fitness, default=None)


def founders(rounds: Sequence[RoundRecord]) -> dict[int, int]:
    """Return, for each member, the member of the first population that it descends from."""
    found: dict[int, int] = {}
    for record in rounds:
        for agent in record.agents:
            # Ids grow with time: a parent has played before its children do, or in no round at all.
            parent = agent.member if agent.parent is None else agent.parent
            found.setdefault(agent.member, found.get(parent, parent))
    return found


def founder_of(rounds: Sequence[RoundRecord], member: int) -> int:
    """Return the member of the first population that a member descends from."""
    return founders(rounds).get(member, member)


def next_member_id(rounds: Sequence[RoundRecord]) -> int:
    """Return the first unused member id; those of members about to train count as used."""
    used = [agent.member for record in rounds for agent in record.agents]
    used += [member.id for record in rounds for member in record.members]
    used += [record.next_member - 1 for record in rounds]
    return max(used, default=-1) + 1

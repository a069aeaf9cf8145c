"""Builds the family tree of a run, and finds the best agents of its rounds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from evo_grpo.errors import RunNotFoundError
from evo_grpo.evolve.goals import best_first, fronts, ranked
from evo_grpo.record.columns import fitness
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Mutation, Slot


@dataclass(frozen=True)
class FamilyMember:
    """A member of a family tree.

    Attributes:
        agent: Number of the agent whose life the member is; None for the mean of two members.
        parent, second_parent: Ids of the parents. Both are None in the first population; only a
            mean has a second parent.
        born: The member's first round (0-based); for a mean, the number of finished rounds.
        fitness: Fitness in each round from `born` on, None for a round in which the agent failed;
            for a mean, one entry: its mean reward in the final comparison.
        alive: Whether the member plays the last round.
        children: The members that were copied from this one, ordered by id.
    """

    id: int
    agent: int | None
    parent: int | None
    born: int
    mutation: Mutation
    hparams: Hparams
    fitness: tuple[float | None, ...]
    alive: bool
    children: tuple[FamilyMember, ...] = ()
    second_parent: int | None = None


def tree(rounds: Sequence[RoundRecord]) -> tuple[FamilyMember, ...]:
    """Build the family tree of each member of the first population, from the finished rounds."""
    lives: dict[int, list[AgentRecord]] = defaultdict(list)
    for record in rounds:
        for agent in record.agents:
            lives[agent.member].append(agent)
    living = {agent.member for agent in rounds[-1].agents} if rounds else set[int]()
    children: dict[int | None, list[FamilyMember]] = defaultdict(list)
    # Ids grow with time: from youngest to oldest, children come before their parents.
    for member in sorted(lives, reverse=True):
        life = lives[member]
        birth = life[0]
        children[birth.parent].append(
            FamilyMember(
                id=member,
                agent=birth.agent,
                parent=birth.parent,
                born=birth.round,
                mutation=birth.mutation,
                hparams=birth.hparams,
                fitness=tuple(None if entry.score is None else entry.score.mean for entry in life),
                alive=member in living,
                children=tuple(reversed(children.pop(member, []))),
            )
        )
    return tuple(reversed(children[None]))


def ancestry(rounds: Sequence[RoundRecord], member: int) -> list[AgentRecord]:
    """Return the records of a member and of its ancestors, one per round, first to last.

    Raises RunNotFoundError if the member finished no round.
    """
    path: list[AgentRecord] = []
    searched: int | None = member
    until: int | None = None
    for record in reversed(rounds):
        if until is not None and record.round > until:
            continue
        by_member = {agent.member: agent for agent in record.agents}
        if searched not in by_member and path:
            searched = path[-1].parent
            if path[-1].mutation.restores and until is None:
                # The weights are those of the best agent of all rounds, after its best round.
                best = best_ever(rounds[: record.round + 1])
                until = record.round if best is None else best.round
                if record.round > until:
                    continue
        if searched is not None and searched in by_member:
            path.append(by_member[searched])
            until = None
    if not path:
        ids = sorted({agent.member for record in rounds for agent in record.agents})
        raise RunNotFoundError(
            f"member {member}: expected one that finished a round, "
            f"among {ids if ids else 'none yet'}; see `evo-grpo lineage RUN`"
        )
    return path[::-1]


def order(agent: AgentRecord) -> tuple[float, ...]:
    """Return a sort key that puts the best agent first: fitness, further objectives, number."""
    if agent.score is None or math.isnan(fitness(agent)):
        return math.inf, agent.agent
    return *best_first(agent.score), agent.agent


def best_agent(record: RoundRecord) -> AgentRecord | None:
    """Return the agent of a round with the greatest finite fitness, if any; ties: lowest number."""
    candidates = [agent for agent in record.agents if math.isfinite(fitness(agent))]
    return min(candidates, key=order, default=None)


def leading_agent(record: RoundRecord) -> AgentRecord | None:
    """Return the best of the agents that train on after a round; see `playing_on`."""
    if not record.members:
        return best_agent(record)
    playing = playing_on(record)
    return best_agent(
        replace(record, agents=tuple(agent for agent in record.agents if agent.agent in playing))
    )


def playing_on(record: RoundRecord) -> set[Slot]:
    """Return the slots of the agents that train on after a round, without collapsed agents."""
    collapsed = {decision.agent for decision in record.decisions if decision.kind == "collapsed"}
    return {member.agent for member in record.members} - collapsed


def archived_agent(rounds: Sequence[RoundRecord]) -> AgentRecord | None:
    """Return the archived agent of a run that keeps an archive; None before the first decision."""
    return None if all(record.between for record in rounds) else best_ever(rounds)


def best_ever(rounds: Sequence[RoundRecord]) -> AgentRecord | None:
    """Return the record of the agent in the archive, from the round in which it was archived.

    Without an archive, return the record with the greatest fitness in a round with a decision (in
    any round before the first decision), the earliest of equal ones; None if no fitness is finite.
    """
    if rounds and rounds[-1].archived is not None:
        number, member = rounds[-1].archived
        archived_in = next(record for record in rounds if record.round == number)
        return next(agent for agent in archived_in.agents if agent.member == member)
    decided = [record for record in rounds if not record.between] or rounds
    best = [agent for record in decided if (agent := best_agent(record)) is not None]
    return min(best, key=lambda agent: order(agent)[:-1], default=None)


def front(rounds: Sequence[RoundRecord]) -> tuple[AgentRecord, ...]:
    """Return the Pareto front of a run, ordered by fitness: agents that no other agent dominates.

    An agent dominates another if its means are better in one objective and worse in none. The front
    has at most as many agents as the first round. If more qualify, the best agent of each objective
    is kept, then the agents with the greatest crowding distance (`evolve.goals`). Of agents with
    equal means only the earliest is kept. With one objective the front is empty. Once a round had a
    decision, rounds without a decision are ignored.
    """
    agents: list[AgentRecord] = []
    for record in [finished for finished in rounds if not finished.between] or rounds:
        for agent in record.agents:
            has_goals = agent.score is not None and agent.score.is_finite and agent.score.further
            if has_goals and all(_means(agent) != _means(other) for other in agents):
                agents.append(agent)
        scores = [agent.score for agent in agents]
        ranking = ranked(scores, None)
        ranked_scores = [score for score in scores if score is not None]
        size = len(fronts(ranked_scores, None)[0]) if ranked_scores else 0
        agents = [agents[index] for index in sorted(ranking[: min(size, len(rounds[0].agents))])]
    return tuple(sorted(agents, key=order))


def _means(agent: AgentRecord) -> tuple[float, ...]:
    return () if agent.score is None else best_first(agent.score)


def founders(rounds: Sequence[RoundRecord]) -> dict[int, int]:
    """Return, for each member id, the id of its ancestor in the first population."""
    founder_ids: dict[int, int] = {}
    for record in rounds:
        for agent in record.agents:
            # Ids grow with time, so a parent comes before its children or plays no round.
            parent = agent.member if agent.parent is None else agent.parent
            founder_ids.setdefault(agent.member, founder_ids.get(parent, parent))
    return founder_ids


def founder_of(rounds: Sequence[RoundRecord], member: int) -> int:
    """Return the id of a member's ancestor in the first population."""
    return founders(rounds).get(member, member)


def next_member_id(rounds: Sequence[RoundRecord]) -> int:
    """Return a free member id: one above all ids that are used or assigned to the next round."""
    ids = [agent.member for record in rounds for agent in record.agents]
    ids += [member.id for record in rounds for member in record.members]
    ids += [record.next_member - 1 for record in rounds]
    return max(ids, default=-1) + 1

"""A child of two survivors that tie: which two, and whether it takes a place. Pure.

`child_to_try` reads the plan of a round. `with_child` amends the plan once the child is evaluated,
as the requests of a user amend it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

from evo_grpo.evolve.compare import compare
from evo_grpo.evolve.decide import difference_text
from evo_grpo.evolve.steer import changes_between
from evo_grpo.population.evaluate import Evaluation
from evo_grpo.population.plan import RoundPlan
from evo_grpo.population.rules import RoundSettings
from evo_grpo.record.records import AgentRecord
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.types import Decision, Member, Mutation, Score, Slot


@dataclass(frozen=True)
class Pair:
    """Two survivors of a round that may have a child.

    Attributes:
        first: The better one.
        second: The other one.
        place: The agent whose place the child would take: the copy of the worst parent, or `second`
            if nothing is copied.
        hparams: Hyperparameters of the child: those of the place, with the larger rank of the
            parents where the rank is searched.
    """

    first: Slot
    second: Slot
    place: Slot
    hparams: Hparams


@dataclass(frozen=True)
class TryChild:
    """The decision to evaluate a child before the round is recorded.

    Attributes:
        pair: The parents.
        plan: The plan of the round, if the child does not take its place.
        hp_config: The hyperparameters that may change.
    """

    pair: Pair
    plan: RoundPlan
    hp_config: HyperparameterConfig


def child_to_try(
    plan: RoundPlan,
    settings: RoundSettings,
    hp_config: HyperparameterConfig,
    may_recombine: Callable[[Slot, Slot], bool],
) -> TryChild | None:
    """Return the child of the best two survivors that a paired test cannot separate.

    Args:
        plan: The plan of the round.
        settings: The settings; without `evolve.recombine`, and after the last round, there is none.
        hp_config: The hyperparameters that may change.
        may_recombine: Returns whether the weights of two agents can be recombined.
    """
    level = settings.evolve.significance
    if settings.evolve.recombine == "none" or level is None or plan.last:
        return None
    record = plan.record
    played = {agent.member: agent for agent in record.agents}
    hparams = dict(zip((m.agent for m in record.members), record.next_hparams, strict=True))
    survivors: list[AgentRecord] = []
    copies: list[tuple[float, int]] = []
    for member in record.members:
        parent = played.get(member.id) or played.get(-1 if member.parent is None else member.parent)
        if member.mutation.restores or parent is None:
            continue
        if parent.agent == member.agent:
            survivors.append(parent)
        else:
            copies.append((_score(parent).mean, -member.agent))
    ranked = sorted(
        (agent for agent in survivors if math.isfinite(_score(agent).mean)),
        key=lambda agent: (-_score(agent).mean, agent.agent),
    )
    for first, second in combinations(ranked, 2):
        apart = compare(_score(first), _score(second)).significant(level)
        if not apart and may_recombine(first.agent, second.agent):
            place = Slot(-min(copies)[1]) if copies else second.agent
            values = hparams[place]
            if "lora.r" in hp_config.names():
                ranks = [agent.hparams.lora_r or 0 for agent in (first, second)]
                values = values.replace(lora_r=max(ranks))
            return TryChild(Pair(first.agent, second.agent, place, values), plan, hp_config)
    return None


def with_child(tried: TryChild, child: Evaluation | None, next_id: int) -> RoundPlan:
    """Return the plan with the child in its place if it is ahead of its better parent.

    Args:
        tried: The pair and the plan.
        child: The evaluation of the child.
        next_id: A member id that no member of the run or of the plan has.
    """
    plan, pair = tried.plan, tried.pair
    record = plan.record
    parents = {agent.agent: agent for agent in record.agents}
    first, second = parents[pair.first], parents[pair.second]
    assert child is not None, "the rank of the better parent has evaluated the child"
    ahead = compare(child.score, _score(first))
    both = f"agents {pair.first} and {pair.second}"
    spent = record.evaluation_tokens + child.tokens
    if not ahead.difference > 0:  # NaN if the child has no finite score
        text = f"the child of {both} was discarded, since it is not ahead of agent {pair.first}"
        kind, kept = "discarded", record.decisions
    else:
        text = f"agent {pair.place} became a child of {both}, ahead of agent {pair.first}"
        kind = "recombined"
        gone = ("copied", "kept")
        kept = tuple(d for d in record.decisions if d.agent != pair.place or d.kind not in gone)
    decision = Decision(
        kind, pair.place, pair.first, ahead.difference, ahead.error, ahead.prompts,
        text + difference_text(ahead),
    )  # fmt: skip
    record = replace(record, evaluation_tokens=spent, decisions=(*kept, decision))
    if kind == "recombined":
        index = [member.agent for member in record.members].index(pair.place)
        old, played = record.members[index], {agent.member for agent in record.agents}
        changes = changes_between(first.hparams, pair.hparams, tried.hp_config)
        child_member = Member(
            next_id if old.id in played else old.id,  # otherwise that id has not been used yet
            pair.place,
            first.member,
            record.round + 1,
            Mutation("recombine", changes),
            second.member,
        )
        members, hparams = list(record.members), list(record.next_hparams)
        members[index], hparams[index] = child_member, pair.hparams
        record = replace(record, members=tuple(members), next_hparams=tuple(hparams))
    return replace(plan, record=record)


def _score(agent: AgentRecord) -> Score:
    return agent.score or Score(math.nan, math.nan, 0)

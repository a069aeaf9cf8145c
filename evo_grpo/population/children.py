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
from evo_grpo.record.records import AgentRecord, RoundRecord
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
        restored = member.mutation.restores and member.id not in played
        if parent is None or restored:
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
    record, pair = tried.plan.record, tried.pair
    parents = {agent.agent: agent for agent in record.agents}
    first, second = parents[pair.first], parents[pair.second]
    assert child is not None, "the rank of the better parent has evaluated the child"
    ahead = compare(child.score, _score(first))
    record = replace(record, evaluation_tokens=record.evaluation_tokens + child.tokens)
    both = f"agents {pair.first} and {pair.second}"
    if ahead.difference > 0:  # NaN if the child has no finite score
        changes = changes_between(first.hparams, pair.hparams, tried.hp_config)
        mutation, born = Mutation("recombine", changes), record.round + 1
        member = Member(next_id, pair.place, first.member, born, mutation, second.member)
        record = _with_member(record, member, pair.hparams)
        kind = "recombined"
        text = f"agent {pair.place} became a child of {both}, ahead of agent {pair.first}"
    else:
        kind = "discarded"
        text = f"the child of {both} was discarded, since it is not ahead of agent {pair.first}"
    difference = ahead.difference, ahead.error, ahead.prompts
    text += difference_text(ahead)
    decision = Decision(kind, pair.place, pair.first, *difference, text)
    record = replace(record, decisions=(*record.decisions, decision))
    return replace(tried.plan, record=record)


def _with_member(record: RoundRecord, child: Member, hparams: Hparams) -> RoundRecord:
    """Return a record with a child in the place of the member that it names."""
    index = [member.agent for member in record.members].index(child.agent)
    old = record.members[index]
    if old.id not in {agent.member for agent in record.agents}:
        child = replace(child, id=old.id)  # of a member that has not trained
    members, values = list(record.members), list(record.next_hparams)
    members[index], values[index] = child, hparams
    superseded = ("copied", "kept")
    decisions = (d for d in record.decisions if d.agent != child.agent or d.kind not in superseded)
    return replace(
        record,
        members=tuple(members),
        next_hparams=tuple(values),
        decisions=tuple(decisions),
    )


def _score(agent: AgentRecord) -> Score:
    return agent.score or Score(math.nan, math.nan, 0)

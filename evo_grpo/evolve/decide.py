"""Pure functions that choose the next generation by fitness, with a reason per decision.

A selector plans the generation; copies and removals that a paired test does not support are dropped
from the plan.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evo_grpo.evolve.compare import Comparison, compare
from evo_grpo.evolve.explore.step import lower_lr
from evo_grpo.evolve.generation import Generation, changes_between, check_plan, next_generation
from evo_grpo.evolve.goals import ahead, best_first, ranked
from evo_grpo.evolve.protocols import Explorer, Offspring, Selector, Trial
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.problems import shown_value
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.types import Decision, Member, Mutation, Position, Score, Slot

ARCHIVE_LEVEL = 0.01
"""Probability, over all decisions of a run, of restoring an archive that is not better."""
RESTORED_LR = (0.5, 0.25)
"""Factors on the lr of the best agent ever, one for each copy of it that is restored."""
KL_LIMIT = 10.0
"""KL divergence from the reference, in nats per token, above which a policy has collapsed."""
COLLAPSE_LEVEL = 0.01
"""An agent without a gradient has collapsed if its gap to the best agent has at most this p."""


@dataclass(frozen=True)
class Standing:
    """An agent after an evaluation.

    `hparams` are the hyperparameters that it trained with. `history` has its scores, latest last,
    and is empty for an agent that failed. `collapsed` is the reason why the agent can no longer
    learn; empty if it can.
    """

    slot: Slot
    member: Member
    hparams: Hparams
    history: Sequence[Score]
    collapsed: str = ""


@dataclass(frozen=True)
class Strategy:
    """The settings that choose the next generation.

    Attributes:
        significance: Largest p-value of a difference that counts; None counts every difference.
        window: Maximum number of a member's latest scores that the selector gets, >= 1.
        archive_level: Largest p-value at which the archive, the best agent of earlier rounds,
            counts as ahead of the best agent of the round.
    """

    selector: Selector
    explorer: Explorer
    hp_config: HyperparameterConfig
    significance: float | None
    window: int = 1
    archive_level: float = ARCHIVE_LEVEL


@dataclass(frozen=True)
class TestedPlan:
    """A plan and the comparisons that it is based on.

    Attributes:
        plan: The agents of the next round, in ascending order of position.
        copies: Overwritten position -> how far its new parent is ahead; None if the overwritten
            agent has no fitness.
        kept: Position that keeps its agent because a planned copy was dropped -> the planned
            parent, and how far the parent is ahead, which is not significant.
        left: Position that leaves -> the weakest agent that stays, and how far it is ahead; None
            if the agent that leaves has no fitness.
    """

    plan: tuple[Offspring, ...]
    copies: Mapping[Position, Comparison | None]
    kept: Mapping[Position, tuple[Position, Comparison]]
    left: Mapping[Position, tuple[Position, Comparison] | None]


def decide(  # noqa: PLR0913 -- one argument for each result of a round
    standings: Sequence[Standing],
    places: int,
    archive: Standing | None,
    strategy: Strategy,
    rng: np.random.Generator,
    *,
    round: int,
    next_id: int,
    trials: Sequence[Trial] = (),
    fresh: Mapping[Slot, Score] | None = None,
) -> tuple[Generation, tuple[Decision, ...]]:
    """Return the agents of the next round and the decisions about the agents of this round.

    `standings` are ordered by position. The next round has at most `places` agents. `archive` is
    the best agent of earlier rounds. `round` was just evaluated, `next_id` is the first unused
    member id, and `trials` are all agents of all rounds so far. `fresh` maps the slots of the
    archive and of the round's best agent to scores on new samples, by which neither was selected;
    if a score is missing, the two are not compared.
    """
    # If all agents are unusable, collapsed ones may continue: there are no others.
    any_usable = any(map(_usable, standings))
    # Leave out rounds without a decision: their fitness is the mean reward of training.
    measured = [
        [old for old in s.history[:-1] if old.per_prompt or not old.steps] + [*s.history[-1:]]
        for s in standings
    ]
    histories = [
        history[-strategy.window :] if _usable(s) or not any_usable else []
        for s, history in zip(standings, measured, strict=True)
    ]
    if archive is not None and not any(histories):
        return _all_restored(standings, places, archive, strategy, round, next_id)
    method = f"{type(strategy.selector).__name__}.plan"
    answer = strategy.selector.plan(histories, places, rng)
    plan = check_plan(method, answer, len(standings), places)
    scores = [history[-1] if history else None for history in histories]
    # Of two agents that tie, one can be replaced without loss, and the mean of two relatives at
    # the end of a run is better than either.
    pair = len(standings) == places == 2
    tested = drop_unsupported(plan, scores, None if pair else strategy.significance)
    generation = next_generation(
        tested.plan,
        [s.member for s in standings],
        [s.hparams for s in standings],
        strategy.explorer,
        strategy.hp_config,
        rng,
        round=round,
        next_id=next_id,
        trials=trials,
    )
    decisions = _decisions(standings, tested, generation, scores, strategy)
    decline = _decline(standings, archive, fresh or {}, strategy.archive_level)
    if archive is not None and decline is not None:
        by_agent = {s.slot: score for s, score in zip(standings, scores, strict=True)}
        generation, decisions = _restored(
            generation, decisions, by_agent, archive, strategy, decline, round
        )
    return generation, tuple(decisions)


def enters_archive(best: Score, archive: Score) -> bool:
    """Return whether the best agent replaces the archive: its score on new samples is not lower."""
    return best_first(best) <= best_first(archive)


def keep_all(
    standings: Sequence[Standing], next_id: int, *, drop: bool
) -> tuple[Generation, tuple[Decision, ...]]:
    """Return all agents unchanged, and a decision for each agent that collapsed or leaves.

    With `drop`, agents that failed or collapsed leave, unless all agents failed or collapsed.
    """
    usable = [s for s in standings if _usable(s)] or standings
    decisions = [
        _failed(s.slot) if not s.collapsed else _decision("collapsed", s.slot, None, None, _why(s))
        for s in standings
        if s not in usable and (drop or s.collapsed)
    ]
    staying = usable if drop else standings
    generation = Generation(
        tuple(s.member for s in staying),
        tuple(s.hparams for s in staying),
        tuple(s.slot for s in staying),
        next_id,
    )
    return generation, tuple(decisions)


def why_collapsed(
    score: Score, best: Score, kl: float, dead_steps: int, *, last: bool = False
) -> str:
    """Return why an agent can no longer learn, or an empty string if it can.

    Equal rewards are a reason only if the agent is significantly behind the best agent.

    Args:
        score: Fitness of the agent.
        best: Fitness of the best agent of the round, on the same prompts.
        kl: Mean KL divergence from the reference, in nats per token; 0 if none is computed.
        dead_steps: Number of latest GRPO steps in a row in which all groups of the agent had equal
            rewards; 0 if fewer than `evolve.dead_steps`.
        last: Whether the run ends here: then an evaluation in which all prompts had equal rewards
            counts as a dead step, because no later step can show the effect of the last update.
    """
    if kl > KL_LIMIT:
        return f"its KL divergence from the reference is {kl:.3g} nats per token"
    equal_rewards = last and score.n > 1 and len(set(score.per_prompt)) == 1
    if not (dead_steps or equal_rewards):
        return ""
    behind = ahead(best, score, COLLAPSE_LEVEL)
    if not behind.significant(COLLAPSE_LEVEL):
        return ""
    evidence = (
        f"all groups of its last {dead_steps} steps"
        if dead_steps
        else "all prompts of its last evaluation"
    )
    return (
        f"{evidence} had equal rewards, so it can no longer learn, and it is behind the best"
        f"{_difference_text(behind)}"
    )


def _usable(standing: Standing) -> bool:
    return bool(standing.history) and not standing.collapsed


def _decline(
    standings: Sequence[Standing],
    archive: Standing | None,
    fresh: Mapping[Slot, Score],
    level: float,
) -> Comparison | None:
    """Return how far `archive` is ahead of the best agent in `fresh`; None if not significantly."""
    if archive is None or archive.slot not in fresh:
        return None
    best = next((fresh[s.slot] for s in standings if s.slot in fresh), None)
    if best is None:
        return None
    ahead = compare(fresh[archive.slot], best)
    return ahead if ahead.significant(level) else None


def _restored(
    generation: Generation,
    decisions: list[Decision],
    scores: Mapping[Slot, Score | None],
    archive: Standing,
    strategy: Strategy,
    decline: Comparison,
    round: int,
) -> tuple[Generation, list[Decision]]:
    """Replace the worst agents of a generation by copies of the best agent ever, at lower lrs."""
    present = [scores[parent] for parent in generation.parents]
    order = list[int](ranked(present, strategy.significance))
    order += [place for place in range(len(present)) if place not in order]
    worst = sorted(order[-len(RESTORED_LR) :])
    agents = [generation.slots[place] for place in worst]
    next_id = generation.next_id
    copies = _copies_of_archive(archive, agents, strategy, decline, round, next_id)
    members, hparams = list(generation.members), list(generation.hparams)
    parents = list(generation.parents)
    for place, (member, values, _) in zip(worst, copies, strict=True):
        members[place], hparams[place], parents[place] = member, values, archive.slot
    new = Generation(tuple(members), tuple(hparams), tuple(parents), next_id + len(copies))
    remaining = [d for d in decisions if d.agent not in agents or d.kind == "collapsed"]
    return new, [*remaining, *(decision for _, _, decision in copies)]


def _all_restored(
    standings: Sequence[Standing],
    places: int,
    archive: Standing,
    strategy: Strategy,
    round: int,
    next_id: int,
) -> tuple[Generation, tuple[Decision, ...]]:
    """Return a generation of copies of the best agent ever, after a round in which all failed."""
    agents = [s.slot for s in standings]
    count = min(places, len(RESTORED_LR), len(agents))
    copies = _copies_of_archive(archive, agents[:count], strategy, None, round, next_id)
    members, hparams, restored = zip(*copies, strict=True)
    new = Generation(members, hparams, (archive.slot,) * count, next_id + count)
    return new, (*restored, *map(_failed, agents[count:]))


def _copies_of_archive(
    archive: Standing,
    agents: Sequence[Slot],
    strategy: Strategy,
    decline: Comparison | None,
    round: int,
    next_id: int,
) -> list[tuple[Member, Hparams, Decision]]:
    """Return copies of the best agent ever for slots `agents`, one per factor in `RESTORED_LR`."""
    copies: list[tuple[Member, Hparams, Decision]] = []
    for number, (agent, factor) in enumerate(zip(agents, RESTORED_LR, strict=False)):
        values = lower_lr(archive.hparams, factor, strategy.hp_config)
        changes = changes_between(archive.hparams, values, strategy.hp_config)
        mutation = Mutation("restore", changes)
        member = Member(next_id + number, agent, archive.member.id, round + 1, mutation)
        text = (
            f"agent {agent} took the weights of the best agent so far (member {archive.member.id}) "
            f"at lr {shown_value(values.lr, 2)}, since the population fell behind it"
        )
        copies.append((member, values, _decision("restored", agent, None, decline, text)))
    return copies


def _decisions(
    standings: Sequence[Standing],
    tested: TestedPlan,
    generation: Generation,
    scores: Sequence[Score | None],
    strategy: Strategy,
) -> list[Decision]:
    agents = [s.slot for s in standings]
    hparams = dict(zip(generation.slots, generation.hparams, strict=True))
    sources = dict(zip(generation.slots, generation.parents, strict=True))
    parents = {offspring.position: offspring.parent for offspring in tested.plan}
    decisions: list[Decision] = []
    for standing in standings:
        if standing.collapsed and sources.get(standing.slot) != standing.slot:
            agent = standing.slot
            decisions.append(_decision("collapsed", agent, None, None, _why(standing)))
    for position, lead in tested.copies.items():
        agent, parent = agents[position], agents[parents[position]]
        lr = shown_value(hparams[agent].lr, 2)
        text = f"agent {agent} took agent {parent}'s weights at lr {lr}"
        decisions.append(_decision("copied", agent, parent, lead, text))
    for position, (parent, lead) in tested.kept.items():
        agent = agents[position]
        text = (
            f"agent {agent} kept its weights, since agent {agents[parent]} is not significantly "
            "ahead"
        )
        decisions.append(_decision("kept", agent, agents[parent], lead, text))
    for position, compared in tested.left.items():
        agent = agents[position]
        if compared is None:
            if not standings[position].collapsed:
                decisions.append(_failed(agent))
            continue
        other, lead = agents[compared[0]], compared[1]
        room = len(generation.slots)
        places = f"{room} places" if room > 1 else "one place"
        why = _why_left(other, lead, scores[position], scores[compared[0]], strategy)
        text = f"agent {agent} left, since the next round has {places} for {len(agents)} agents, "
        text += f"and {why}"
        decisions.append(_decision("left", agent, other, lead, text))
    return decisions


def _why_left(
    other: Slot,
    lead: Comparison,
    score: Score | None,
    other_score: Score | None,
    strategy: Strategy,
) -> str:
    """Return why an agent with `score` left while agent `other` stays."""
    level = strategy.significance

    def counts(lead_of: Comparison) -> bool:
        return lead_of.difference > 0 if level is None else lead_of.significant(level)

    if counts(lead):
        return f"agent {other}, which stays, is ahead"
    if score is not None and other_score is not None and counts(ahead(score, other_score, level)):
        return f"the selection kept agent {other}, which is behind"
    how = "by lot" if getattr(strategy.selector, "by_lot", False) else "by the selection"
    return f"its tie with agent {other}, which stays, was decided {how}"


def _why(standing: Standing) -> str:
    return f"agent {standing.slot} collapsed: {standing.collapsed}"


def _failed(agent: Slot) -> Decision:
    text = f"agent {agent} left: its update or its fitness was not finite"
    return _decision("left", agent, None, None, text)


def _difference_text(lead: Comparison) -> str:
    """Return a comparison as the end of a sentence; empty if no prompt is shared."""
    if lead.prompts == 0:
        return ""
    error = "" if math.isnan(lead.error) else f" ± {lead.error:.2f}"
    shared = "shared prompt" if lead.prompts == 1 else "shared prompts"
    goal = f" in {lead.objective}" if lead.objective else ""
    steps = f" and {lead.steps} steps of training" if lead.steps else ""
    return f": {lead.difference:+.2f}{error}{goal} on {lead.prompts} {shared}{steps}"


def _decision(
    kind: str, agent: Slot, other: Slot | None, lead: Comparison | None, text: str
) -> Decision:
    if lead is None:
        return Decision(kind, agent, other, math.nan, math.nan, 0, text)
    sentence = text + _difference_text(lead)
    return Decision(kind, agent, other, lead.difference, lead.error, lead.prompts, sentence)


def drop_unsupported(
    plan: Sequence[Offspring], scores: Sequence[Score | None], level: float | None
) -> TestedPlan:
    """Return a plan without the copies and removals that a paired test does not support.

    The planned copies overwrite the agents that do not survive in the plan, best first; if the
    parent of a copy is not significantly better than the agent, the agent stays. Then the agents
    that would leave, best first, replace the worst agents that would stay, as long as those are
    significantly worse; elites and parents of copies stay. With several goals, an agent is better
    if it dominates (see `evolve.goals`), and each copy overwrites the agent that the plan names.

    `scores` are by position; None is an agent that cannot be ranked, which is overwritten without a
    test. `level` is the largest p-value of a significant difference; None keeps the plan.
    """
    parents = {offspring.position: offspring.parent for offspring in plan}
    elites = {offspring.position for offspring in plan if offspring.elite}
    dropped: dict[Position, tuple[Position, Comparison]] = {}
    if level is not None:
        parents, dropped = _supported(parents, elites, scores, level)
    new = tuple(
        Offspring(position, parents[position], position in elites) for position in sorted(parents)
    )
    copies = {
        position: _compared(scores, parent, position, level)
        for position, parent in parents.items()
        if position != parent
    }
    return TestedPlan(new, copies, dropped, _left(parents, scores, level))


def _supported(
    planned: Mapping[Position, Position],
    elites: set[Position],
    scores: Sequence[Score | None],
    level: float,
) -> tuple[dict[Position, Position], dict[Position, tuple[Position, Comparison]]]:
    survivors = {position for position, parent in planned.items() if position == parent}
    order = ranked(scores, level)
    several = any(score is not None and score.further for score in scores)
    waiting = [position for position in order if position not in survivors]
    positions = map(Position, range(len(scores)))
    unranked = [p for p in positions if p not in survivors and p not in order]
    parents = {position: position for position in survivors}
    dropped: dict[Position, tuple[Position, Comparison]] = {}
    for target, parent in planned.items():
        if target == parent:
            continue
        if several:
            position = target
            waiting = [p for p in waiting if p != target]
        elif not waiting:
            # Only agents that cannot be ranked are left to be overwritten.
            parents[unranked.pop(0)] = parent
            continue
        else:
            position = waiting.pop(0)
        lead = _compared(scores, parent, position, level)
        if lead is None or lead.significant(level):
            parents[position] = parent
        else:
            parents[position] = position
            survivors.add(position)
            dropped[position] = (parent, lead)
    # Agents that would leave take the places of significantly worse ones that stay.
    parents_of_copies = {parent for position, parent in parents.items() if position != parent}
    movable = [p for p in reversed(order) if p in survivors - elites - parents_of_copies]
    for weak, strong in zip(movable, waiting, strict=False):
        lead = _compared(scores, strong, weak, level)
        if lead is None or not lead.significant(level):
            break
        del parents[weak]
        dropped.pop(weak, None)
        parents[strong] = strong
    return parents, dropped


def _left(
    parents: Mapping[Position, Position], scores: Sequence[Score | None], level: float | None
) -> dict[Position, tuple[Position, Comparison] | None]:
    staying = [position for position in ranked(scores, level) if parents.get(position) == position]
    leaving: dict[Position, tuple[Position, Comparison] | None] = {}
    for number in range(len(scores)):
        position = Position(number)
        if position in parents:
            continue
        lead = _compared(scores, staying[-1], position, level) if staying else None
        leaving[position] = None if lead is None else (staying[-1], lead)
    return leaving


def _compared(
    scores: Sequence[Score | None], first: Position, second: Position, level: float | None
) -> Comparison | None:
    score, other = scores[first], scores[second]
    return None if score is None or other is None else ahead(score, other, level)

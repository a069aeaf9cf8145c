"""From the fitness of a round to the next generation, each decision with its reason. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from evo_grpo.errors import ShapeError
from evo_grpo.evolve.compare import Comparison, compare
from evo_grpo.evolve.generation import Generation, check_plan, next_generation
from evo_grpo.evolve.settle import Settled, settle
from evo_grpo.schema.hparams import LEAST_LR
from evo_grpo.schema.shown import shown_value
from evo_grpo.types import Decision, Member, Mutation, Position, Score, Slot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from evo_grpo.evolve.explore.protocol import Explorer, Trial
    from evo_grpo.evolve.select.protocol import Selector
    from evo_grpo.schema.hparams import Hparams
    from evo_grpo.schema.search_space import HyperparameterConfig

RESTORED_LR = (0.5, 0.25)
"""What the lr of the best agent ever is multiplied by when it comes back, once for each copy."""
KL_LIMIT = 10.0
"""Nats per token, more than a policy that still speaks the base's language is ever away from it."""
COLLAPSE_LEVEL = 0.01
"""p-value for being behind the best, from which an agent without a gradient counts as collapsed."""


class Standing(Protocol):
    """An agent after an evaluation, as evolution sees it: what it reads of `cohort.AgentState`."""

    @property
    def slot(self) -> Slot:
        """Where its weights are."""
        ...

    @property
    def member(self) -> Member:
        """Who it is."""
        ...

    @property
    def hparams(self) -> Hparams:
        """What it trained with."""
        ...

    @property
    def history(self) -> Sequence[Score]:
        """Its scores, latest last; empty for an agent that failed."""
        ...

    @property
    def collapsed(self) -> str:
        """Why it can no longer learn, empty where it can."""
        ...


@dataclass(frozen=True)
class Strategy:
    """How the next generation is found.

    Attributes:
        selector: Plans who survives, and who is copied.
        explorer: Varies the hyperparameters.
        hp_config: Which may change, within which bounds.
        significance: p-value up to which a difference between two agents counts; None takes every
            difference for real.
        window: Latest scores of a member that the selector sees, >= 1.
    """

    selector: Selector
    explorer: Explorer
    hp_config: HyperparameterConfig
    significance: float | None
    window: int = 1


def decide(
    standings: Sequence[Standing],
    places: int,
    archive: Standing | None,
    strategy: Strategy,
    rng: np.random.Generator,
    *,
    round: int,
    next_id: int,
    trials: Sequence[Trial] = (),
) -> tuple[Generation, tuple[Decision, ...]]:
    """Return the agents of the next round, and what was decided about those of this one.

    Args:
        standings: The agents of this round, by position.
        places: Agents that the next round has room for.
        archive: The best agent before this round, in a slot of its own; None where none is
            kept.
        strategy: How.
        rng: The stream of all draws.
        round: The round that has just been evaluated (0-based).
        next_id: A member id that no member of the run has had.
        trials: All agents of all rounds so far, this one too, for explorations that learn.

    Raises:
        RunFailedError: Nobody can be ranked, and no archive is there to go on from.
        ShapeError: The selector's plan has more agents than places, or cannot be carried out.
    """
    # Where nobody is usable, collapsed agents may go on: there are no others.
    somebody = any(map(_usable, standings))
    histories = [
        s.history[-strategy.window :] if _usable(s) or not somebody else [] for s in standings
    ]
    if archive is not None and not any(histories):
        return _all_restored(standings, places, archive, strategy, round, next_id)
    plan = strategy.selector.plan(histories, places, rng)
    if len(plan) > places:
        raise ShapeError(
            f"plan: expected at most {places} offspring, one per place of round {round + 2}, got "
            f"{len(plan)} from {type(strategy.selector).__name__}; leave out the worst agents"
        )
    check_plan(plan, len(standings))
    scores = [history[-1] if history else None for history in histories]
    settled = settle(plan, scores, strategy.significance)
    generation = next_generation(
        settled.plan,
        [s.member for s in standings],
        [s.hparams for s in standings],
        strategy.explorer,
        strategy.hp_config,
        rng,
        round=round,
        next_id=next_id,
        trials=trials,
    )
    decisions = _decisions(standings, settled, generation)
    fall = _fall(scores, archive, strategy.significance)
    if archive is not None and fall is not None:
        by_agent = {s.slot: score for s, score in zip(standings, scores, strict=True)}
        generation, decisions = _restored(
            generation, decisions, by_agent, archive, strategy, fall, round
        )
    return generation, tuple(decisions)


def keep_all(
    standings: Sequence[Standing], next_id: int, *, drop: bool
) -> tuple[Generation, tuple[Decision, ...]]:
    """Return the agents as they are after the last round, without those that collapsed.

    Args:
        standings: The agents of the last round, by position.
        next_id: A member id that no member of the run has had.
        drop: Whether agents that failed or collapsed leave, where others are there.
    """
    stay = [s for s in standings if _usable(s) or not drop] or list(standings)
    staying = {s.slot for s in stay}
    decisions = [
        _failed(s.slot) if not s.collapsed else _decision("collapsed", s.slot, None, None, _why(s))
        for s in standings
        if s.slot not in staying
    ]
    generation = Generation(
        tuple(s.member for s in stay),
        tuple(s.hparams for s in stay),
        tuple(s.slot for s in stay),
        next_id,
    )
    return generation, tuple(decisions)


def why_collapsed(
    score: Score, best: Score, kl: float, dead_steps: int, *, last: bool = False
) -> str:
    """Return why an agent can no longer learn, an empty string where it can.

    Args:
        score: Its fitness.
        best: That of the best agent of the round, on the same prompts.
        kl: Mean KL divergence from the reference, nats per token; 0 where none is computed.
        dead_steps: GRPO steps in a row in which all its groups had equal rewards; 0 where they are
            too few to tell. They end an agent only where it is behind: one that always answers
            right has them too.
        last: Whether no steps follow that could show what the last update did. Then an evaluation
            in which all prompts had equal rewards counts as a dead step.
    """
    if kl > KL_LIMIT:
        return f"its KL divergence from the reference is {kl:.3g} nats per token"
    alike = last and score.n > 1 and len(set(score.per_prompt)) == 1
    if (dead_steps or alike) and compare(best, score).significant(COLLAPSE_LEVEL):
        what = (
            f"all groups of its last {dead_steps} steps"
            if dead_steps
            else "all prompts of its last evaluation"
        )
        return (
            f"{what} had equal rewards, so it can no longer learn, and it is behind the best"
            f"{_by(compare(best, score))}"
        )
    return ""


def _usable(standing: Standing) -> bool:
    """Return whether an agent may go on, or be copied."""
    return bool(standing.history) and not standing.collapsed


def _fall(
    scores: Sequence[Score | None], archive: Standing | None, level: float | None
) -> Comparison | None:
    """Return how far the best agent ever is ahead of the present best, where that is no chance."""
    if archive is None or level is None:
        return None
    best = max(
        (score for score in scores if score is not None),
        key=lambda score: score.mean,
        default=None,
    )
    if best is None:
        return None
    found = compare(archive.history[-1], best)
    return found if found.significant(level) else None


def _restored(
    generation: Generation,
    decisions: list[Decision],
    scores: Mapping[Slot, Score | None],
    archive: Standing,
    strategy: Strategy,
    fall: Comparison,
    round: int,
) -> tuple[Generation, list[Decision]]:
    """Give the last places of a generation to the best agent ever, at lower learning rates."""

    def worth(place: int) -> float:
        score = scores[generation.parents[place]]
        return -math.inf if score is None else score.mean

    order = sorted(range(len(generation.members)), key=lambda i: (worth(i), -i))
    chosen = sorted(order[: len(RESTORED_LR)])
    members, hparams = list(generation.members), list(generation.hparams)
    parents, next_id = list(generation.parents), generation.next_id
    for place, factor in zip(chosen, RESTORED_LR, strict=False):
        agent = members[place].agent
        members[place], hparams[place] = _bring_back(
            archive, agent, factor, strategy.hp_config, round + 1, next_id
        )
        parents[place] = archive.slot
        next_id += 1
        decisions = [d for d in decisions if d.agent != agent or d.kind == "collapsed"]
        decisions.append(_restoration(archive, agent, hparams[place], fall))
    made = replace(
        generation,
        members=tuple(members),
        hparams=tuple(hparams),
        parents=tuple(parents),
        next_id=next_id,
    )
    return made, decisions


def _all_restored(
    standings: Sequence[Standing],
    places: int,
    archive: Standing,
    strategy: Strategy,
    round: int,
    next_id: int,
) -> tuple[Generation, tuple[Decision, ...]]:
    """Go on from the best agent ever alone: nobody of this round can be ranked."""
    members: list[Member] = []
    hparams: list[Hparams] = []
    decisions: list[Decision] = []
    nothing = Comparison(math.nan, math.nan, 0, 0.0)
    count = min(places, len(RESTORED_LR), len(standings))
    for standing, factor in zip(standings[:count], RESTORED_LR, strict=False):
        agent = standing.slot
        member, values = _bring_back(
            archive, agent, factor, strategy.hp_config, round + 1, next_id + len(members)
        )
        members.append(member)
        hparams.append(values)
        decisions.append(_restoration(archive, agent, values, nothing))
    decisions += [_failed(s.slot) for s in standings[count:]]
    made = Generation(
        tuple(members),
        tuple(hparams),
        (archive.slot,) * count,
        next_id + count,
    )
    return made, tuple(decisions)


def _bring_back(
    archive: Standing,
    agent: Slot,
    factor: float,
    hp_config: HyperparameterConfig,
    born: int,
    member_id: int,
) -> tuple[Member, Hparams]:
    old = archive.hparams.lr
    new = max(old * factor, LEAST_LR)
    if "lr" in hp_config.names():
        new = hp_config["lr"].clip(new)
    mutation = Mutation("restore", {"lr": (old, new)} if new != old else {})
    member = Member(member_id, agent, archive.member.id, born, mutation)
    return member, archive.hparams.replace(lr=new)


def _decisions(
    standings: Sequence[Standing], settled: Settled, generation: Generation
) -> list[Decision]:
    agents = [s.slot for s in standings]
    hparams = dict(zip(generation.slots, generation.hparams, strict=True))
    found: list[Decision] = []
    for standing in standings:
        if standing.collapsed and standing.slot not in _survivors(generation):
            agent = standing.slot
            found.append(_decision("collapsed", agent, None, None, _why(standing)))
    for position, ahead in settled.copies.items():
        agent, parent = agents[position], agents[_parent(settled, position)]
        lr = shown_value(hparams[agent].lr, 2)
        text = f"agent {agent} took agent {parent}'s weights at lr {lr}"
        found.append(_decision("copied", agent, parent, ahead, text + _by(ahead)))
    for position, (parent, ahead) in settled.kept.items():
        agent = agents[position]
        text = (
            f"agent {agent} kept its weights: agent {agents[parent]} cannot be told from it"
            f"{_by(ahead)}"
        )
        found.append(_decision("kept", agent, agents[parent], ahead, text))
    for position, compared in settled.left.items():
        agent = agents[position]
        if compared is None:
            if not standings[position].collapsed:
                found.append(_failed(agent))
            continue
        other, ahead = agents[compared[0]], compared[1]
        how = "is ahead" if ahead.difference > 0 else "won its place by the draw"
        text = f"agent {agent} left: agent {other}, the weakest that stays, {how}{_by(ahead)}"
        found.append(_decision("left", agent, other, ahead, text))
    return found


def _why(standing: Standing) -> str:
    return f"agent {standing.slot} collapsed: {standing.collapsed}"


def _survivors(generation: Generation) -> set[Slot]:
    pairs = zip(generation.slots, generation.parents, strict=True)
    return {slot for slot, parent in pairs if slot == parent}


def _parent(settled: Settled, position: Position) -> Position:
    return next(o.parent for o in settled.plan if o.position == position)


def _failed(agent: Slot) -> Decision:
    text = f"agent {agent} left: its update or its fitness was not finite"
    return _decision("left", agent, None, None, text)


def _restoration(archive: Standing, agent: Slot, hparams: Hparams, fall: Comparison) -> Decision:
    best = archive.member
    text = (
        f"agent {agent} took the weights of the best agent so far (member {best.id}) at lr "
        f"{shown_value(hparams.lr, 2)}, since the population fell behind it{_by(fall)}"
    )
    return _decision("restored", agent, None, fall, text)


def _by(ahead: Comparison) -> str:
    if ahead.prompts == 0:
        return ""
    error = "" if math.isnan(ahead.error) else f" ± {ahead.error:.2f}"
    shared = "shared prompt" if ahead.prompts == 1 else "shared prompts"
    return f": {ahead.difference:+.2f}{error} on {ahead.prompts} {shared}"


def _decision(
    kind: str, agent: Slot, other: Slot | None, ahead: Comparison | None, sentence: str
) -> Decision:
    if ahead is None:
        return Decision(kind, agent, other, math.nan, math.nan, 0, sentence)
    return Decision(kind, agent, other, ahead.difference, ahead.error, ahead.prompts, sentence)

"""From the fitness of a round to the next generation, each decision with its reason. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evo_grpo.evolve.compare import Comparison, compare
from evo_grpo.evolve.explore.step import lower_lr
from evo_grpo.evolve.generation import Generation, check_plan, next_generation
from evo_grpo.evolve.settle import Settled, settle
from evo_grpo.schema.shown import shown_value
from evo_grpo.types import Decision, Member, Mutation, Score, Slot

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


@dataclass(frozen=True)
class Standing:
    """An agent after an evaluation, as evolution sees it.

    Attributes:
        slot: Where its weights are.
        member: Who it is.
        hparams: What it trained with.
        history: Its scores, latest last; empty for an agent that failed.
        collapsed: Why it can no longer learn, empty where it can.
    """

    slot: Slot
    member: Member
    hparams: Hparams
    history: Sequence[Score]
    collapsed: str = ""


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

    Standings are by position. `places` are those of the next round, `archive` the best agent before
    this round in a slot of its own, None where none is kept. All draws are from `rng`. `round` has
    just been evaluated (0-based), `next_id` is a member id that no member of the run has had, and
    `trials` are all agents of all rounds so far, this one too, for explorations that learn.

    Raises:
        RunFailedError: Nobody can be ranked, and no archive is there to go on from.
        ShapeError: The selector's plan cannot be carried out, or has more agents than places.
    """
    # Where nobody is usable, collapsed agents may go on: there are no others.
    somebody = any(map(_usable, standings))
    histories = [
        s.history[-strategy.window :] if _usable(s) or not somebody else [] for s in standings
    ]
    if archive is not None and not any(histories):
        return _all_restored(standings, places, archive, strategy, round, next_id)
    plan = strategy.selector.plan(histories, places, rng)
    check_plan(f"{type(strategy.selector).__name__}.plan", plan, len(standings), places)
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
    """Return the agents as they are after the last round.

    With `drop` those that failed or collapsed leave, where others are there.
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
    agents = [generation.slots[place] for place in chosen]
    back, found = _bring_back(archive, agents, strategy, fall, round, generation.next_id)
    members, hparams = list(generation.members), list(generation.hparams)
    parents = list(generation.parents)
    for number, place in enumerate(chosen):
        members[place], hparams[place] = back.members[number], back.hparams[number]
        parents[place] = archive.slot
    kept = [d for d in decisions if d.agent not in agents or d.kind == "collapsed"]
    made = Generation(tuple(members), tuple(hparams), tuple(parents), back.next_id)
    return made, [*kept, *found]


def _all_restored(
    standings: Sequence[Standing],
    places: int,
    archive: Standing,
    strategy: Strategy,
    round: int,
    next_id: int,
) -> tuple[Generation, tuple[Decision, ...]]:
    """Go on from the best agent ever alone: nobody of this round can be ranked."""
    agents = [s.slot for s in standings]
    count = min(places, len(RESTORED_LR), len(agents))
    made, found = _bring_back(archive, agents[:count], strategy, None, round, next_id)
    return made, (*found, *map(_failed, agents[count:]))


def _bring_back(
    archive: Standing,
    agents: Sequence[Slot],
    strategy: Strategy,
    fall: Comparison | None,
    round: int,
    next_id: int,
) -> tuple[Generation, list[Decision]]:
    """Return the best agent ever in the place of others, each at another of `RESTORED_LR`."""
    members: list[Member] = []
    hparams: list[Hparams] = []
    decisions: list[Decision] = []
    for number, (agent, factor) in enumerate(zip(agents, RESTORED_LR, strict=False)):
        values, changes = lower_lr(archive.hparams, factor, strategy.hp_config)
        mutation = Mutation("restore", changes)
        members.append(Member(next_id + number, agent, archive.member.id, round + 1, mutation))
        hparams.append(values)
        text = (
            f"agent {agent} took the weights of the best agent so far (member {archive.member.id}) "
            f"at lr {shown_value(values.lr, 2)}, since the population fell behind it"
        )
        decisions.append(_decision("restored", agent, None, fall, text))
    parents = (archive.slot,) * len(members)
    made = Generation(tuple(members), tuple(hparams), parents, next_id + len(members))
    return made, decisions


def _decisions(
    standings: Sequence[Standing], settled: Settled, generation: Generation
) -> list[Decision]:
    agents = [s.slot for s in standings]
    hparams = dict(zip(generation.slots, generation.hparams, strict=True))
    sources = dict(zip(generation.slots, generation.parents, strict=True))
    parents = {offspring.position: offspring.parent for offspring in settled.plan}
    found: list[Decision] = []
    for standing in standings:
        if standing.collapsed and sources.get(standing.slot) != standing.slot:
            agent = standing.slot
            found.append(_decision("collapsed", agent, None, None, _why(standing)))
    for position, ahead in settled.copies.items():
        agent, parent = agents[position], agents[parents[position]]
        lr = shown_value(hparams[agent].lr, 2)
        text = f"agent {agent} took agent {parent}'s weights at lr {lr}"
        found.append(_decision("copied", agent, parent, ahead, text))
    for position, (parent, ahead) in settled.kept.items():
        agent = agents[position]
        text = f"agent {agent} kept its weights: agent {agents[parent]} cannot be told from it"
        found.append(_decision("kept", agent, agents[parent], ahead, text))
    for position, compared in settled.left.items():
        agent = agents[position]
        if compared is None:
            if not standings[position].collapsed:
                found.append(_failed(agent))
            continue
        other, ahead = agents[compared[0]], compared[1]
        how = "is ahead" if ahead.difference > 0 else "won its place by the draw"
        text = f"agent {agent} left: agent {other}, the weakest that stays, {how}"
        found.append(_decision("left", agent, other, ahead, text))
    return found


def _why(standing: Standing) -> str:
    return f"agent {standing.slot} collapsed: {standing.collapsed}"


def _failed(agent: Slot) -> Decision:
    text = f"agent {agent} left: its update or its fitness was not finite"
    return _decision("left", agent, None, None, text)


def _by(ahead: Comparison) -> str:
    if ahead.prompts == 0:
        return ""
    error = "" if math.isnan(ahead.error) else f" ± {ahead.error:.2f}"
    shared = "shared prompt" if ahead.prompts == 1 else "shared prompts"
    return f": {ahead.difference:+.2f}{error} on {ahead.prompts} {shared}"


def _decision(
    kind: str, agent: Slot, other: Slot | None, ahead: Comparison | None, text: str
) -> Decision:
    """Return a decision, whose sentence ends with the comparison that it rests on."""
    if ahead is None:
        return Decision(kind, agent, other, math.nan, math.nan, 0, text)
    sentence = text + _by(ahead)
    return Decision(kind, agent, other, ahead.difference, ahead.error, ahead.prompts, sentence)

"""One round: agents train, are evaluated, saved and selected; the next ones are copied and mutated.

Read `play_round` top to bottom; each stage is one call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from evo_grpo.envs.protocol import Environment
from evo_grpo.errors import RunFailedError, ShapeError
from evo_grpo.evolve.decide import Standing, Strategy, decide, keep_all, why_collapsed
from evo_grpo.evolve.explore.protocol import Trial
from evo_grpo.evolve.generation import Generation
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.evaluate import race, why_unranked
from evo_grpo.population.no_signal import warn_without_signal
from evo_grpo.population.rules import RoundSettings
from evo_grpo.population.stats import Stopwatch, Tally, agent_records, completion_rows
from evo_grpo.population.steps import Limit, RunWriter, train
from evo_grpo.record.observer import Observer
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.stopping import Played, best_of, rules_that_hold
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.seeding import derive, generator
from evo_grpo.types import KEPT_SCORES, Decision, Member, Score, Slot

T = TypeVar("T")


class Steerer:
    """Carries out what a person asks of a run between two rounds; of this class nobody asks."""

    def steered(self, record: RoundRecord, *, next_id: int, last: bool) -> RoundRecord:
        """Return a round that is not recorded yet, with what became of the requests until its end.

        All ranks call it alike. `next_id` is a member id that no member of the run has had, `last`
        says that no round follows.
        """
        del next_id, last
        return record

    def wait(self, record: RoundRecord) -> RoundRecord:
        """Wait as long as the run is paused, and carry out what is asked for meanwhile.

        Takes the round as it is recorded, and returns it as it is recorded then.
        """
        return record


def play_round(  # noqa: PLR0913 -- a round meets all parts of a run
    cohort: Cohort,
    env: Environment[Any],
    settings: RoundSettings,
    slots: Sequence[Slot],
    round: int,
    *,
    writer: RunWriter,
    observer: Observer,
    limit: Limit | None = None,
    past: Sequence[RoundRecord] = (),
    steering: Steerer | None = None,
) -> RoundRecord:
    """Train, evaluate, save, select and mutate.

    `limit` ends training early. `past` are the rounds before it, as far as they are known.
    `steering` is what a person asks for between two rounds; None where nobody can.

    Returns:
        The round as recorded. The cohort already holds the next generation, whose slots are
        `next_slots(record)`.

    Raises:
        RunFailedError: When no agent is left that can be ranked.
    """
    watch, steering = Stopwatch(), steering or Steerer()
    started, start = time.time(), time.perf_counter()
    tallies, starts = train(
        cohort, env, settings, slots, round,
        watch=watch, writer=writer, observer=observer, limit=limit, past=past,
    )  # fmt: skip
    observer.stage(round, "evaluate", 0, 1)
    with watch.phase("evaluate"):
        scores, evaluation_tokens = _fitness(cohort, env, settings, slots, round, tallies)
    with watch.phase("checkpoint"):
        saved = of_all(cohort, slots, lambda slot: writer.checkpoint(cohort, round, slot))
    stopped = _stopped(cohort, settings, past, scores, tallies, evaluation_tokens, since=start)
    # The limit comes first, for it hears of every evaluation.
    limited = limit is not None and limit.reached(scores)
    last = limited or bool(stopped) or round + 1 >= settings.population.rounds
    with watch.phase("evolve"):
        generation, decisions = _evolve(
            cohort, settings, slots, round, scores, tallies, past, last=last
        )
        _archive_best(cohort, settings, slots, scores)
    seconds = time.perf_counter() - start
    record = RoundRecord(
        round=round,
        agents=agent_records(cohort, slots, round, tallies, scores, saved, seconds),
        seconds=dict(watch.seconds),
        members=generation.members,
        next_hparams=generation.hparams,
        mutable=tuple(cohort.hp_config.names()),
        decisions=decisions,
        starts=starts,
        evaluation_tokens=evaluation_tokens,
        reduced=_reduced(cohort),
        started=started,
        ended=started + seconds,  # the wall clock may have been set back
        stopped=stopped,
    )
    record = steering.steered(record, next_id=generation.next_id, last=last)
    writer.commit(record, completion_rows(round, slots, tallies, settings.record.completions))
    observer.round_done(record)
    record = steering.wait(record)
    if record.steering:
        generation = recorded_generation(cohort, slots, record)
    # After the round is recorded: should a crash come in between, a resume applies the record.
    inherit = settings.evolve.inherit_optimizer
    apply(cohort, slots, generation, inherit_optimizer=inherit, free=not last)
    warn_without_signal(round, tallies)
    return record


def _stopped(
    cohort: Cohort,
    settings: RoundSettings,
    past: Sequence[RoundRecord],
    scores: Sequence[Score | None],
    tallies: Sequence[Tally],
    evaluation_tokens: int,
    *,
    since: float,
) -> tuple[str, ...]:
    """Return the rules by which the run ends with a round; ranks do not agree on the time."""
    if settings.population.stop.is_empty:
        return ()
    tokens = sum(tally.tokens for tally in tallies) + evaluation_tokens
    played = Played(best_of(scores), tokens, time.perf_counter() - since)
    return cohort.team.lead(lambda: rules_that_hold(settings.population.stop, past, played))


def recorded_generation(cohort: Cohort, slots: Sequence[Slot], record: RoundRecord) -> Generation:
    """Return the agents of the next round as the record of a round of `slots` has them."""
    previous = [cohort.agents[slot].member for slot in slots]
    archive = None if cohort.archive is None else cohort.archive.slot
    parents = recorded_parents(record, previous, archive)
    next_id = max(cohort.next_member, record.next_member)
    return Generation(record.members, record.next_hparams, parents, next_id)


def of_all(cohort: Cohort, slots: Sequence[Slot], work: Callable[[Slot], T]) -> list[T]:
    """Do work for each agent on its own rank; returns the results of all, pickled, by position."""
    parts = cohort.team.gather(lambda: {slot: work(slot) for slot in slots if cohort.here(slot)})
    # Where all ranks have all agents, the first one has their files.
    found = {slot: result for part in reversed(parts) for slot, result in part.items()}
    return [found[slot] for slot in slots]


def _reduced(cohort: Cohort) -> dict[str, int]:
    """Return what had to be lowered to go on: the least of all ranks."""
    parts = cohort.team.gather(cohort.reduced)
    names = {name for part in parts for name in part}
    return {name: min(part[name] for part in parts if name in part) for name in sorted(names)}


def apply(
    cohort: Cohort,
    slots: Sequence[Slot],
    generation: Generation,
    *,
    inherit_optimizer: bool,
    free: bool = True,
) -> None:
    """Make the cohort, of which `slots` played, the next generation.

    Parents are copied over children, with their AdamW moments where `inherit_optimizer` is true,
    each agent gets its hyperparameters and its member and keeps its latest `KEPT_SCORES` scores. A
    slot that is both copied and overwritten, as only a person asks for, is copied first.

    With `free` the agents that leave are removed with their memory. Those that leave after the last
    round stay, since a call that plays more rounds selects among them too.
    """
    for parent, slot in copies_in_order(generation):
        cohort.copy(parent, slot, inherit_optimizer=inherit_optimizer)
    cohort.reserve_members(generation.next_id)
    for member, hparams in zip(generation.members, generation.hparams, strict=True):
        cohort.set_hparams(member.agent, hparams)
        cohort.set_member(member.agent, member)
        # Here and not where a score is added: a restored cohort comes by here too.
        del cohort.agents[member.agent].history[:-KEPT_SCORES]
    remaining = set(generation.slots)
    leaving = [slot for slot in slots if slot not in remaining] if free else []
    cohort.place(generation.slots)
    for slot in leaving:
        cohort.remove(slot)


def copies_in_order(generation: Generation) -> Iterator[tuple[Slot, Slot]]:
    """Yield source and target of each copy so that no source has been overwritten before.

    Raises:
        ShapeError: Some copies follow each other in a circle.
    """
    pairs = zip(generation.parents, generation.slots, strict=True)
    waiting = [(parent, slot) for parent, slot in pairs if parent != slot]
    while waiting:
        sources = {parent for parent, _ in waiting}
        free = [pair for pair in waiting if pair[1] not in sources]
        if not free:
            raise ShapeError(
                f"generation: expected copies that can be made one after another, got {waiting}, "
                "each of which overwrites what the next one copies"
            )
        yield from free
        waiting = [pair for pair in waiting if pair[1] in sources]


def next_slots(record: RoundRecord) -> tuple[Slot, ...]:
    """Return the agents that play the round after a recorded one."""
    return tuple(member.agent for member in record.members)


def _fitness(
    cohort: Cohort,
    env: Environment[Any],
    settings: RoundSettings,
    slots: Sequence[Slot],
    round: int,
    tallies: Sequence[Tally],
) -> tuple[list[Score | None], int]:
    """Score every agent, None for one whose update or evaluation was not finite.

    Returns:
        The scores, and the tokens that were sampled for them.
    """
    fitness, keep = settings.evolve.fitness, settings.room(round + 1, len(slots))
    results, tokens = race(cohort, env, slots, fitness, keep=keep, round=round)
    scores: list[Score | None] = []
    for slot, tally, result in zip(slots, tallies, results, strict=True):
        usable = not tally.failed and np.isfinite(result.score.mean)
        scores.append(result.score if usable else None)
        if usable:
            cohort.agents[slot].history.append(result.score)
        else:
            cohort.agents[slot].history.clear()
    if all(score is None for score in scores) and cohort.archive is None:
        raise RunFailedError(
            f"round {round + 1}: no agent has a finite update and fitness, so none can be a "
            f"parent; {why_unranked(env.name, results)}"
        )
    return scores, tokens


def _evolve(
    cohort: Cohort,
    settings: RoundSettings,
    slots: Sequence[Slot],
    round: int,
    scores: Sequence[Score | None],
    tallies: Sequence[Tally],
    past: Sequence[RoundRecord],
    *,
    last: bool,
) -> tuple[Generation, tuple[Decision, ...]]:
    states = [cohort.agents[slot] for slot in slots]
    best = cohort.archive if settings.evolve.archive else None
    archive = None if best is None else best.standing()
    standings = find_collapsed(
        settings,
        [state.standing() for state in states],
        scores,
        [tally.means().get("kl", 0.0) for tally in tallies],
        [state.dead_steps for state in states],
        archive,
        last=last,
    )
    if last:
        # Nothing trains after the last round: selecting there would only overwrite evaluated
        # agents.
        return keep_all(standings, cohort.next_member, drop=settings.evolve.dead_steps is not None)
    # On one rank: a selector or explorer of the user's own need not give all the same answer.
    return cohort.team.lead(
        lambda: next_agents(
            settings,
            standings,
            scores,
            archive,
            past,
            round=round,
            hp_config=cohort.hp_config,
            seed=cohort.seed,
            next_id=cohort.next_member,
        )
    )


def next_agents(  # noqa: PLR0913 -- a plan is made of all that a round has found
    settings: RoundSettings,
    standings: Sequence[Standing],
    scores: Sequence[Score | None],
    archive: Standing | None,
    past: Sequence[RoundRecord],
    *,
    round: int,
    hp_config: HyperparameterConfig,
    seed: int,
    next_id: int,
) -> tuple[Generation, tuple[Decision, ...]]:
    """Return the agents of the round after `round`, which is not the last.

    Nothing is drawn but from the round's own stream. Standings and scores are by position, a score
    None for an agent that failed; `past` are the rounds before it. For the others see `decide`.
    """
    played = [(a.hparams, a.score, record.round) for record in past for a in record.agents]
    played += [(s.hparams, score, round) for s, score in zip(standings, scores, strict=True)]
    return decide(
        standings,
        settings.room(round + 1, len(standings)),
        archive,
        Strategy(
            settings.selector,
            settings.explorer,
            hp_config,
            settings.evolve.significance,
            settings.evolve.fitness.window,
        ),
        generator(derive(seed, "evolve", round)),
        round=round,
        next_id=next_id,
        trials=[
            Trial(hparams, math.nan if score is None else score.mean, number)
            for hparams, score, number in played
        ],
    )


def find_collapsed(
    settings: RoundSettings,
    standings: Sequence[Standing],
    scores: Sequence[Score | None],
    kls: Sequence[float],
    dead_steps: Sequence[int],
    archive: Standing | None,
    *,
    last: bool,
) -> Sequence[Standing]:
    """Return the standings, with the reason where an agent can no longer learn.

    `scores` are None for agents that failed, `kls` nats per token, `dead_steps` the latest steps in
    a row in which all groups of an agent had equal rewards; `archive` is the best agent ever.
    """
    if not settings.evolve.dead_steps:
        return standings
    ranked = [score for score in scores if score is not None]
    if archive is not None:
        ranked.append(archive.history[-1])
    # After the last round there are no further steps in which a dead agent could learn.
    enough = 1 if last else settings.evolve.dead_steps
    best = max(ranked, key=lambda score: score.mean, default=None)
    reasons = [
        ""
        if score is None or best is None
        else why_collapsed(score, best, kl, dead if dead >= enough else 0, last=last)
        for score, kl, dead in zip(scores, kls, dead_steps, strict=True)
    ]
    return [replace(s, collapsed=reason) for s, reason in zip(standings, reasons, strict=True)]


def _archive_best(
    cohort: Cohort,
    settings: RoundSettings,
    slots: Sequence[Slot],
    scores: Sequence[Score | None],
) -> None:
    """Keep the best agent of a round where no earlier one was as good."""
    if not settings.evolve.archive:
        return
    ranked = [(slot, score) for slot, score in zip(slots, scores, strict=True) if score is not None]
    for slot, score in sorted(ranked, key=lambda pair: -pair[1].mean)[:1]:
        if cohort.archive is None or score.mean > cohort.archive.history[-1].mean:
            cohort.put_into_archive(slot, score)


def recorded_parents(
    record: RoundRecord, previous: Sequence[Member], archive: Slot | None = None
) -> tuple[Slot, ...]:
    """Return the slot that the weights of each agent of the next round come from, as recorded.

    It is its own for a survivor. `previous` are the members that played the round, `archive` is the
    slot of the best agent ever, where one is kept.
    """
    slots: dict[int | None, Slot] = {member.id: member.agent for member in previous}
    return tuple(
        archive
        if archive is not None and member.mutation.restores and member.id not in slots
        else slots.get(member.id, slots.get(member.parent, member.agent))
        for member in record.members
    )

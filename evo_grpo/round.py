"""One round: agents train, are evaluated, saved and selected; the next ones are copied and mutated.

Read `play_round` top to bottom; each stage is one call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np

from evo_grpo.cohort.cohort import Cohort
from evo_grpo.envs.protocol import Environment
from evo_grpo.errors import RunFailedError, ShapeError
from evo_grpo.evaluate import race, why_unranked
from evo_grpo.evolve.decide import Standing, Strategy, decide, keep_all, why_collapsed
from evo_grpo.evolve.explore.protocol import Trial
from evo_grpo.evolve.generation import Generation
from evo_grpo.no_signal import warn_without_signal
from evo_grpo.record.observer import Observer
from evo_grpo.record.records import RoundRecord, SavedAgent
from evo_grpo.record.stopping import Played, best_of, rules_that_hold
from evo_grpo.round_stats import Stopwatch, Tally, completion_rows, metric_rows, round_record
from evo_grpo.rules import RoundSettings
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.seeding import derive, generator
from evo_grpo.steps import Limit, train
from evo_grpo.types import KEPT_SCORES, Decision, Member, Score, Slot

T = TypeVar("T")


class Steering(Protocol):
    """What a person asks of a run between two rounds."""

    def steered(self, record: RoundRecord, *, next_id: int, last: bool) -> RoundRecord:
        """Carry out what was asked for until the end of a round; all ranks call it alike.

        Args:
            record: The round, which has not been recorded yet.
            next_id: A member id that no member of the run has had.
            last: Whether no round follows.

        Returns:
            The round, with what became of it.
        """
        ...

    def wait(self, record: RoundRecord) -> RoundRecord:
        """Wait as long as the run is paused, and carry out what is asked for meanwhile.

        Args:
            record: The round, which is recorded.

        Returns:
            The round as it is recorded now.
        """
        ...


class _Unsteered:
    """Nobody asks for anything; see `Steering`."""

    def steered(self, record: RoundRecord, *, next_id: int, last: bool) -> RoundRecord:
        return record

    def wait(self, record: RoundRecord) -> RoundRecord:
        return record


class RunWriter(Protocol):
    """Where a round is written: a run folder, or nowhere."""

    def checkpoint(self, cohort: Cohort, round: int, slot: Slot) -> SavedAgent:
        """Save an agent as it was evaluated; return where, and the digests of its files."""
        ...

    def commit(
        self,
        record: RoundRecord,
        completions: Sequence[Mapping[str, Any]],
        metrics: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Write a finished round: wholly, or not at all.

        Args:
            record: The round.
            completions: A row per sample completion.
            metrics: A row per step and agent; none where they are not kept.
        """
        ...


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
    steering: Steering | None = None,
) -> RoundRecord:
    """Train, evaluate, save, select and mutate.

    Args:
        cohort: The agents.
        env: Prompts and rewards.
        settings: How.
        slots: The agents that play the round.
        round: 0-based.
        writer: Where it is written.
        observer: Told about progress.
        limit: Ends training early; None plays all rounds.
        past: The rounds before it, as far as they are known.
        steering: What a person asks for between two rounds; None where nobody can.

    Returns:
        The round as recorded. The cohort already holds the next generation, whose slots are
        `next_slots(record)`.

    Raises:
        RunFailedError: When no agent is left that can be ranked.
    """
    watch, steering = Stopwatch(), steering or _Unsteered()
    started, start = time.time(), time.perf_counter()
    tallies, starts = train(
        cohort, env, settings, slots, round, watch=watch, observer=observer, limit=limit, past=past
    )
    observer.stage(round, "evaluate", 0, 1)
    with watch.phase("evaluate"):
        scores, evaluation_tokens = _fitness(cohort, env, settings, slots, round, tallies)
    with watch.phase("checkpoint"):
        saved = of_all(cohort, slots, lambda slot: writer.checkpoint(cohort, round, slot))
    tokens = sum(tally.tokens for tally in tallies) + evaluation_tokens
    stopped = _stopped(cohort, settings, past, scores, tokens, since=start)
    # The limit comes first, for it hears of every evaluation.
    limited = limit is not None and limit.reached(scores)
    last = limited or bool(stopped) or round + 1 >= settings.rounds
    with watch.phase("evolve"):
        generation, decisions = _evolve(
            cohort, settings, slots, round, scores, tallies, past, last=last
        )
        _archive_best(cohort, settings, slots, scores)
    seconds = time.perf_counter() - start
    record = round_record(cohort, slots, round, tallies, scores, saved, generation, watch, seconds)
    record = replace(
        record,
        decisions=decisions,
        starts=starts,
        evaluation_tokens=evaluation_tokens,
        reduced=_reduced(cohort),
        started=started,
        # Not asked for a second time: a clock that was set back would end it before it began.
        ended=started + seconds,
        stopped=stopped,
    )
    record = steering.steered(record, next_id=generation.next_id, last=last)
    writer.commit(
        record,
        completion_rows(round, slots, tallies, settings.completions),
        metric_rows(round, slots, tallies) if settings.metrics else (),
    )
    observer.round_done(record)
    record = steering.wait(record)
    if record.steering:
        generation = steered_generation(cohort, slots, record)
    # After the round is recorded: should a crash come in between, a resume applies the record.
    apply(cohort, slots, generation, inherit_optimizer=settings.inherit_optimizer)
    warn_without_signal(round, tallies)
    return record


def _stopped(
    cohort: Cohort,
    settings: RoundSettings,
    past: Sequence[RoundRecord],
    scores: Sequence[Score | None],
    tokens: int,
    *,
    since: float,
) -> tuple[str, ...]:
    """Return the rules by which the run ends with a round; ranks do not agree on the time."""
    if settings.stop.is_empty:
        return ()
    played = Played(best_of(scores), tokens, time.perf_counter() - since)
    return cohort.team.lead(lambda: rules_that_hold(settings.stop, past, played))


def steered_generation(cohort: Cohort, slots: Sequence[Slot], record: RoundRecord) -> Generation:
    """Return the agents of the next round as a record has them.

    Args:
        cohort: The agents that played the round.
        slots: Theirs.
        record: The round.
    """
    previous = [cohort.agents[slot].member for slot in slots]
    archive = None if cohort.archive is None else cohort.archive.slot
    parents = recorded_parents(record, previous, archive)
    next_id = max(cohort.next_member, record.next_member)
    return Generation(record.members, record.next_hparams, parents, next_id)


def of_all(cohort: Cohort, slots: Sequence[Slot], work: Callable[[Slot], T]) -> list[T]:
    """Do work for each agent on its own rank; returns the results of all, by position.

    Args:
        cohort: The agents.
        slots: Which.
        work: What to do; its result is pickled.
    """
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
    cohort: Cohort, slots: Sequence[Slot], generation: Generation, *, inherit_optimizer: bool
) -> None:
    """Make the cohort the next generation.

    Parents are copied over children, each agent gets its hyperparameters and its member and keeps
    its latest `KEPT_SCORES` scores, and the agents that leave are removed with their memory. A slot
    that is both copied and overwritten, as only a person asks for, is copied first.

    Args:
        cohort: The agents.
        slots: Those of this round.
        generation: Those of the next round.
        inherit_optimizer: Whether copies take their parent's AdamW moments.
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
    leaving = [slot for slot in slots if slot not in remaining]
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
    """Score every agent, None for one whose update or evaluation was not finite; and count tokens.

    Returns:
        The scores, and the tokens that were sampled for them.
    """
    results, tokens = race(
        cohort,
        env,
        slots,
        prompts=settings.eval_prompts,
        samples=settings.eval_samples,
        temperature=settings.eval_temperature,
        extra=settings.eval_extra,
        keep=settings.room(round + 1, len(slots)),
        round=round,
    )
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
    archive = cohort.archive if settings.archive else None
    reasons = why_each_collapsed(
        settings,
        scores,
        [tally.means().get("kl", 0.0) for tally in tallies],
        [state.dead_steps for state in states],
        archive,
        last=last,
    )
    for state, reason in zip(states, reasons, strict=True):
        state.collapsed = reason
    if last:
        # Nothing trains after the last round: selecting there would only overwrite evaluated
        # agents.
        return keep_all(states, cohort.next_member, drop=settings.dead_steps is not None)
    # On one rank: a selector or explorer of the user's own need not give all the same answer.
    return cohort.team.lead(
        lambda: next_agents(
            settings,
            states,
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
    """Return the agents of the next round; nothing is drawn but from the round's own stream.

    Args:
        settings: How rounds are played.
        standings: The agents of the round, by position.
        scores: Theirs, None for an agent that failed.
        archive: The best agent ever, None where none is kept.
        past: The rounds before it.
        round: The round, which is not the last.
        hp_config: Which hyperparameters may change, within which bounds.
        seed: Seed of the run.
        next_id: A member id that no member of the run has had.
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
            settings.significance,
            settings.window,
        ),
        generator(derive(seed, "evolve", round)),
        round=round,
        next_id=next_id,
        trials=[
            Trial(hparams, math.nan if score is None else score.mean, number)
            for hparams, score, number in played
        ],
    )


def why_each_collapsed(
    settings: RoundSettings,
    scores: Sequence[Score | None],
    kls: Sequence[float],
    dead_steps: Sequence[int],
    archive: Standing | None,
    *,
    last: bool,
) -> list[str]:
    """Return why each agent can no longer learn, an empty string for one that can.

    Args:
        settings: How rounds are played.
        scores: Of the agents, None for one that failed.
        kls: Their mean KL divergence from the reference, nats per token.
        dead_steps: Their latest steps in a row in which all groups had equal rewards.
        archive: The best agent ever, None where none is kept.
        last: Whether the round is the last.
    """
    if not settings.dead_steps:
        return [""] * len(scores)
    ranked = [score for score in scores if score is not None]
    if archive is not None:
        ranked.append(archive.history[-1])
    # After the last round there are no further steps in which a dead agent could learn.
    enough = 1 if last else settings.dead_steps
    best = max(ranked, key=lambda score: score.mean, default=None)
    return [
        ""
        if score is None or best is None
        else why_collapsed(score, best, kl, dead if dead >= enough else 0, last=last)
        for score, kl, dead in zip(scores, kls, dead_steps, strict=True)
    ]


def _archive_best(
    cohort: Cohort,
    settings: RoundSettings,
    slots: Sequence[Slot],
    scores: Sequence[Score | None],
) -> None:
    """Keep the best agent of a round where no earlier one was as good."""
    if not settings.archive:
        return
    ranked = [(slot, score) for slot, score in zip(slots, scores, strict=True) if score is not None]
    for slot, score in sorted(ranked, key=lambda pair: -pair[1].mean)[:1]:
        if cohort.archive is None or score.mean > cohort.archive.history[-1].mean:
            cohort.put_into_archive(slot, score)


def recorded_parents(
    record: RoundRecord, previous: Sequence[Member], archive: Slot | None = None
) -> tuple[Slot, ...]:
    """Return the slot that the weights of each agent of the next round come from, as recorded.

    Args:
        record: A finished round.
        previous: The members that played it.
        archive: Slot of the best agent ever, where one is kept.

    Returns:
        One slot per member of `record.members`: its own for a survivor.
    """
    slots: dict[int | None, Slot] = {member.id: member.agent for member in previous}
    return tuple(
        archive
        if archive is not None and member.mutation.restores and member.id not in slots
        else slots.get(member.id, slots.get(member.parent, member.agent))
        for member in record.members
    )

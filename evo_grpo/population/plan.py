"""Computes the plan that all ranks carry out after a round, from the reports of the ranks.

All functions are pure, so plans are tested without a model. `next_look` returns the agents that are
evaluated again; `next_round` creates the record of the round and the agents of the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from evo_grpo.errors import RunFailedError
from evo_grpo.evolve.decide import Standing, Strategy, decide, keep_all, why_collapsed
from evo_grpo.evolve.explore.protocol import Trial
from evo_grpo.evolve.generation import Generation
from evo_grpo.population.evaluate import Evaluation, undecided, why_unranked
from evo_grpo.population.no_signal import without_signal
from evo_grpo.population.rules import RoundSettings
from evo_grpo.population.stats import Tally
from evo_grpo.population.steps import CheckpointFiles
from evo_grpo.record.records import AgentRecord, RoundRecord, SavedAgent
from evo_grpo.record.stopping import Played, best_of, has_signal, rules_that_hold
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.seeding import derive, generator
from evo_grpo.types import Decision, Score, Slot


@dataclass(frozen=True)
class AgentReport:
    """What a rank reports about one of its agents after the steps and the evaluation.

    Attributes:
        score: Its fitness, None if its update or its evaluation was not finite.
        tally: Its metrics and counts in the steps of the round.
        evaluation: The result of its evaluation.
        saved: Its checkpoint.
        steps: GRPO steps that its slot has taken so far.
        dead_steps: Latest steps in a row in which all its groups had equal rewards.
        rank_error: Relative error of the cut of its rank before the round; None without one.
    """

    score: Score | None
    tally: Tally
    evaluation: Evaluation
    saved: SavedAgent
    steps: int
    dead_steps: int
    rank_error: float | None = None


@dataclass(frozen=True)
class RankReport:
    """The message of one rank to the first rank at the exchange of a round.

    Attributes:
        agents: The reports of its agents, by slot.
        reduced: Engine settings that were lowered to save memory, with their present values.
        files: The files of its checkpoints.
    """

    agents: Mapping[Slot, AgentReport]
    reduced: Mapping[str, int] = field(default_factory=dict[str, int])
    files: CheckpointFiles = field(default_factory=CheckpointFiles)


@dataclass(frozen=True)
class LookAgain:
    """The decision to evaluate some agents before the round is planned.

    Attributes:
        slots: The agents.
        number: Number of the look; 0 is the first look, at all agents.
    """

    slots: tuple[Slot, ...]
    number: int

    def stream(self, round: int) -> tuple[str | int, ...]:
        """Return the path of the random stream of this look."""
        return ("evaluate", round, self.number) if self.number else ("evaluate", round)


@dataclass(frozen=True)
class RoundPlan:
    """The outcome of a round, created on the first rank and carried out by all ranks.

    Attributes:
        record: The record of the round, with the agents of the next one, their hyperparameters, the
            decisions with their reasons, the rules that end the run, and the requests.
        steps: GRPO steps that the slot of each agent of the round has taken so far.
        last: Whether no round follows.
        notes: Sentences for the observers of the run.
        warning: Why the first round had nothing to learn from; empty otherwise.
    """

    record: RoundRecord
    steps: Mapping[Slot, int]
    last: bool
    notes: tuple[str, ...] = ()
    warning: str = ""

    @property
    def paused(self) -> bool:
        """Whether the run waits before the next round."""
        return self.record.paused_by is not None and not ends_by_request(self.record)


@dataclass(frozen=True)
class PlanInputs:
    """The inputs of a plan besides the reports of its round.

    Attributes:
        settings: Settings of the rounds.
        hp_config: The hyperparameters that may change, with their bounds.
        seed: Seed of the run.
        past: Records of the known rounds before this one.
        archive: The best agent before this round, None without an archive.
        next_id: A member id that no member of the run has had.
        task: Name of the environment, for errors.
        check: Raises for hyperparameters with which no agent can train; an exploration of the user
            may return such values.
    """

    settings: RoundSettings
    hp_config: HyperparameterConfig
    seed: int
    past: Sequence[RoundRecord]
    archive: Standing | None
    next_id: int
    task: str = ""
    check: Callable[[Hparams], None] | None = None


def agents_of(reports: Sequence[RankReport], slots: Sequence[Slot]) -> dict[Slot, AgentReport]:
    """Return the reports of all agents, by slot, in the order of the slots.

    If several ranks report an agent, the report of the first one is used, which has the files.
    """
    found = {slot: one for report in reversed(reports) for slot, one in report.agents.items()}
    return {slot: found[slot] for slot in slots}


def next_look(
    agents: Mapping[Slot, AgentReport], settings: RoundSettings, look: LookAgain, round: int
) -> LookAgain | None:
    """Return the agents that are evaluated again; None if the round can be planned.

    Further looks may cost a share `evolve.fitness.racing` of the completions of the first look.
    """
    results = {slot: agent.evaluation for slot, agent in agents.items()}
    left = settings.evolve.fitness.second_looks * len(agents)
    left -= sum(result.looks - 1 for result in results.values())
    open_ones = undecided(results, settings.room(round + 1, len(agents)))
    if 1 < len(open_ones) <= left:
        return LookAgain(tuple(open_ones), look.number + 1)
    return None


def next_round(
    inputs: PlanInputs,
    agents: Mapping[Slot, AgentReport],
    standings: Sequence[Standing],
    round: int,
    *,
    seconds: float = 0.0,
    starts: int = 0,
    reduced: Mapping[str, int] | None = None,
    limited: bool = False,
) -> RoundPlan:
    """Return the plan of a round, which contains its record.

    Args:
        inputs: The other inputs of the plan.
        agents: The reports of all agents of the round, in the order of their positions.
        standings: The same agents; the history of each ends with its score of the round.
        round: The round (0-based).
        seconds: Wall seconds of the round so far.
        starts: Training prompts, or episode seeds, used up to the end of the round.
        reduced: Engine settings that were lowered; see `RankReport`.
        limited: Whether a limit ends the training with this round.

    Raises:
        RunFailedError: No agent can be ranked, and there is no archive to continue from.
        ShapeError: The selector's plan cannot be carried out.
    """
    settings, reports = inputs.settings, list(agents.values())
    scores = [report.score for report in reports]
    if all(score is None for score in scores) and inputs.archive is None:
        why = why_unranked(inputs.task, [report.evaluation for report in reports])
        raise RunFailedError(
            f"round {round + 1}: no agent has a finite update and fitness, so none can be a "
            f"parent; {why}"
        )
    planned = round + 1 >= settings.population.rounds
    stopped = _rules_that_hold(inputs, reports, seconds)
    if planned:
        # Without a further round, there is none to spare.
        stopped = tuple(rule for rule in stopped if rule != "no_signal")
    last = limited or bool(stopped) or planned
    generation, decisions = _next_generation(inputs, reports, standings, round, last=last)
    record = RoundRecord(
        round=round,
        agents=tuple(
            agent_record(standing, report, round, inputs.seed)
            for standing, report in zip(standings, reports, strict=True)
        ),
        seconds={},
        members=generation.members,
        next_hparams=generation.hparams,
        mutable=tuple(inputs.hp_config.names()),
        decisions=decisions,
        starts=starts,
        evaluation_tokens=sum(report.evaluation.tokens for report in reports),
        reduced=reduced or {},
        stopped=stopped,
    )
    warning = without_signal([report.tally for report in reports]) if round == 0 else ""
    steps = {slot: report.steps for slot, report in agents.items()}
    return RoundPlan(record, steps, last, warning=warning)


def _next_generation(
    inputs: PlanInputs,
    reports: Sequence[AgentReport],
    standings: Sequence[Standing],
    round: int,
    *,
    last: bool,
) -> tuple[Generation, tuple[Decision, ...]]:
    """Return the agents of the next round, or those that stay after the last round."""
    settings, scores = inputs.settings, [report.score for report in reports]
    archive = inputs.archive if settings.evolve.archive else None
    standings = find_collapsed(
        settings,
        standings,
        scores,
        [report.tally.means().get("kl", 0.0) for report in reports],
        [report.dead_steps for report in reports],
        archive,
        last=last,
    )
    if last:
        # No training follows the last round: a selection would only overwrite evaluated agents.
        drop = settings.evolve.dead_steps is not None
        return keep_all(standings, inputs.next_id, drop=drop)
    generation, decisions = next_agents(
        settings,
        standings,
        scores,
        archive,
        inputs.past,
        round=round,
        hp_config=inputs.hp_config,
        seed=inputs.seed,
        next_id=inputs.next_id,
    )
    # Before the round is recorded: a resume would apply the record, and fail again.
    if (check := inputs.check) is not None:
        for hparams in generation.hparams:
            check(hparams)
    return generation, decisions


def _rules_that_hold(
    inputs: PlanInputs, reports: Sequence[AgentReport], seconds: float
) -> tuple[str, ...]:
    """Return the rules of population.stop that end the run after this round."""
    stop = inputs.settings.population.stop
    if stop.is_empty:
        return ()
    tokens = sum(report.tally.tokens + report.evaluation.tokens for report in reports)
    best = best_of([report.score for report in reports])
    signal = has_signal([report.tally.means() for report in reports])
    return rules_that_hold(stop, inputs.past, Played(best, tokens, seconds, signal))


def ends_by_request(record: RoundRecord) -> bool:
    """Return whether a person asked that the process ends after a round."""
    ops = [one.request.op for one in record.steering if not one.refused]
    return "stop-after-round" in ops


def least_reduced(reports: Sequence[RankReport]) -> dict[str, int]:
    """Return the engine settings that were lowered on some rank, each with its lowest value.

    The names are in alphabetical order.
    """
    names = sorted({name for report in reports for name in report.reduced})
    return {
        name: min(report.reduced[name] for report in reports if name in report.reduced)
        for name in names
    }


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

    All draws come from the random stream of the round. Standings and scores are by position; the
    score of a failed agent is None. `past` are the earlier rounds. For the other arguments see
    `decide`.
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
    """Return the standings, with a reason for each agent that can no longer learn.

    `scores` are None for failed agents. `kls` are in nats per token. `dead_steps` counts the latest
    steps in a row in which all groups of an agent had equal rewards. `archive` is the best agent so
    far.
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


def agent_record(standing: Standing, report: AgentReport, round: int, seed: int) -> AgentRecord:
    """Return the record of an agent in a round, without its share of the wall time."""
    tally, saved = report.tally, report.saved
    unranked = "the evaluation had no finite reward, or log-prob"
    cut = {} if report.rank_error is None else {"rank_error": report.rank_error}
    return AgentRecord(
        agent=standing.slot,
        member=standing.member.id,
        parent=standing.member.parent,
        round=round,
        state="failed" if report.score is None else "ok",
        hparams=standing.hparams,
        score=report.score,
        metrics={**tally.means(), "dead_steps": float(report.dead_steps), **cut},
        tokens=tally.tokens,
        wall_seconds=0.0,
        checkpoint=saved.path,
        adapter_sha256=saved.adapter_sha256,
        optimizer_sha256=saved.optimizer_sha256,
        mutation=standing.member.mutation,
        seed=derive(seed, "sample", round, 0, standing.slot),
        reason=tally.failed or (unranked if report.score is None else ""),
        step_rewards=tally.step_rewards,
    )


def timed(
    record: RoundRecord, phases: Mapping[str, float], started: float, seconds: float
) -> RoundRecord:
    """Return a record with its times; agents share the wall time in proportion to their tokens.

    Args:
        record: The round.
        phases: Wall seconds of each phase.
        started: Start of the round, in seconds since 1970 (UTC).
        seconds: Elapsed time. Use it for the end, since the wall clock may have been set back.
    """
    total = max(1, sum(agent.tokens for agent in record.agents))
    agents = tuple(replace(a, wall_seconds=seconds * a.tokens / total) for a in record.agents)
    ended = started + seconds
    return replace(record, agents=agents, seconds=dict(phases), started=started, ended=ended)

"""Computes the plan that all ranks carry out after a round, from the reports of the ranks.

All functions are pure. `next_evaluation` returns the agents to evaluate again, and `next_round`
returns the plan.
"""

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from evo_grpo.errors import EvoGrpoError, RunFailedError
from evo_grpo.escaping import error_text
from evo_grpo.evolve import compare, decide, goals, protocols
from evo_grpo.evolve.decide import Standing, keep_all
from evo_grpo.evolve.generation import Generation
from evo_grpo.population.evaluate import Evaluation, undecided, why_unranked
from evo_grpo.population.rules import RoundSettings
from evo_grpo.population.stats import Tally, without_signal
from evo_grpo.population.steps import CheckpointFiles
from evo_grpo.record.records import AgentRecord, NextAgents, RoundRecord
from evo_grpo.record.stopping import RoundTotals, has_signal, rules_that_hold
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.seeding import derive, generator
from evo_grpo.types import Decision, Score, Slot


@dataclass(frozen=True)
class AgentReport:
    """A rank's report about one of its agents after the steps and the evaluation.

    `score` is the agent's fitness, None if its update or its evaluation was not finite.
    `checkpoint` is a path, None if no checkpoint is written. For `steps`, `dead_steps` and
    `rank_error` see `AgentState`.
    """

    score: Score | None
    tally: Tally
    evaluation: Evaluation
    checkpoint: str | None
    steps: int
    dead_steps: int
    rank_error: float | None = None


@dataclass(frozen=True)
class RankReport:
    """The message that a rank sends to the first rank after each evaluation of a round.

    `reduced` are engine settings that were lowered to save memory, with their current values.
    `fresh` are evaluations, on new samples, of the archive and of the best agent. `judge_cost` is
    the cost of LLM judges since the start of the run. For `decodes_by` see `RolloutEngine`.
    """

    agents: Mapping[Slot, AgentReport]
    reduced: Mapping[str, int] = field(default_factory=dict[str, int])
    files: CheckpointFiles = field(default_factory=CheckpointFiles)
    fresh: Mapping[Slot, Evaluation] = field(default_factory=dict[Slot, Evaluation])
    judge_cost: float = 0.0
    decodes_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvaluationRequest:
    """The decision to evaluate some agents before the round is planned.

    Without `fresh`, `number` 0 is the first request of a round, for all agents. `prompts` is the
    number of validation prompts; with 0, the rewards of training replace the evaluation. With
    `fresh`, the archive and the best agent are evaluated on new samples, only to compare the two.
    """

    slots: tuple[Slot, ...]
    number: int
    prompts: int
    fresh: bool = False

    def stream(self, round: int) -> tuple[str | int, ...]:
        """Return the path of the random stream of this evaluation."""
        if self.fresh:
            return ("archive", round)
        return ("evaluate", round, self.number) if self.number else ("evaluate", round)


def agents_of(reports: Sequence[RankReport], slots: Sequence[Slot]) -> dict[Slot, AgentReport]:
    """Return the reports of all agents, by slot, in the order of the slots.

    If several ranks report an agent, the first report is used, which has the checkpoint.
    """
    agents = {slot: agent for report in reversed(reports) for slot, agent in report.agents.items()}
    return {slot: agents[slot] for slot in slots}


def next_evaluation(
    agents: Mapping[Slot, AgentReport],
    settings: RoundSettings,
    request: EvaluationRequest,
    round: int,
) -> EvaluationRequest | None:
    """Return the request to evaluate undecided agents again; None if the round can be planned.

    All such requests together sample at most `evolve.fitness.racing` times request 0's completions.
    """
    if request.fresh or not settings.decides(round):
        return None
    results = {slot: agent.evaluation for slot, agent in agents.items()}
    budget = settings.evolve.fitness.second_looks * len(agents)
    budget -= sum(result.looks - 1 for result in results.values())
    slots = undecided(results, settings.room(round + 1, len(agents)))
    if 1 < len(slots) <= budget:
        return EvaluationRequest(tuple(slots), request.number + 1, request.prompts)
    return None


def archive_evaluation(
    agents: Mapping[Slot, AgentReport], archive: Slot | None, settings: RoundSettings, round: int
) -> EvaluationRequest | None:
    """Return the request to evaluate the archive and the best agent again; None if not needed.

    It asks for new samples, on new prompts if possible, because the old ones selected the agents.
    """
    ends = round + 1 >= settings.population.rounds
    if (
        archive is None
        or not settings.evolve.keeps_archive
        or not (ends or settings.decides(round))
    ):
        return None
    scores = {slot: agent.score for slot, agent in agents.items() if agent.score is not None}
    if not scores:
        return None
    best = min(scores, key=lambda slot: goals.best_first(scores[slot]))
    return EvaluationRequest((best, archive), 0, settings.evolve.fitness.prompts, fresh=True)


@dataclass(frozen=True)
class RoundPlan:
    """The outcome of a round, created on the first rank and carried out by all ranks.

    `steps` has the steps of each agent (see `AgentState`); `last` says whether this is the last
    round. `notes` are sentences for the observers; `warning` says why the first round had no signal
    to learn from.
    """

    record: RoundRecord
    steps: Mapping[Slot, int]
    last: bool
    notes: tuple[str, ...] = ()
    warning: str = ""

    @property
    def paused(self) -> bool:
        """Whether the run waits before the next round, because the user paused it."""
        return self.record.paused_by is not None and not self.record.ends_process


@dataclass(frozen=True)
class PlanInputs:
    """The inputs from which round `round` (0-based) is planned.

    `ranks` are the reports of all ranks, and `standings` the round's agents, whose histories end
    with the score of the round. `past` are the records of the known earlier rounds, `archive` is
    the best agent before this round. `check` raises an error for hyperparameters with which no
    agent can train; the exploration of a user may return such. `task` names the environment, for
    errors, and `limited` says whether a limit ends training after this round. `seconds` is the time
    since the start of the round, and `starts` the number of starts that the run has used.
    """

    settings: RoundSettings
    hp_config: HyperparameterConfig
    seed: int
    round: int
    ranks: Sequence[RankReport]
    standings: Sequence[Standing]
    past: Sequence[RoundRecord]
    archive: Standing | None
    next_id: int
    task: str = ""
    check: Callable[[Hparams], None] | None = None
    seconds: float = 0.0
    starts: int = 0
    limited: bool = False

    @cached_property
    def reports(self) -> list[AgentReport]:
        """The reports about the agents of the round, in the order of `standings`."""
        slots = [standing.slot for standing in self.standings]
        return list(agents_of(self.ranks, slots).values())

    @property
    def fresh(self) -> dict[Slot, Evaluation]:
        """The evaluations, on new samples, of the archive and of the best agent of the round."""
        return {slot: result for rank in self.ranks for slot, result in rank.fresh.items()}

    @property
    def fresh_scores(self) -> dict[Slot, Score]:
        """The scores in `fresh` that are finite, by slot."""
        scores = {slot: result.score for slot, result in self.fresh.items()}
        return {slot: score for slot, score in scores.items() if score.is_finite}

    @property
    def scores(self) -> list[Score | None]:
        """The fitness of each agent, in the order of `standings`; None if the agent failed."""
        return [report.score for report in self.reports]

    @property
    def evaluation_tokens(self) -> int:
        """Number of tokens sampled in all evaluations of the round."""
        evaluations = [*(report.evaluation for report in self.reports), *self.fresh.values()]
        return sum(evaluation.tokens for evaluation in evaluations)


def next_round(inputs: PlanInputs) -> RoundPlan:
    """Return the plan that ends a round; it contains the record of the round."""
    settings, reports, round = inputs.settings, inputs.reports, inputs.round
    if inputs.archive is None and all(score is None for score in inputs.scores):
        why = why_unranked(inputs.task, [report.evaluation for report in reports])
        raise RunFailedError(
            f"round {round + 1}: no agent has a finite update and fitness, so none can be a "
            f"parent; {why}"
        )
    planned = round + 1 >= settings.population.rounds
    stopped = _rules_that_hold(inputs)
    if planned:
        # Without a further round, there is none to spare.
        stopped = tuple(rule for rule in stopped if rule != "no_signal")
    last = inputs.limited or bool(stopped) or planned
    plan, failure = None, ""
    if last:
        plan, failure = _plan_beyond(inputs)
        generation, decisions = keep_all(_collapsed(inputs, last=True), inputs.next_id, drop=False)
    else:
        generation, decisions = _next_generation(inputs)
    archived, fresh = _archived(inputs, generation, last=last)
    record = RoundRecord(
        round=round,
        agents=tuple(
            agent_record(standing, report, round, inputs.seed)
            for standing, report in zip(inputs.standings, reports, strict=True)
        ),
        seconds={},
        members=generation.members,
        next_hparams=generation.hparams,
        mutable=tuple(inputs.hp_config.names()),
        decisions=decisions,
        starts=inputs.starts,
        evaluation_tokens=inputs.evaluation_tokens,
        reduced=least_reduced(inputs.ranks),
        decodes_by=tuple(sorted({name for rank in inputs.ranks for name in rank.decodes_by})),
        stopped=stopped,
        between=not (planned or settings.decides(round)),
        archived=archived,
        fresh=fresh,
        plan=plan,
    )
    warning = without_signal([report.tally for report in reports]) if round == 0 else ""
    steps = {s.slot: report.steps for s, report in zip(inputs.standings, reports, strict=True)}
    return RoundPlan(record, steps, last, (failure,) if failure else (), warning)


def _next_generation(inputs: PlanInputs) -> tuple[Generation, tuple[Decision, ...]]:
    """Return the agents of the next round, and the decisions about the agents of this round.

    After a round without a decision, all agents stay that neither failed nor collapsed.
    """
    settings, round = inputs.settings, inputs.round
    standings = _collapsed(inputs, last=False)
    if not settings.decides(round) and any(s.history and not s.collapsed for s in standings):
        return keep_all(standings, inputs.next_id, drop=True)
    outcomes = [(a.hparams, a.score, record.round) for record in inputs.past for a in record.agents]
    scores = zip(standings, inputs.scores, strict=True)
    outcomes += [(standing.hparams, score, round) for standing, score in scores]
    generation, decisions = decide.decide(
        _with_training(inputs, standings),
        settings.room(round + 1, len(standings)),
        inputs.archive if settings.evolve.keeps_archive else None,
        decide.Strategy(
            settings.selector,
            settings.explorer,
            inputs.hp_config,
            settings.evolve.significance,
            settings.evolve.fitness.window,
            archive_level=decide.ARCHIVE_LEVEL / len(settings.population.decided),
        ),
        generator(derive(inputs.seed, "evolve", round)),
        fresh=inputs.fresh_scores,
        round=round,
        next_id=inputs.next_id,
        trials=[
            protocols.Trial(hparams, math.nan if score is None else score.mean, number)
            for hparams, score, number in outcomes
        ],
    )
    # Before the round is recorded: a resume would apply the record, and fail again.
    if (check := inputs.check) is not None:
        for hparams in generation.hparams:
            check(hparams)
    return generation, decisions


def _plan_beyond(inputs: PlanInputs) -> tuple[NextAgents | None, str]:
    """Return the agents with which an extended run would continue, or None and why it cannot."""
    try:
        generation, decisions = _next_generation(inputs)
    except EvoGrpoError as error:
        why = str(error)
    except Exception as error:  # the user's strategies may raise anything
        at = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{at.name} in {at.filename}:{at.lineno} raised {error_text(error)}"
    else:
        return NextAgents(generation.members, generation.hparams, decisions), ""
    return None, f"no round can follow round {inputs.round + 1}: {why}"


def _collapsed(inputs: PlanInputs, *, last: bool) -> Sequence[Standing]:
    """Return the standings of a round, with a reason for each agent that can no longer learn."""
    least = inputs.settings.evolve.dead_steps
    if not least:
        return inputs.standings
    ranked = [score for score in inputs.scores if score is not None]
    best = max(ranked, key=lambda score: score.mean, default=None)
    # After the last round there are no further steps in which a dead agent could learn.
    least = 1 if last else least
    standings: list[Standing] = []
    for standing, report in zip(inputs.standings, inputs.reports, strict=True):
        score, dead, reason = report.score, report.dead_steps, ""
        if score is not None and best is not None:
            kl = report.tally.means().get("kl", 0.0)
            reason = decide.why_collapsed(score, best, kl, dead if dead >= least else 0, last=last)
        standings.append(replace(standing, collapsed=reason))
    return standings


def _rules_that_hold(inputs: PlanInputs) -> tuple[str, ...]:
    """Return the rules of `population.stop` that end the run after this round."""
    stop = inputs.settings.population.stop
    if stop.is_empty:
        return ()
    tallies = [report.tally for report in inputs.reports]
    tokens = sum(tally.tokens for tally in tallies) + inputs.evaluation_tokens
    signal = has_signal([tally.means() for tally in tallies])
    judge_cost = sum(rank.judge_cost for rank in inputs.ranks)
    this_round = RoundTotals(inputs.scores, tokens, inputs.seconds, signal, judge_cost)
    return rules_that_hold(stop, inputs.past, this_round)


def least_reduced(reports: Sequence[RankReport]) -> dict[str, int]:
    """Return the lowest value of each engine setting that a rank has lowered, sorted by name."""
    names = sorted({name for report in reports for name in report.reduced})
    return {
        name: min(report.reduced[name] for report in reports if name in report.reduced)
        for name in names
    }


def _archived(
    inputs: PlanInputs, generation: Generation, *, last: bool
) -> tuple[tuple[int, int] | None, tuple[Score, Score] | None]:
    """Return the values of `RoundRecord.archived` and `RoundRecord.fresh` for a round.

    After a decision or at the end, the best agent of the round is put into the archive if the
    archive is empty, or if the agent is not worse than the archived agent on new samples.
    """
    settings, round = inputs.settings, inputs.round
    if not settings.evolve.keeps_archive:
        return None, None
    pairs = zip(inputs.scores, inputs.standings, strict=True)
    ranked = [(score, standing) for score, standing in pairs if score is not None]
    best = min(ranked, key=lambda pair: goals.best_first(pair[0]), default=None)
    before = inputs.past[-1].archived if inputs.past else None
    if inputs.archive is None or best is None:
        decides = last or settings.decides(round)
        enters = best is not None and inputs.archive is None and decides
        return ((round, best[1].member.id) if enters and best else before), None
    fresh = inputs.fresh_scores
    if not {inputs.archive.slot, best[1].slot} <= fresh.keys():
        return before, None
    old, new = fresh[inputs.archive.slot], fresh[best[1].slot]
    restored = any(member.mutation.restores for member in generation.members)
    enters = not restored and decide.enters_archive(new, old)
    return ((round, best[1].member.id) if enters else before), (old, new)


def _with_training(inputs: PlanInputs, standings: Sequence[Standing]) -> list[Standing]:
    """Return standings in which each agent's latest score also contains its training rewards.

    These are the rewards of the steps since the last decision. The standings stay unchanged if
    rounds without a decision have an evaluation, or if an agent has no reward for one of the steps.
    """
    settings = inputs.settings
    if settings.evolve.fitness.in_between:
        return list(standings)
    rewards = [list(report.tally.step_rewards) for report in inputs.reports]
    for record in reversed(inputs.past):
        if settings.decides(record.round):
            break
        earlier = {agent.member: agent.step_rewards for agent in record.agents}
        if any(s.member.id not in earlier for s in standings):
            return list(standings)
        rewards = [
            [*earlier[s.member.id], *values] for s, values in zip(standings, rewards, strict=True)
        ]
    if any(None in values for s, values in zip(standings, rewards, strict=True) if s.history):
        return list(standings)
    rows = settings.rows_of_agent(len(standings))
    samples = settings.evolve.fitness.per_prompt(settings.evolve.fitness.samples)
    return [
        replace(
            s,
            history=[*s.history[:-1], compare.with_training(s.history[-1], values, rows, samples)],
        )
        if s.history
        else s
        for s, values in zip(standings, rewards, strict=True)
    ]


def agent_record(standing: Standing, report: AgentReport, round: int, seed: int) -> AgentRecord:
    """Return the record of an agent in a round, without its share of the wall time."""
    tally = report.tally
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
        checkpoint=report.checkpoint,
        mutation=standing.member.mutation,
        seed=derive(seed, "sample", round, 0, standing.slot),
        reason=tally.failed or (unranked if report.score is None else ""),
        step_rewards=tally.step_rewards,
    )


def timed(
    record: RoundRecord, phases: Mapping[str, float], started: float, seconds: float
) -> RoundRecord:
    """Return a record with its times; agents share the wall time in proportion to their tokens.

    `started` is in seconds since 1970 (UTC); the end is computed from the elapsed `seconds`.
    """
    total = max(1, sum(agent.tokens for agent in record.agents))
    agents = tuple(replace(a, wall_seconds=seconds * a.tokens / total) for a in record.agents)
    ended = started + seconds
    return replace(record, agents=agents, seconds=dict(phases), started=started, ended=ended)

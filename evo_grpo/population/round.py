"""Runs one round: agents train, are evaluated, saved, selected, copied and mutated.

Read `play_round` from top to bottom; each stage is one call. Ranks exchange one message per
evaluation: every rank sends its report; the first rank requests another evaluation of some agents,
or plans and records the round; then all ranks carry out the plan. During a pause and with dynamic
sampling, ranks exchange further messages.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from evo_grpo.envs.single_turn import judge_cost
from evo_grpo.errors import ShapeError
from evo_grpo.evolve.generation import Generation
from evo_grpo.model.out_of_memory import naming_failed_device
from evo_grpo.population import plan as planning
from evo_grpo.population import stats
from evo_grpo.population.cohort.archive import put_into_archive
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.evaluate import Evaluation, evaluate_here, merged, without_texts
from evo_grpo.population.plan import AgentReport, EvaluationRequest, RankReport, RoundPlan
from evo_grpo.population.ranks.team import order_transfers
from evo_grpo.population.steps import Training, report_steps, train
from evo_grpo.record.records import RoundRecord
from evo_grpo.types import KEPT_SCORES, Member, Score, Slot


class Steerer:
    """Carries out requests between two rounds, on the first rank; this base class does nothing."""

    def steer(self, plan: RoundPlan, *, next_id: int) -> RoundPlan:
        """Apply requests to the plan of a round that is not recorded yet; return the changed plan.

        `next_id` is a member id that no member of the run has had.
        """
        del next_id
        return plan

    def listen(self, plan: RoundPlan) -> RoundPlan:
        """Wait briefly in a paused run; apply and record requests that arrive; return the plan."""
        return plan


@dataclass(frozen=True)
class Round(Training):
    """A round to be played, or in progress.

    `began` is in seconds since 1970 (UTC), `start` is a time of `time.perf_counter`. `play_round`
    sets `histories`, the scores of each agent before the round.
    """

    steering: Steerer = field(default_factory=Steerer)
    began: float = field(default_factory=time.time)
    start: float = field(default_factory=time.perf_counter)
    histories: Mapping[Slot, Sequence[Score]] = field(default_factory=dict[Slot, Sequence[Score]])


def play_round(this: Round) -> RoundRecord:
    """Play a round and return its record.

    The cohort then holds the next generation, whose slots are `next_slots(record)`.
    """
    cohort, writer, observer = this.cohort, this.writer, this.observer
    histories = {slot: tuple(cohort.agents[slot].history) for slot in this.slots}
    this = replace(this, histories=histories)
    # `Population.train` does not share errors.
    with cohort.team.sharing_errors(), naming_failed_device():
        # `starts` counts the training prompts, or episode seeds, used so far.
        tallies, starts = train(this)
        observer.stage(this.number, "evaluate", 0, 1)
        results, saved = dict[Slot, Evaluation](), dict[Slot, str | None]()
        plan: RoundPlan | EvaluationRequest = EvaluationRequest(
            tuple(this.slots), 0, this.settings.validation_prompts(this.number)
        )
        while isinstance(plan, EvaluationRequest):
            fresh = dict[Slot, Evaluation]()
            if plan.fresh:
                fresh = evaluate_requested(this, plan)
            else:
                results |= evaluate_more(this, plan, tallies, results)
                saved |= save(this, plan)  # again after a further evaluation: it has the scores
            report = report_of(this, tallies, results, saved, fresh)
            plan = cohort.team.agree(report, partial(plan_and_record, this, plan, starts))
        writer.round_over()  # ranks drop their copies of checkpoints
        observer.round_done(plan.record)
        plan = wait_while_paused(this, plan)
        # After the round is with the writer: once it is written, a resume carries out its plan.
        carry_out(this, plan)
        stats.warn_without_signal(plan.warning)
    return plan.record


def evaluate_more(
    this: Round,
    request: EvaluationRequest,
    tallies: Mapping[Slot, stats.Tally],
    results: Mapping[Slot, Evaluation],
) -> dict[Slot, Evaluation]:
    """Evaluate the requested agents that are on this rank; return their evaluations.

    A new evaluation is merged with the agent's evaluation in `results` if both used the same
    prompts. Without prompts in the request, the training rewards are taken as evaluations.
    """
    if not request.prompts:
        evaluations = {slot: stats.measured_in_training(tallies[slot]) for slot in tallies}
    else:
        evaluations = evaluate_requested(this, request)
        for slot in evaluations.keys() & results.keys():
            earlier, evaluation = results[slot], evaluations[slot]
            with_tokens = replace(evaluation, tokens=evaluation.tokens + earlier.tokens)
            evaluations[slot] = (
                merged(earlier, evaluation) if earlier.units == evaluation.units else with_tokens
            )
    set_scores(
        this, {slot: _score(tallies[slot], evaluation) for slot, evaluation in evaluations.items()}
    )
    return evaluations


def evaluate_requested(this: Round, request: EvaluationRequest) -> dict[Slot, Evaluation]:
    """Evaluate the requested agents that are on this rank, on validation prompts.

    A `fresh` request takes the prompts after those of fitness, or in a small split the last ones.
    """
    count, fitness = request.prompts, this.settings.evolve.fitness
    with this.watch.phase("evaluate"):
        prompts = this.env.prompts("validation", 2 * count if request.fresh else count)
        if request.fresh:
            prompts = prompts[-count:]
        stream = request.stream(this.number)
        return evaluate_here(this.cohort, this.env, request.slots, prompts, fitness, stream=stream)


def save(this: Round, request: EvaluationRequest) -> dict[Slot, str | None]:
    """Pass copies of this rank's requested agents to the writer; return paths of checkpoints."""
    with this.watch.phase("checkpoint"):
        return {
            slot: this.writer.checkpoint(this.cohort, this.number, slot)
            for slot in request.slots
            if this.cohort.is_local(slot)
        }


def report_of(
    this: Round,
    tallies: Mapping[Slot, stats.Tally],
    results: Mapping[Slot, Evaluation],
    saved: Mapping[Slot, str | None],
    fresh: Mapping[Slot, Evaluation],
) -> RankReport:
    """Return the report of this rank to the first rank."""
    cohort = this.cohort
    agents = {
        slot: AgentReport(
            score=_score(tally, results[slot]),
            tally=tally,
            # Texts are for the first rank's log; they are not sent.
            evaluation=results[slot] if cohort.team.size == 1 else without_texts(results[slot]),
            checkpoint=saved[slot],
            steps=cohort.agents[slot].steps,
            dead_steps=cohort.agents[slot].dead_steps,
            rank_error=cohort.agents[slot].rank_error,
        )
        for slot, tally in tallies.items()
    }
    return RankReport(
        agents,
        cohort.reduced(),
        this.writer.hand_over(),
        {slot: without_texts(evaluation) for slot, evaluation in fresh.items()},
        judge_cost(this.env),
        cohort.take_decodes_by(),
    )


def plan_and_record(
    this: Round, request: EvaluationRequest, starts: int, reports: Sequence[RankReport]
) -> RoundPlan | EvaluationRequest:
    """Plan and record a round, or request another evaluation; only the first rank does so."""
    this.writer.receive([report.files for report in reports])
    agents, cohort = planning.agents_of(reports, this.slots), this.cohort
    next_request = planning.next_evaluation(agents, this.settings, request, this.number)
    if next_request is not None:
        return next_request
    archive = None if cohort.archive is None else cohort.archive.slot
    if not request.fresh:
        next_request = planning.archive_evaluation(agents, archive, this.settings, this.number)
        if next_request is not None:
            return next_request
    plan = plan_round(this, agents, starts, reports)
    prompts = this.settings.evolve.fitness.prompts
    if plan.last and plan.record.between:
        # A rule ends the run between two decisions: the best agent is chosen by a whole evaluation.
        if request.prompts < prompts:
            return EvaluationRequest(tuple(this.slots), 1, prompts)
        plan = replace(plan, record=replace(plan.record, between=False))
    elapsed = time.perf_counter() - this.start
    record = planning.timed(plan.record, this.watch.seconds, this.began, elapsed)
    plan = replace(plan, record=record)
    tallies = {slot: agent.tally for slot, agent in agents.items()}
    if not all(map(cohort.is_local, this.slots)):
        report_steps(this, range(this.settings.population.steps_per_round), tallies)
    plan = this.steering.steer(plan, next_id=next_member(cohort, plan.record))
    rows = stats.completion_rows(this.number, tallies, this.settings.record)
    this.writer.commit(plan.record, rows)
    return plan


def plan_round(
    this: Round,
    agents: Mapping[Slot, AgentReport],
    starts: int,
    reports: Sequence[RankReport],
) -> RoundPlan:
    """Plan a round from the reports of its agents; called on the first rank only."""
    cohort, scores = this.cohort, {slot: agent.score for slot, agent in agents.items()}
    set_scores(this, scores)
    with this.watch.phase("evolve"):
        return planning.next_round(
            planning.PlanInputs(
                settings=this.settings,
                hp_config=cohort.hp_config,
                check=cohort.check_hparams,
                seed=cohort.seed,
                round=this.number,
                ranks=reports,
                standings=[cohort.agents[slot].standing() for slot in this.slots],
                past=this.past,
                archive=None if cohort.archive is None else cohort.archive.standing(),
                next_id=cohort.next_member,
                task=this.env.name,
                seconds=time.perf_counter() - this.start,
                starts=starts,
                limited=this.limit is not None and this.limit.ends_after(list(scores.values())),
            )
        )


def wait_while_paused(this: Round, plan: RoundPlan) -> RoundPlan:
    """Wait while the run is paused; return the plan as requests have changed it in that time.

    The ranks exchange a message every second, so that a signal ends all of them.
    """
    while True:
        for note in plan.notes:
            this.observer.note(note)
        if not plan.paused:
            return plan
        plan = this.cohort.team.agree(plan, lambda plans: this.steering.listen(plans[0]))


def carry_out(this: Round, plan: RoundPlan) -> None:
    """Apply a plan to the cohort; called on every rank, for the agents of all ranks."""
    cohort, evolve, record = this.cohort, this.settings.evolve, plan.record
    scores = {agent.agent: agent.score for agent in record.agents}
    if this.limit is not None:  # the limits of the other ranks learn of the round here
        this.limit.ends_after(list(scores.values()))
    set_scores(this, scores)
    for agent in record.agents:
        state = cohort.agents[agent.agent]
        state.steps, state.dead_steps = plan.steps[agent.agent], int(agent.metrics["dead_steps"])
        state.rank_error = None  # recorded with this round
    for agent in record.agents:
        if record.archived == (record.round, agent.member) and agent.score is not None:
            put_into_archive(cohort, agent.agent, agent.score)
    if note := cohort.overlap.decide_after(record.seconds, this.env):
        this.observer.note(note)
        if cohort.team.rank == 0:
            this.writer.note(note)
    generation = recorded_generation(cohort, this.slots, record)
    apply(cohort, this.slots, generation, inherit_optimizer=evolve.inherit_optimizer)


def set_scores(this: Round, scores: Mapping[Slot, Score | None]) -> None:
    """Append the scores of a round to the histories of agents; None clears a history."""
    for slot, score in scores.items():
        history = [] if score is None else [*this.histories[slot], score]
        this.cohort.agents[slot].history = history


def _score(tally: stats.Tally, result: Evaluation) -> Score | None:
    """Return an agent's fitness, None if its update or its evaluation was not finite."""
    return result.score if not tally.failed and result.score.is_finite else None


def next_member(cohort: Cohort, record: RoundRecord) -> int:
    """Return a member id that no member of the run or of the next round has."""
    return max([cohort.next_member, record.next_member, *(m.id + 1 for m in record.members)])


def recorded_generation(cohort: Cohort, slots: Sequence[Slot], record: RoundRecord) -> Generation:
    """Return the generation that follows a recorded round, which `slots` have played."""
    previous = [cohort.agents[slot].member for slot in slots]
    archive = None if cohort.archive is None else cohort.archive.slot
    parents = recorded_parents(record, previous, archive)
    return Generation(record.members, record.next_hparams, parents, next_member(cohort, record))


def apply(
    cohort: Cohort,
    slots: Sequence[Slot],
    generation: Generation,
    *,
    inherit_optimizer: bool,
) -> None:
    """Replace the agents `slots` of a cohort by the next generation.

    Parents are copied over children, including their AdamW moments with `inherit_optimizer`. Each
    agent gets its hyperparameters and its member; a survivor keeps its latest `KEPT_SCORES` scores.
    A slot that is both copied and overwritten, which only a request can cause, is copied first.
    Agents that leave are removed, which frees their memory.
    """
    for parent, slot in copies_in_order(generation, lambda agent: cohort.agents[agent].rank):
        cohort.copy(parent, slot, inherit_optimizer=inherit_optimizer)
    cohort.reserve_members(generation.next_id)
    for member, hparams in zip(generation.members, generation.hparams, strict=True):
        cohort.set_hparams(member.agent, hparams)
        cohort.set_member(member.agent, member)
        # Truncate here rather than where scores are added, so that restored cohorts are covered.
        del cohort.agents[member.agent].history[:-KEPT_SCORES]
    remaining = set(generation.slots)
    cohort.place(generation.slots)  # dealt among the shards anew, and so among the ranks
    for slot in slots:
        if slot not in remaining:
            cohort.remove(slot)


def copies_in_order(
    generation: Generation, rank: Callable[[Slot], int]
) -> Iterator[tuple[Slot, Slot]]:
    """Yield the source and target of each copy; no source is overwritten before it is copied.

    `rank` returns the rank of a slot. Copies that share no rank follow each other where that is
    possible, because they run at the same time; see `order_transfers`.
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
        yield from order_transfers(free, lambda pair: (rank(pair[0]), rank(pair[1])))
        waiting = [pair for pair in waiting if pair[1] in sources]


def next_slots(record: RoundRecord) -> tuple[Slot, ...]:
    """Return the slots of the agents that play the round after a recorded one."""
    return tuple(member.agent for member in record.members)


def recorded_parents(
    record: RoundRecord, previous: Sequence[Member], archive: Slot | None = None
) -> tuple[Slot, ...]:
    """Return, for each agent of the next round, the recorded slot that its weights come from.

    A survivor keeps its slot. `previous` are the round's members, `archive` is the archive's slot.
    """
    slots: dict[int | None, Slot] = {member.id: member.agent for member in previous}
    return tuple(
        archive
        if archive is not None and member.mutation.restores and member.id not in slots
        else slots.get(member.id, slots.get(member.parent, member.agent))
        for member in record.members
    )

"""Carries out, between two rounds, what the user requests of a running run, and records it.

The first rank reads the requests and changes the plan of the next round; all ranks carry out the
plan. A request is done once the record of a round contains its outcome. A resume repeats recorded
outcomes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import final

from evo_grpo.evolve.steer import ON_RUN, NextRound, RoundEnd, steer
from evo_grpo.population.plan import RoundPlan
from evo_grpo.population.round import Steerer
from evo_grpo.record import family, run_dir
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.steering import carried_out, read_requests, remove_requests
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.types import Request, RequestOutcome

SECONDS_BETWEEN_LOOKS = 0.25
SECONDS_BETWEEN_EXCHANGES = 1.0
"""Seconds that the first rank of a paused run waits for requests before it sends a message.

Meanwhile, the other ranks wait for the message. They must not wait for days, nor longer than a
process has to exit after a signal.
"""


@final
class RunSteering(Steerer):
    """Carries out the requests in a run folder; see `round.Steerer`. Used on the first rank only.

    Requests that are older than this process were carried out by `take_up_requests`.

    Args:
        path: The folder as the user gave it, for messages.
        folder: The open folder.
        hp_config: The hyperparameters that may change, with their bounds.
        amend: Function that replaces the record of a round, for requests that came after it.
    """

    def __init__(
        self,
        path: Path,
        folder: run_dir.RunDir,
        hp_config: HyperparameterConfig,
        amend: Callable[[RoundRecord], None],
    ) -> None:
        self.path = path
        self.folder = folder
        self.hp_config = hp_config
        self._amend = amend
        self._next_id = 0
        self._done: set[str] = set()

    def steer(self, plan: RoundPlan, *, next_id: int) -> RoundPlan:
        """Carry out the requests made during a round; return the changed plan of the next round."""
        self._next_id = next_id
        plan = self._look(plan)
        if plan.paused:
            text = (
                f"paused after round {plan.record.round + 1}; continue with: evo-grpo steer "
                f"{self.path} continue"
            )
            return self._noting(plan, text)
        return self._noting_the_end(plan)

    def listen(self, plan: RoundPlan) -> RoundPlan:
        """Wait a short time for requests to a paused run, and carry them out; return the plan."""
        until = time.monotonic() + SECONDS_BETWEEN_EXCHANGES
        while True:
            steered = self._look(replace(plan, notes=()))
            new = steered.record.steering[len(plan.record.steering) :]
            if new:
                self._amend(steered.record)
                for outcome in new:
                    if outcome.request.op not in ON_RUN:
                        steered = self._noting(steered, _in_words(outcome))
                if not steered.paused and not steered.record.ends_process:
                    return self._noting(
                        steered, f"round {steered.record.round + 2} begins, as asked for"
                    )
                return self._noting_the_end(steered)
            if time.monotonic() >= until or steered.notes:
                return steered
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _noting_the_end(self, plan: RoundPlan) -> RoundPlan:
        if not plan.record.ends_process:
            return plan
        text = f"the process ends after round {plan.record.round + 1}, as asked for"
        return self._noting(plan, text)

    def _noting(self, plan: RoundPlan, text: str) -> RoundPlan:
        """Add a sentence to the log and to the plan's notes, which observers receive."""
        self.folder.note(text)
        return replace(plan, notes=(*plan.notes, text))

    def _look(self, plan: RoundPlan) -> RoundPlan:
        # Announce first: requests made from now on name the next round and wait for its end.
        self.folder.lock.write_round(plan.record.round + 1)
        requests = read_requests(self.folder.path).requests
        fresh = [request for request in requests if request.id not in self._done]
        outcomes: list[RequestOutcome] = []
        if not plan.last:  # after the last round, they wait for an extension of the run
            plan, outcomes, self._next_id = with_agents_steered(
                plan, fresh, self.hp_config, self._next_id
            )
        paused = plan.record.paused_by is not None
        for request in (r for r in fresh if r.op in ON_RUN):
            if request.op == "stop-after-round" and request.after > plan.record.round:
                continue  # it is for a later round
            why = _refused(request, paused=paused, last=plan.last)
            outcomes.append(RequestOutcome(request, why))
            if why:
                plan = self._noting(plan, _in_words(outcomes[-1]))
            elif request.op != "stop-after-round":
                paused = request.op == "pause"
        self._done |= {outcome.request.id for outcome in outcomes}
        return with_steering(plan, outcomes, self._next_id)


def take_up_requests(
    folder: run_dir.RunDir,
    rounds: list[RoundRecord],
    hp_config: HyperparameterConfig,
    *,
    unfinished: bool,
) -> list[str]:
    """Carry out and record the requests made while no process trained; return a sentence for each.

    The requests change the plan in the last record of `rounds`, which is replaced. If the run is
    finished, the requests wait for an extension. A request to pause, continue or stop a process
    that has ended is not carried out.
    """
    folder.lock.write_round(len(rounds))
    done = carried_out(rounds)
    requests = read_requests(folder.path).requests
    to_ended = [r for r in requests if r.op in ON_RUN and r.id in folder.earlier_requests]
    outcomes = list[RequestOutcome]()
    if rounds and unfinished:
        fresh = [request for request in requests if request.id not in done]
        plan = RoundPlan(rounds[-1], {}, last=False)
        plan, outcomes, next_id = with_agents_steered(
            plan, fresh, hp_config, family.next_member_id(rounds)
        )
        outcomes += [
            RequestOutcome(request, "the process that it was asked of has ended")
            for request in to_ended
            if request.id not in done
        ]
        if outcomes:
            rounds[-1] = with_steering(plan, outcomes, next_id).record
            folder.amend_round(rounds[-1])
    # Requests are removed only after they are recorded.
    remove_requests(folder.path, carried_out(rounds) | {request.id for request in to_ended})
    outcomes.sort(key=lambda outcome: outcome.request.id)  # as they were asked
    sentences = [f"asked for before this process: {_in_words(outcome)}" for outcome in outcomes]
    for sentence in sentences:
        folder.note(sentence)
    return sentences


def with_agents_steered(
    plan: RoundPlan, requests: Sequence[Request], hp_config: HyperparameterConfig, next_id: int
) -> tuple[RoundPlan, list[RequestOutcome], int]:
    """Carry out requests about agents; return the new plan, the outcomes, the next member id."""
    record, outcomes = plan.record, list[RequestOutcome]()
    steered = NextRound(record.members, record.next_hparams, record.decisions)
    played = {agent.member: agent.agent for agent in record.agents}
    for request in requests:
        if request.op in ON_RUN or request.after > record.round:
            continue
        steered, outcome = steer(
            steered, request, RoundEnd(record.round, played, hp_config, next_id)
        )
        outcomes.append(outcome)
        next_id = max([next_id, *(member.id + 1 for member in steered.members)])
    record = replace(
        record,
        members=steered.members,
        next_hparams=steered.hparams,
        decisions=steered.decisions,
    )
    return replace(plan, record=record), outcomes, next_id


def with_steering(plan: RoundPlan, done: Sequence[RequestOutcome], next_id: int) -> RoundPlan:
    """Return the plan with the outcomes of requests added to its record."""
    if not done:
        return plan
    steering = (*plan.record.steering, *sorted(done, key=lambda outcome: outcome.request.id))
    return replace(plan, record=replace(plan.record, steering=steering, next_member=next_id))


def _refused(request: Request, *, paused: bool, last: bool) -> str:
    """Return why a request to pause, continue or stop is refused; "" if it is not refused."""
    if last:
        return "no round follows"
    if request.op == "pause" and paused:
        return "the run is paused already"
    if request.op == "continue" and not paused:
        return "the run is not paused"
    return ""


def _in_words(outcome: RequestOutcome) -> str:
    return (
        f"{outcome.request}: refused: {outcome.refused}"
        if outcome.refused
        else f"{outcome.request}: done"
    )

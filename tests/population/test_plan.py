"""The plan of a round, from values alone: who is looked at again, who goes on, what is recorded."""

import math
from dataclasses import replace

import pytest
from plans import planned, report, settings

from evo_grpo.errors import RunFailedError
from evo_grpo.evolve.decide import Standing
from evo_grpo.population.plan import (
    LookAgain,
    RankReport,
    agents_of,
    least_reduced,
    next_look,
    timed,
)
from evo_grpo.record.records import SavedAgent
from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Member


def test_the_worst_agent_is_overwritten_by_the_best():
    plan = planned([report(10), report(30), report(20)])
    assert [member.parent for member in plan.record.members] == [1, None, None]
    assert [member.id for member in plan.record.members] == [3, 1, 2]
    assert [d.kind for d in plan.record.decisions] == ["copied"]
    assert not plan.last
    assert plan.steps == {0: 4, 1: 4, 2: 4}


def test_the_record_holds_what_the_ranks_reported():
    saved = SavedAgent("checkpoints/a", "sha", "moments")
    plan = planned([report(10, saved=saved), report(None), report(20)], starts=12,
                   reduced={"max_decode_rows": 8})  # fmt: skip
    first, failed, _ = plan.record.agents
    assert (first.checkpoint, first.adapter_sha256) == ("checkpoints/a", "sha")
    assert first.score.mean == pytest.approx(0.25)
    assert (failed.state, failed.score) == ("failed", None)
    assert failed.reason == "the gradient of 1 step(s) was not finite"
    assert (plan.record.starts, plan.record.evaluation_tokens) == (12, 9)
    assert plan.record.reduced == {"max_decode_rows": 8}
    assert plan.record.mutable == ("lr",)


def test_equal_reports_give_equal_plans():
    reports = [report(10), report(30), report(20)]
    assert planned(reports) == planned(reports)


def test_the_last_round_selects_nobody():
    reports = [report(10), report(30), report(20)]
    for plan in (planned(reports, number=2), planned(reports, limited=True)):
        assert plan.last
        assert [member.id for member in plan.record.members] == [0, 1, 2]
    stops = settings(stop={"fitness": 0.7})
    plan = planned(reports, made=stops)
    assert (plan.last, plan.record.stopped) == (True, ("fitness",))
    late = planned(reports, made=settings(stop={"minutes": 1.0}), seconds=61.0)
    assert late.record.stopped == ("minutes",)


def test_tokens_of_training_and_evaluation_count_for_the_rule():
    reports = [report(10), report(30), report(20)]  # 3 x 10 in training, 3 x 3 in the evaluation
    assert planned(reports, made=settings(stop={"tokens": 39})).record.stopped == ("tokens",)
    assert planned(reports, made=settings(stop={"tokens": 40})).record.stopped == ()


def test_without_an_agent_that_can_be_ranked_the_run_fails():
    with pytest.raises(RunFailedError, match="round 2: no agent has a finite update and fitness"):
        planned([report(None)] * 3, number=1)
    best = Standing(9, Member(0, 0), Hparams(), [report(30).score])
    made = settings()
    made = replace(made, evolve=made.evolve.replace(archive=True))
    plan = planned([report(None)] * 3, number=1, made=made, archive=best)
    assert {d.kind for d in plan.record.decisions} == {"restored", "left"}


@pytest.mark.parametrize(("racing", "looks"), [(0.0, []), (0.7, [2]), (2.0, [2, 2, 2])])
def test_looks_are_paid_from_the_budget(racing, looks):
    agents = {slot: report(right) for slot, right in enumerate((20, 19, 1))}
    made, look, seen = settings(racing), LookAgain((0, 1, 2), 0), []
    made = replace(made, population=made.population.replace(sizes=[3, 1]))
    streams = {look.stream(4)}
    while (look := next_look(agents, made, look, 4)) is not None:
        seen.append(len(look.slots))
        streams.add(look.stream(4))
        for slot in look.slots:
            again = replace(agents[slot].evaluation, looks=agents[slot].evaluation.looks + 1)
            agents[slot] = replace(agents[slot], evaluation=again)
    assert seen == looks
    assert len(streams) == 1 + len(looks), "every look has draws of its own"
    assert ("evaluate", 4) in streams


def test_only_the_first_round_says_that_it_had_nothing_to_learn_from():
    reports = [report(10, equal=1.0), report(30, equal=1.0), report(20, equal=1.0)]
    assert planned(reports).warning.startswith("round 1 had nothing to learn from")
    assert planned(reports, number=1).warning == ""


def test_reports_of_ranks_are_put_together():
    first, second, third = report(1), report(2), report(3)
    ranks = [
        RankReport({0: first, 2: third}, {"max_decode_rows": 8, "max_tokens_per_microbatch": 64}),
        RankReport({1: second, 2: report(9)}, {"max_decode_rows": 4}),
    ]
    assert list(agents_of(ranks, (1, 0, 2)).items()) == [(1, second), (0, first), (2, third)]
    assert least_reduced(ranks) == {"max_decode_rows": 4, "max_tokens_per_microbatch": 64}


def test_wall_time_is_divided_by_tokens():
    record = planned([report(10, tokens=30), report(30, tokens=10), report(20, tokens=0)]).record
    record = timed(record, {"learn": 1.5}, started=100.0, seconds=8.0)
    assert [agent.wall_seconds for agent in record.agents] == [6.0, 2.0, 0.0]
    assert (record.started, record.ended, record.seconds) == (100.0, 108.0, {"learn": 1.5})
    assert math.isclose(sum(agent.wall_seconds for agent in record.agents), 8.0)

"""The plan of a round, from values alone: who is looked at again, who goes on, what is recorded."""

import math
from dataclasses import replace

import pytest
from plans import PROMPTS, between, planned, report, settings, with_archive

from evo_grpo.errors import RunFailedError
from evo_grpo.evolve.decide import Standing
from evo_grpo.population.plan import timed
from evo_grpo.population.stats import Tally
from evo_grpo.record.records import RoundRecord
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
    plan = planned([report(10, checkpoint="checkpoints/a"), report(None), report(20)], starts=12,
                   of_rank={"reduced": {"max_decode_rows": 8}})  # fmt: skip
    first, failed, _ = plan.record.agents
    assert first.checkpoint == "checkpoints/a"
    assert first.score.mean == pytest.approx(0.25)
    assert (failed.state, failed.score) == ("failed", None)
    assert failed.reason == "the gradient of 1 step(s) was not finite"
    assert (plan.record.starts, plan.record.evaluation_tokens) == (12, 9)
    assert plan.record.reduced == {"max_decode_rows": 8}
    assert plan.record.mutable == ("lr",)


def test_the_last_round_selects_nobody():
    reports = [report(10), report(30), report(20)]
    for plan in (planned(reports, number=2), planned(reports, limited=True)):
        assert plan.last
        assert [member.id for member in plan.record.members] == [0, 1, 2]
    stops = settings(stop={"fitness": 0.6})
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
    assert (plan.record.archived, plan.record.fresh) == (None, None), "as before the round"


def test_only_the_first_round_says_that_it_had_nothing_to_learn_from():
    reports = [report(10, equal=1.0), report(30, equal=1.0), report(20, equal=1.0)]
    assert planned(reports).warning.startswith("round 1 had nothing to learn from")
    assert planned(reports, number=1).warning == ""


def test_wall_time_is_divided_by_tokens():
    record = planned([report(10, tokens=30), report(30, tokens=10), report(20, tokens=0)]).record
    record = timed(record, {"learn": 1.5}, started=100.0, seconds=8.0)
    assert [agent.wall_seconds for agent in record.agents] == [6.0, 2.0, 0.0]
    assert (record.started, record.ended, record.seconds) == (100.0, 108.0, {"learn": 1.5})
    assert math.isclose(sum(agent.wall_seconds for agent in record.agents), 8.0)


def test_between_two_decisions_all_agents_keep_their_weights_and_values():
    reports = [report(10), report(30), report(20)]
    for number in (0, 1, 3, 4):
        record = planned(reports, number=number, made=between()).record
        assert record.between
        assert record.members == tuple(Member(slot, slot) for slot in range(3))
        assert record.next_hparams == (Hparams(),) * 3
        assert record.decisions == ()
    decided = planned(reports, number=2, made=between()).record
    assert not decided.between
    assert decided.members[0].parent == 1
    assert decided.next_hparams[0] != Hparams()
    last = planned(reports, number=5, made=between())
    assert (last.last, last.record.between) == (True, False)


def test_between_two_decisions_an_agent_that_failed_leaves():
    record = planned([report(10), report(None), report(20)], made=between()).record
    assert [member.agent for member in record.members] == [0, 2]
    assert [(d.kind, d.agent) for d in record.decisions] == [("left", 1)]


def test_a_rule_ends_a_run_between_two_decisions():
    made, reports = between(stop={"fitness": 0.6}), [report(10), report(30), report(20)]
    plan = planned(reports, made=with_archive(made))
    assert (plan.last, plan.record.stopped) == (True, ("fitness",))
    assert plan.record.archived == (0, 1), "a run that is extended goes on with an archive"
    held = RoundRecord(0, (), {}, archived=(0, 2))
    plan = planned(reports, number=1, made=with_archive(made), past=[held], archive=ARCHIVE)
    assert plan.record.archived == (0, 2), "nothing was measured on fresh draws"


def test_prompts_of_a_round_depend_on_whether_it_decides():
    def prompts(**fitness):
        made = between()
        evolve = made.evolve.replace(fitness=made.evolve.fitness.replace(prompts=40, **fitness))
        return [replace(made, evolve=evolve).validation_prompts(number) for number in range(6)]

    assert prompts(between=0) == [0, 0, 40, 0, 0, 40]
    assert prompts(between=12) == [12, 12, 40, 12, 12, 40]
    assert prompts(between=80) == [40] * 6
    assert prompts() == [8, 8, 40, 8, 8, 40]
    # Cut off by its planned end, a run evaluates its last round wholly.
    made = replace(between(), population=between().population.replace(rounds=5))
    assert made.validation_prompts(4) == made.evolve.fitness.prompts


ARCHIVE = Standing(9, Member(0, 0), Hparams(), [report(25).score])


def archived(own, best, number=2, right=(10, 30, 20), made=None):
    """The record of a round after which fresh draws were right for the archive and the best."""
    reports, earlier = [report(one) for one in right], RoundRecord(0, (), {}, archived=(1, 7))
    return planned(
        reports,
        number=number,
        made=with_archive(made or between()),
        archive=ARCHIVE,
        past=[earlier],
        of_rank={"fresh": {9: report(own).evaluation, 1: report(best).evaluation}},
    ).record


def test_the_best_agent_enters_the_archive_unless_it_is_behind_on_fresh_draws():
    for own, best, held in ((30, 31, (2, 1)), (30, 30, (2, 1)), (31, 30, (1, 7))):
        record = archived(own, best)
        assert record.archived == held
        assert record.fresh == (report(own).score, report(best).score)
        assert "restored" not in {d.kind for d in record.decisions}


def test_an_archive_that_is_restored_stays_in_its_place():
    record = archived(40, 5)
    assert "restored" in {d.kind for d in record.decisions}
    assert record.archived == (1, 7)


def test_the_archive_of_a_run_of_many_decisions_needs_more_evidence():
    # Seven prompts differ, all in favour of the archive: p = 2 ** -7.
    once = replace(between(), population=between().population.replace(decisions=[3], rounds=9))
    assert "restored" in {d.kind for d in archived(30, 23, made=once).decisions}
    many = replace(between(), population=between().population.replace(decisions="every", rounds=9))
    assert "restored" not in {d.kind for d in archived(30, 23, made=many).decisions}


def test_what_enters_an_empty_archive_and_when():
    reports, made = [report(10), report(30), report(20)], with_archive(between())
    assert planned(reports, number=1, made=made).record.archived is None, "between decisions"
    assert planned(reports, number=2, made=made).record.archived == (2, 1)
    assert planned(reports, number=2, made=between()).record.archived is None, "without one"
    held = RoundRecord(2, (), {}, archived=(2, 1))
    record = planned(reports, number=3, made=made, past=[held], archive=ARCHIVE).record
    assert (record.archived, record.fresh) == ((2, 1), None), "nothing is measured"


def trained(right, *rewards):
    """An agent that answered so many prompts, with these mean rewards of its steps."""
    one = report(right)
    steps = [{**one.tally.metrics[0], "reward": reward} for reward in rewards]
    return replace(one, tally=replace(one.tally, metrics=steps))


def pair_of(made):
    """The settings of two agents that train as fitness measures."""
    fitness = made.evolve.fitness.replace(between=0)
    population = made.population.replace(size=2)
    return replace(made, population=population, evolve=made.evolve.replace(fitness=fitness))


def played(number, *reports, made):
    return planned(list(reports), number=number, made=made).record


def test_rewards_of_training_since_the_last_decision_count_at_a_decision():
    two = pair_of(between())
    # The fitness of agent 0 is ahead by a prompt, and its training is far behind.
    ahead, behind = trained(21, *[0.1] * 3), trained(20, *[0.9] * 3)
    past = [played(number, ahead, behind, made=two) for number in (0, 1)]
    record = planned([ahead, behind], number=2, made=two, past=past).record
    assert [member.parent for member in record.members] == [1, None]
    assert record.agents[0].score == ahead.score, "records keep the fitness alone"
    (decision,) = record.decisions
    assert (decision.kind, decision.agent, decision.other) == ("copied", 0, 1)
    assert decision.sentence.endswith("on 40 shared prompts and 9 steps of training")
    # Steps before the last decision count no more: three are too few for a line.
    alone = planned([ahead, behind], number=2, made=two, past=[]).record
    assert [member.parent for member in alone.members] == [None, 0]
    earlier = [*past, record]
    later = planned([ahead, behind], number=5, made=replace(
        two, population=two.population.replace(rounds=9)), past=earlier).record  # fmt: skip
    assert [member.parent for member in later.members] == [None, 0]
    # Where rounds in between have an evaluation, training is another measure.
    apart = two.evolve.replace(fitness=two.evolve.fitness.replace(between=8))
    other = planned([ahead, behind], number=2, made=replace(two, evolve=apart), past=past).record
    assert [member.parent for member in other.members] == [None, 0]


def test_training_counts_only_where_all_agents_have_played_its_steps():
    two = pair_of(between())
    ahead, behind = trained(21, *[0.1] * 3), trained(20, *[0.9] * 3)
    past = [played(number, ahead, made=two) for number in (0, 1)]
    record = planned([ahead, behind], number=2, made=two, past=past).record
    assert [member.parent for member in record.members] == [None, 0]


def test_a_step_without_a_reward_leaves_all_agents_comparable():
    def agent(right, rewards):
        steps = [{"failed": 0.0, "kl": 0.0, "reward": one, "zero_variance": 0.0} for one in rewards]
        return replace(report(right), tally=Tally(metrics=steps, tokens=9))

    made = between()
    made = replace(made, evolve=made.evolve.replace(fitness=made.evolve.fitness.replace(between=0)))
    rewards = [0.5] * 6
    agents = [agent(PROMPTS, rewards), agent(0, [*rewards[:5], math.nan])]
    made = replace(made, population=made.population.replace(size=2, decisions=[1, 6], sizes=None))
    record = planned(agents, 0, made=made).record
    # Two agents for two places: the worse one becomes a copy, by their prompts alone.
    (copied,) = (one for one in record.decisions if one.kind == "copied")
    assert (copied.agent, copied.other, copied.difference) == (1, 0, 1.0)
    assert "steps of training" not in copied.sentence

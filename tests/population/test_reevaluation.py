"""Who is evaluated, when and on what: further looks, rounds in between, and the archive."""

from dataclasses import replace

import numpy as np
import pytest
from plans import between, report, settings, with_archive
from played_rounds import Memory, adapters, equal, play
from random_runs import with_scores
from small_run import small

from evo_grpo.population.plan import (
    EvaluationRequest,
    RankReport,
    agents_of,
    archive_evaluation,
    least_reduced,
    next_evaluation,
)
from evo_grpo.population.stats import Tally
from evo_grpo.training.assemble import prepare


@pytest.mark.parametrize(("racing", "looks"), [(0.0, []), (0.7, [2]), (2.0, [2, 2, 2])])
def test_looks_are_paid_from_the_budget(racing, looks):
    agents = {slot: report(right) for slot, right in enumerate((20, 19, 1))}
    made, look, seen = (
        settings(racing, rounds=9, decisions="every"),
        EvaluationRequest((0, 1, 2), 0, 40),
        [],
    )
    made = replace(made, population=made.population.replace(sizes=[3, 1]))
    streams = {look.stream(4)}
    while (look := next_evaluation(agents, made, look, 4)) is not None:
        seen.append(len(look.slots))
        assert look.prompts == 40
        streams.add(look.stream(4))
        for slot in look.slots:
            again = replace(agents[slot].evaluation, looks=agents[slot].evaluation.looks + 1)
            agents[slot] = replace(agents[slot], evaluation=again)
    assert seen == looks
    assert len(streams) == 1 + len(looks), "every look has draws of its own"
    assert ("evaluate", 4) in streams


def test_nobody_is_looked_at_again_between_two_decisions():
    agents = {slot: report(right) for slot, right in enumerate((20, 19, 1))}
    made = between(racing=2.0)
    made = replace(made, population=made.population.replace(sizes=[3, 2]))
    look = EvaluationRequest((0, 1, 2), 0, 40)
    assert next_evaluation(agents, made, look, 0) is None
    assert next_evaluation(agents, made, look, 2) is not None
    assert next_evaluation(agents, made, replace(look, fresh=True), 2) is None


def test_the_archive_and_the_best_agent_are_measured_at_decisions_and_at_the_end():
    agents = {slot: report(right) for slot, right in enumerate((20, 30, 30))}
    made = with_archive(between())
    look = archive_evaluation(agents, 9, made, 2)
    assert (look.slots, look.fresh) == ((1, 9), True), "the first of equal agents"
    assert look.prompts == made.evolve.fitness.prompts
    assert look.stream(2) == ("archive", 2)
    assert archive_evaluation(agents, 9, made, 5).slots == (1, 9)
    for archive, settings_, number in ((9, made, 1), (None, made, 2), (9, between(), 2)):
        assert archive_evaluation(agents, archive, settings_, number) is None
    failed = {slot: report(None) for slot in range(3)}
    assert archive_evaluation(failed, 9, made, 2) is None
    # A run cut off at a planned end without a decision.
    short = replace(made, population=made.population.replace(rounds=5))
    assert archive_evaluation(agents, 9, short, 4).slots == (1, 9)


def test_reports_of_ranks_are_put_together():
    first, second, third = report(1), report(2), report(3)
    ranks = [
        RankReport({0: first, 2: third}, {"max_decode_rows": 8, "max_tokens_per_microbatch": 64}),
        RankReport({1: second, 2: report(9)}, {"max_decode_rows": 4}),
    ]
    assert list(agents_of(ranks, (1, 0, 2)).items()) == [(1, second), (0, first), (2, third)]
    assert least_reduced(ranks) == {"max_decode_rows": 4, "max_tokens_per_microbatch": 64}


def spied(prepared):
    """Prepare to note the prompts that the engine answers, call by call."""
    seen, rollout = [], prepared.cohort.engine.rollout

    def spy(requests):
        seen.append([[prompt.index for prompt in request.prompts] for request in requests])
        return rollout(requests)

    prepared.cohort.engine.rollout = spy
    return seen


def test_between_two_decisions_nobody_is_evaluated_and_all_train_on():
    prepared = prepare(small(population__rounds=8, population__steps_per_round=2).settled(8))
    seen, writer = spied(prepared), Memory()
    before = [prepared.cohort.agents[slot].hparams for slot in prepared.slots]
    record = play(prepared, writer=writer)
    assert record.between
    assert len(seen) == 2, "two steps of training"
    assert record.evaluation_tokens == 0
    trained = writer.slots_at_commit[-1]
    for slot, agent in zip(prepared.slots, record.agents, strict=True):
        assert (agent.score.n, agent.score.per_prompt) == (2, ())
        assert agent.score.mean == pytest.approx(np.mean(agent.step_rewards))
        assert equal(adapters(prepared.cohort)[slot], trained[slot])
    assert [prepared.cohort.agents[slot].hparams for slot in prepared.slots] == before
    second = play(prepared, 1, writer=writer)
    assert not second.between
    assert len(seen) == 5, "two steps, and the evaluation"
    assert {(agent.score.n, len(agent.score.per_prompt)) for agent in second.agents} == {(6, 6)}


def test_between_two_decisions_few_prompts_are_answered_where_training_is_another_measure():
    fitness = {"prompts": 6, "between": 2, "test_prompts": 6}
    prepared = prepare(small(population__rounds=8, evolve__fitness=fitness))
    seen = spied(prepared)
    few, whole = play(prepared), play(prepared, 1)
    assert [len(agent.score.per_prompt) for agent in few.agents] == [2] * 3
    assert [len(agent.score.per_prompt) for agent in whole.agents] == [6] * 3
    assert seen[1][0] == seen[3][0][:2], "the first of the same prompts"


def test_a_rule_that_ends_a_run_between_two_decisions_has_all_agents_evaluated():
    stop = {"tokens": 1}
    decisions = {"population__rounds": 8, "population__decisions": [2, 4, 6, 8]}
    prepared = prepare(small(**decisions, population__stop=stop).settled(8))
    seen, writer = spied(prepared), Memory()
    record = play(prepared, writer=writer)
    assert record.stopped == ("tokens",)
    assert len(seen) == 2, "one step of training, and the evaluation"
    assert [len(agent.score.per_prompt) for agent in record.agents] == [6] * 3
    assert record.evaluation_tokens > 0
    assert [m.id for m in record.members] == [0, 1, 2]
    assert len(writer.commits) == 1


def test_a_rule_that_no_longer_holds_after_the_whole_evaluation_does_not_end_a_run(monkeypatch):
    rules = {"population__stop": {"patience": 1}, "population__decisions": [4, 8]}
    prepared = prepare(small(population__rounds=8, **rules))
    fitness = prepared.round_settings.evolve.fitness.replace(between=0)
    evolve = prepared.round_settings.evolve.replace(fitness=fitness)
    first = play(prepared, evolve=evolve)
    past = replace(with_scores(first, [-1.0] * len(first.agents)), between=True)
    monkeypatch.setattr(Tally, "step_rewards", property(lambda tally: (-2.0,)))
    seen = spied(prepared)
    record = play(prepared, 1, past=[past], evolve=evolve)
    # Training, by which the rule holds, and an evaluation of all, by which it does not.
    assert len(seen) == 2
    assert (record.stopped, record.between) == ((), True)


def test_the_archive_and_the_best_agent_meet_on_other_prompts_than_those_of_fitness():
    config = small(population__rounds=9, population__decisions="every", evolve__archive=True)
    prepared = prepare(config)
    first = play(prepared)
    assert first.archived == (0, best_of(first))
    assert first.fresh is None, "there was none to meet"
    seen = spied(prepared)
    second = play(prepared, 1)
    _, fitness, fresh = seen
    assert len(fresh) == 2, "the archive and the best agent"
    assert fresh[0] == fresh[1]
    assert len(fresh[0]) == 6
    assert not set(fresh[0]) & set(fitness[0])
    assert [len(score.per_prompt) for score in second.fresh] == [6, 6]
    own, best = second.fresh
    held = (1, best_of(second)) if best.mean >= own.mean else first.archived
    assert second.archived == held


def best_of(record):
    """The member with the greatest fitness of a round."""
    return max(record.agents, key=lambda agent: agent.score.mean).member

"""A child of two survivors that tie: which two, whose place it takes, and what is recorded."""

from dataclasses import replace

import numpy as np
import pytest
from plans import PROMPTS, planned, report, settings

from evo_grpo.envs.protocol import Experience
from evo_grpo.population.children import child_to_try, with_child
from evo_grpo.population.evaluate import Evaluation, summarise
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter
from evo_grpo.types import Mutation

LR = HyperparameterConfig(lr=RLParameter(min=1e-5, max=1e-2))


def recombining(recombine="average"):
    made = settings()
    return replace(made, evolve=made.evolve.replace(significance=0.1, recombine=recombine))


def tried(reports, recombine="average", last=False, may=lambda first, second: True):
    """The plan of a round, and the child that is tried before it is recorded."""
    made = recombining(recombine)
    plan = planned(reports, made=made, limited=last)
    return plan, child_to_try(plan, made, LR, may)


def evaluated(right, tokens=5):
    rewards = np.array([1.0] * right + [0.0] * (PROMPTS - right))
    return Evaluation(
        summarise(rewards, PROMPTS), Experience((), rewards[:, None]), rewards, tokens=tokens
    )


def parents(found):
    return found.pair.first, found.pair.second, found.pair.place


def test_the_best_two_that_tie_have_a_child_in_the_place_of_the_worse():
    # The copy over agent 0 is dropped, since the best is not significantly ahead.
    plan, found = tried([report(28), report(30), report(29)])
    assert [member.id for member in plan.record.members] == [0, 1, 2]
    assert parents(found) == (1, 2, 2)


def test_a_child_takes_the_place_of_a_copy():
    plan, found = tried([report(5), report(30), report(29)])
    assert [member.parent for member in plan.record.members] == [1, None, None]
    assert parents(found) == (1, 2, 0)


def test_an_agent_that_was_restored_before_the_round_may_be_a_parent():
    made = recombining()
    plan = planned([report(28), report(30), report(29)], made=made)
    members = [replace(m, mutation=Mutation("restore")) for m in plan.record.members]
    plan = replace(plan, record=replace(plan.record, members=tuple(members)))
    assert parents(child_to_try(plan, made, LR, lambda first, second: True)) == (1, 2, 2)
    # One that is restored now has the weights of the archive, which is not compared.
    members[1] = replace(members[1], id=7, parent=1)
    plan = replace(plan, record=replace(plan.record, members=tuple(members)))
    assert parents(child_to_try(plan, made, LR, lambda first, second: True)) == (2, 0, 0)


def test_agents_that_the_test_separates_have_no_child():
    _, found = tried([report(5), report(30), report(10)])
    assert found is None


@pytest.mark.parametrize(
    "given", [{"recombine": "none"}, {"last": True}, {"may": lambda first, second: False}]
)
def test_a_run_without_recombination_and_its_last_round_try_no_child(given):
    assert tried([report(28), report(30), report(29)], **given)[1] is None


def test_a_child_that_is_ahead_is_recorded_with_both_parents():
    plan, found = tried([report(28), report(30), report(29)])
    made = with_child(found, evaluated(31), 7).record
    child = made.members[2]
    assert (child.id, child.agent, child.parent, child.second_parent) == (7, 2, 1, 2)
    assert (child.born, child.mutation.op) == (1, "recombine")
    assert made.members[:2] == plan.record.members[:2]
    assert made.evaluation_tokens == plan.record.evaluation_tokens + 5
    assert [(d.agent, d.kind) for d in made.decisions] == [(0, "kept"), (2, "recombined")]
    assert made.decisions[-1].sentence == (
        "agent 2 became a child of agents 1 and 2, ahead of agent 1: +0.03 ± 0.02 on 40 shared "
        "prompts"
    )


@pytest.mark.parametrize("right", [30, 20])
def test_a_child_that_is_not_ahead_costs_its_tokens_and_changes_no_agent(right):
    plan, found = tried([report(28), report(30), report(29)])
    made = with_child(found, evaluated(right), 7).record
    assert made.members == plan.record.members
    assert made.next_hparams == plan.record.next_hparams
    assert made.evaluation_tokens == plan.record.evaluation_tokens + 5
    assert made.decisions[-1].kind == "discarded"


def test_a_child_in_the_place_of_a_copy_keeps_the_id_and_drops_the_decision_of_the_copy():
    plan, found = tried([report(5), report(30), report(29)])
    made = with_child(found, evaluated(32), 9).record
    assert made.members[0].id == plan.record.members[0].id == 3
    assert [d.kind for d in made.decisions] == ["recombined"]


def test_a_child_has_the_values_of_its_place_and_the_larger_rank():
    space = HyperparameterConfig(**{"lr": LR["lr"], "lora.r": RLParameter(min=1, max=16)})
    reports = [report(28), report(30), report(29)]
    made = recombining()
    plan = planned(reports, made=made)
    hparams = [Hparams(lr=lr, lora_r=r) for lr, r in ((1e-3, 2), (2e-3, 8), (3e-3, 4))]
    agents = tuple(
        replace(agent, hparams=own) for agent, own in zip(plan.record.agents, hparams, strict=True)
    )
    record = replace(plan.record, agents=agents, next_hparams=tuple(hparams))
    found = child_to_try(replace(plan, record=record), made, space, lambda first, second: True)
    child = with_child(found, evaluated(31), 7).record
    assert child.next_hparams[2] == Hparams(lr=3e-3, lora_r=8)
    assert child.members[2].mutation.changes == {"lr": (2e-3, 3e-3)}

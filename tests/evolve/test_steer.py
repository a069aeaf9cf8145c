"""Requests of a person on a plan of plain values."""

import pytest

from evo_grpo.evolve.generation import changes_between
from evo_grpo.evolve.steer import NextRound, RoundEnd, steer
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.types import Decision, Member, Mutation, Request

SPACE = HyperparameterConfig(lr={"min": 1e-4, "max": 1e-2}, clip_coef={"min": 0.1, "max": 0.3})
NAN = float("nan")


def plan():
    """Members 0 and 1 survived; 4 is a mutated copy of 1, and 5 the best ever, brought back."""
    members = (
        Member(0, 0),
        Member(1, 1),
        Member(4, 2, 1, 3, Mutation("mutate", {"lr": (0.001, 0.002)})),
        Member(5, 3, 9, 3, Mutation("restore", {"lr": (0.004, 0.002)})),
    )
    hparams = tuple(Hparams(lr=lr) for lr in (0.005, 0.001, 0.002, 0.002))
    copied = Decision("copied", 2, 1, 0.1, 0.1, 4, "agent 2 took agent 1's weights")
    return NextRound(members, hparams, (copied,))


def boundary():
    return RoundEnd(2, {0: 0, 1: 1, 2: 2, 3: 3}, SPACE, 6)


def asked(op, **given):
    return Request("1", op, **given)


def done(*requests, start=None):
    found = start or plan()
    for request in requests:
        found, became = steer(found, request, boundary())
        assert not became.refused
    return found


def refused(request, start=None):
    before = start or plan()
    found, became = steer(before, request, boundary())
    assert found[:2] == before[:2]
    assert found.decisions[-1].kind == "refused"
    assert became.refused in found.decisions[-1].sentence
    return became.refused


def test_an_agent_that_is_stopped_has_no_place():
    found = done(asked("stop-agent", agent=2))
    assert [member.agent for member in found.members] == [0, 1, 3]
    assert [one.lr for one in found.hparams] == [0.005, 0.001, 0.002]
    # That it was copied before is no longer so.
    assert [one.kind for one in found.decisions] == ["steered"]
    assert found.decisions[0].sentence == "agent 2 was stopped by hand"


def test_a_clone_is_a_child_of_whom_the_weights_come_from():
    found = done(asked("clone", source=1, agent=0))
    assert found.members[0] == Member(6, 0, 1, 3, Mutation("steer-clone"))
    assert found.hparams[0] == found.hparams[1]
    # Of a copy that has not trained: its parent, with what mutated on the way.
    found = done(asked("clone", source=2, agent=0))
    assert found.members[0].parent == 1
    assert found.members[0].mutation == Mutation("steer-clone", {"lr": (0.001, 0.002)})
    assert found.hparams[0].lr == 0.002


def test_what_has_not_trained_keeps_its_id():
    assert done(asked("clone", source=0, agent=2)).members[2].id == 4
    assert done(asked("set", agent=2, values={"lr": 0.003})).members[2].id == 4


def test_new_ids_are_never_given_twice():
    requests = [asked("set", agent=agent, values={"beta": 0.1}) for agent in (0, 1)]
    assert [member.id for member in done(*requests).members] == [6, 7, 4, 5]


def test_the_best_ever_stays_where_the_weights_come_from():
    for found, index in (
        (done(asked("clone", source=3, agent=0)), 0),
        (done(asked("set", agent=3, values={"lr": 0.001})), 3),
    ):
        member = found.members[index]
        assert (member.parent, member.mutation.op, member.mutation.restores) == (
            9, "steer-restore", True,
        )  # fmt: skip


def test_values_that_are_set_are_recorded_with_those_before():
    found = done(asked("set", agent=1, values={"lr": 0.003, "group_size": 6}))
    assert found.members[1] == Member(
        6, 1, 1, 3, Mutation("steer-set", {"lr": (0.001, 0.003), "group_size": (8, 6)})
    )
    assert (found.hparams[1].lr, found.hparams[1].group_size) == (0.003, 6)
    # From what the parent trained with, not from what a mutation had made of it.
    found = done(asked("set", agent=2, values={"lr": 0.003}))
    assert found.members[2].mutation == Mutation("steer-set", {"lr": (0.001, 0.003)})
    # A clone that is set stays a clone.
    found = done(asked("clone", source=0, agent=1), asked("set", agent=1, values={"lr": 0.003}))
    assert found.members[1].mutation == Mutation("steer-clone", {"lr": (0.005, 0.003)})


def test_clips_are_recorded_by_their_ends_where_one_is_a_pair():
    pair, scalar = Hparams(clip_coef=(0.8, 1.25)), Hparams(clip_coef=0.2)
    assert changes_between(scalar, pair, SPACE) == {"clip_high": (1.2, 1.25)}
    assert changes_between(scalar, Hparams(clip_coef=0.3), SPACE) == {"clip_coef": (0.2, 0.3)}
    # No limit is no number.
    assert changes_between(Hparams(batch_size=None), Hparams(batch_size=4), SPACE) == {}


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (asked("stop-agent", agent=7), "expected one that trains in round 4, 0, 1, 2, 3, got 7"),
        (asked("clone", source=7, agent=0), "got 7"),
        (asked("clone", source=1, agent=1), "expected another agent to clone, got itself"),
        (asked("set", agent=0, values={}), "expected a hyperparameter to set, got none"),
        (asked("set", agent=0, values={"lr": 0.5}), r"its range [0.0001, 0.01], got 0.5"),
        (asked("set", agent=0, values={"clip_coef": [0.5, 1.2]}), "got 0.5"),
        (asked("set", agent=0, values={"temprature": 0.5}), "did you mean 'temperature'?"),
        (asked("set", agent=0, values={"group_size": 1}), "group of one has no advantage"),
        (asked("set", agent=0, values={"lr": "fast"}), "'fast'"),
        (asked("set", agent=0, values={"lr": 0.005}), "expected a change, got its present values"),
        (asked("burn", agent=0), "expected one of stop-agent, clone, set, got 'burn'"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_reason(request_, said):
    assert said in refused(request_)


def test_an_agent_that_left_in_that_selection_is_said_to_have_left():
    before = plan()
    without = before._replace(members=before.members[:3], hparams=before.hparams[:3])
    assert "got 3, which left after this round" in refused(asked("stop-agent", agent=3), without)


def test_the_last_agent_is_not_stopped():
    before = plan()
    alone = before._replace(members=before.members[:1], hparams=before.hparams[:1])
    assert "got the only one; end the run" in refused(asked("stop-agent", agent=0), alone)


def test_one_that_is_refused_does_not_hinder_the_next():
    found, became = steer(plan(), asked("stop-agent", agent=8), boundary())
    assert became.refused
    found = done(asked("stop-agent", agent=0), start=found)
    assert [member.agent for member in found.members] == [1, 2, 3]


def test_agents_that_would_swap_their_weights_are_refused():
    # 0 -> 2 saves the weights of 0; 1 -> 0 and 2 -> 1 then swap those of 0 and 1.
    first = done(asked("clone", source=0, agent=2), asked("clone", source=1, agent=0))
    assert "take each other's weights" in refused(asked("clone", source=2, agent=1), first)

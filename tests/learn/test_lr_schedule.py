"""The learning-rate schedule: a factor on the agent's own lr, by its own step."""

from itertools import pairwise

import pytest
import torch
from tiny_cohort import PLAIN, build_cohort, learn, make_rows

from evo_grpo.errors import ConfigError
from evo_grpo.learn.rows import AgentBatch
from evo_grpo.learn.updates import lr_factor
from evo_grpo.settings import LRSchedule

TWENTY = LRSchedule(steps=20, warmup_proportion=0.2)
FIVE = LRSchedule(steps=5, warmup_proportion=0.4)


def step(cohort):
    cohort.learn([AgentBatch(0, make_rows(cohort.agents[0].steps))], stream=("test",))
    return cohort.agents[0].optimizer.param_groups[0]["lr"]


def test_the_factor_warms_up_linearly():
    assert [lr_factor(TWENTY, i) for i in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert lr_factor(TWENTY, 4) == 1.0


def test_the_factor_decays_as_a_cosine_and_the_last_step_still_moves():
    factors = [lr_factor(TWENTY, i) for i in range(4, 20)]
    assert all(a > b for a, b in pairwise(factors))
    assert factors[8] == pytest.approx(0.5)  # half of 16 steps
    assert 0 < factors[-1] < 0.01


def test_the_factor_stays_beyond_the_end():
    assert lr_factor(TWENTY, 20) == lr_factor(TWENTY, 19) == lr_factor(TWENTY, 10_000)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, r"steps: expected an integer >= 1, got 0; it counts GRPO steps"),
        ({"steps": 5, "warmup_proportion": 1.0}, r"a number in \[0, 1\), got 1.0"),
        ({"steps": 5, "warmup_proportion": -0.1}, r"a number in \[0, 1\), got -0.1"),
    ],
)
def test_values_out_of_range_are_named(given, message):
    with pytest.raises(ConfigError, match=message):
        LRSchedule(**given)


def test_an_agents_lr_follows_the_schedule():
    cohort = build_cohort(lr_schedule=FIVE)
    seen = [step(cohort) for _ in range(7)]
    expected = [PLAIN.lr * lr_factor(FIVE, i) for i in range(7)]
    assert seen == pytest.approx(expected)
    assert seen[5] == seen[6]


def test_a_mutated_lr_keeps_its_place_in_the_schedule():
    cohort = build_cohort(lr_schedule=TWENTY)
    first = [step(cohort) for _ in range(2)]
    assert first == pytest.approx([PLAIN.lr * 0.25, PLAIN.lr * 0.5])
    cohort.set_hparams(0, PLAIN.replace(lr=3e-2))
    assert step(cohort) == pytest.approx(3e-2 * 0.75)
    assert cohort.agents[0].hparams.lr == 3e-2


def test_each_agent_has_a_place_of_its_own():
    cohort = build_cohort(2, lr_schedule=TWENTY)
    step(cohort)
    assert [agent.lr_factor(TWENTY) for agent in cohort.agents.values()] == [0.5, 0.25]


def test_torchs_own_scheduler_agrees():
    cohort = build_cohort()
    optimizer = cohort.agents[0].optimizer
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: lr_factor(TWENTY, i))
    for place in range(6):
        assert scheduler.get_last_lr() == pytest.approx([PLAIN.lr * lr_factor(TWENTY, place)])
        learn(cohort, [0], [make_rows(place)])
        scheduler.step()

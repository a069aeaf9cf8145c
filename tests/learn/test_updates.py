"""Gradients over a base in float16: as far from float32 as its rounding, for many tokens too."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from batch_loss import policy_loss
from tiny_cohort import PLAIN, build_cohort, build_model, learn, make_rows, same, weights

from evo_grpo.errors import ConfigError
from evo_grpo.learn import learner as learners
from evo_grpo.learn.rows import AgentTraining, Row
from evo_grpo.learn.updates import TYPICAL, LossScales, OwnOptimizers, first_scale
from evo_grpo.settings.algorithm import LossConfig

HALF = torch.float16
ROWS = make_rows(5, groups=3, answer=(4, 12))
#: What float16 moves a gradient of this model by, with 11 bits for each number on its way.
ROUNDING = 0.01


class Kept(OwnOptimizers):
    """Takes no step, and keeps the gradients of all agents."""

    def step(self, agents):
        grads = [self.slots.parameters(agent.adapter) for agent, _ in agents]
        self.kept = [torch.cat([p.grad.flatten().double() for p in mine]) for mine in grads]


def cohort_of(dtype, size=1, hparams=PLAIN, **settings):
    """Agents over a base whose weights are those of float16 in any dtype."""
    return build_cohort(size, hparams, model=build_model().half().to(dtype), **settings)


def gradients(dtype, rows=ROWS, *, modules=False, hparams=PLAIN, **settings):
    """The gradients of an agent's step, flat."""
    cohort = cohort_of(dtype, hparams=hparams, **settings)
    cohort.base.specialized = not modules
    cohort.learner.updates = Kept(cohort.slots)
    learn(cohort, [0], [rows])
    return cohort.learner.updates.kept[0]


def off(got, expected):
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("tokens", "modules", "how"),
    [
        *((tokens, False, {}) for tokens in (1e3, 1e4, 1e6, 1e8)),
        (1e8, True, {}),
        (1e8, False, {"max_tokens_per_microbatch": 40}),
        (1e8, False, {"gradient_checkpointing": True}),
        (1e8, True, {"max_tokens_per_microbatch": 40, "gradient_checkpointing": True}),
    ],
)
def test_gradients_are_those_of_float32_whatever_the_loss_is_divided_by(tokens, modules, how):
    """dr_grpo divides by a number of one's choice: here by that of the tokens of a larger step."""
    how = {**how, "loss_type": "dr_grpo", "max_output_tokens": int(tokens / len(ROWS))}
    expected = gradients(torch.float32, modules=modules, **how)
    assert off(gradients(HALF, modules=modules, **how), expected) < ROUNDING


@pytest.mark.parametrize("tokens", [1e6, 1e8])
def test_without_a_scale_they_are_lost(tokens, monkeypatch):
    how = {"loss_type": "dr_grpo", "max_output_tokens": int(tokens / len(ROWS))}
    expected = gradients(torch.float32, **how)
    monkeypatch.setattr(learners, "first_scale", lambda *given: 0)
    assert off(gradients(HALF, **how), expected) > 0.3


@pytest.mark.parametrize("factor", [1e-12, 1e-6, 1.0, 1e6, 1e12])
def test_advantages_of_any_size_keep_their_gradient(factor):
    """`mean_only` leaves advantages in units of reward."""
    rows = [replace(row, advantage=row.advantage * factor) for row in ROWS]
    expected = gradients(torch.float32, rows)
    assert off(gradients(HALF, rows), expected) < ROUNDING


@pytest.mark.parametrize("beta", [0.1, 30.0])
def test_a_kl_term_keeps_its_gradient_too(beta):
    how = {"hparams": PLAIN.replace(beta=beta)}
    expected = gradients(torch.float32, **how)
    assert off(gradients(HALF, **how), expected) < ROUNDING


def test_a_gradient_that_overflows_is_computed_again_with_a_lower_scale(monkeypatch):
    expected = gradients(torch.float32)
    lowered, lower = [], LossScales.lower
    monkeypatch.setattr(learners, "first_scale", lambda *given: 30)
    monkeypatch.setattr(
        LossScales, "lower", lambda self, who: lowered.append(who) or lower(self, who)
    )
    assert off(gradients(HALF), expected) < ROUNDING
    assert lowered in ([0], [0, 0])


def test_metrics_do_not_see_the_scale(monkeypatch):
    (plain,) = learn(cohort_of(torch.float32), [0], [ROWS])
    (scaled,) = learn(cohort_of(HALF), [0], [ROWS])
    monkeypatch.setattr(learners, "first_scale", lambda *given: 30)
    (again,) = learn(cohort_of(HALF), [0], [ROWS])
    for name, value in plain.items():
        assert scaled[name] == pytest.approx(value, rel=0.02, abs=2e-3), name
        assert again[name] == pytest.approx(scaled[name], rel=2e-3, abs=1e-6), name
    assert again["rows"] == len(ROWS)
    assert again["updates"] == 1


@pytest.mark.parametrize(
    "poison", [{"advantage": math.nan}, {"advantage": math.inf}, {"advantage": 1e38}]
)
def test_an_agent_beyond_help_leaves_the_others_bit_identical(poison):
    rows = [make_rows(20 + i, groups=2) for i in range(3)]
    bad = [*rows[:1], [replace(rows[1][0], **poison), *rows[1][1:]], *rows[2:]]
    clean, dirty = cohort_of(HALF, 3), cohort_of(HALF, 3)
    before = weights(dirty, 1)
    expected, got = learn(clean, [0, 1, 2], rows), learn(dirty, [0, 1, 2], bad)
    for slot in (0, 2):
        assert same(weights(clean, slot), weights(dirty, slot))
        assert got[slot] == expected[slot]
    assert same(weights(dirty, 1), before)
    assert (got[1]["failed"], got[1]["updates"]) == (1, 0)


def test_a_loss_that_is_not_finite_is_not_computed_again(monkeypatch):
    cohort, passes = cohort_of(HALF), []
    rows = [replace(ROWS[0], advantage=math.nan), *ROWS[1:]]
    backward = cohort.base.backward
    monkeypatch.setattr(cohort.base, "backward", lambda loss: passes.append(1) or backward(loss))
    assert learn(cohort, [0], [rows])[0]["failed"] == 1
    assert len(passes) == 1


def test_agents_of_any_scales_have_the_gradients_that_each_has_alone():
    """Not to the bit: another batch is rounded otherwise."""
    rows = [
        [replace(row, advantage=row.advantage * factor) for row in make_rows(20 + i, groups=1 + i)]
        for i, factor in enumerate([1e-9, 1.0, 1e9])
    ]
    together = cohort_of(HALF, 3)
    together.learner.updates = Kept(together.slots)
    learn(together, [0, 1, 2], rows)
    for slot in range(3):
        alone = cohort_of(HALF, 3)
        alone.learner.updates = Kept(alone.slots)
        learn(alone, [slot], [rows[slot]])
        expected = alone.learner.updates.kept[0]
        assert off(together.learner.updates.kept[slot], expected) < ROUNDING


def test_deepspeed_is_told_of_no_scale_and_refuses():
    with pytest.raises(ConfigError, match=r"^engine.zero: expected a base in bfloat16 or float32"):
        build_cohort(1, model=build_model().half(), zero=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_have_no_scale(dtype, monkeypatch):
    def never(*given):
        raise AssertionError("a scale")

    monkeypatch.setattr(learners, "first_scale", never)
    assert learn(cohort_of(dtype), [0], [ROWS])[0]["updates"] == 1


@pytest.mark.parametrize("kind", ["grpo", "dapo", "dr_grpo", "luspo", "bnpo"])
def test_the_first_scale_brings_a_typical_gradient_to_its_place(kind):
    """Against autograd through the loss over the whole batch."""
    rng = np.random.default_rng(1)
    lengths = [3, 700, 40, 2]
    rows = [
        Row(np.zeros(n + 2, int), np.r_[False, False, np.ones(n, bool)], float(rng.normal()))
        for n in lengths
    ]
    config = LossConfig(loss_type=kind, max_completion_length=4096)
    logprobs = torch.zeros(4, 700, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(700) < torch.tensor(lengths)[:, None]
    advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float64)
    policy_loss(logprobs, None, mask, advantages, config=config)[0].backward()
    typical = float(logprobs.grad.abs().sum() / mask.sum())
    agent = AgentTraining("a", None, PLAIN.replace(temperature=1.0), None)
    exponent = first_scale(agent, rows, (4, sum(lengths)), config, None)
    assert abs(math.log2(typical * 2.0**exponent) - TYPICAL) <= 0.51
    # Sharper sampling makes steeper log-probs; a bound of advantages, smaller ones.
    sharp = AgentTraining("a", None, PLAIN.replace(temperature=0.25), None)
    assert first_scale(sharp, rows, (4, sum(lengths)), config, None) == exponent - 2
    assert first_scale(agent, rows, (4, sum(lengths)), config, 1e-6) > exponent + 15

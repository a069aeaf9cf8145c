import itertools
import json
import math
import random
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from batch_loss import config_of, policy_loss, random_batch, trl_metrics, vespo_weights
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from slow_loss import slow_kinks, slow_loss

from evo_grpo.errors import ConfigError, EvoGrpoError
from evo_grpo.learn.objective.losses import (
    LOSSES,
    LossConfig,
    LossValues,
    ratio_level,
    token_terms,
    token_terms_of,
    token_weights,
    token_weights_of,
)
from evo_grpo.schema.hparams import Hparams

GOLDEN = json.loads(
    (Path(__file__).parents[2] / "golden" / "trl_grpo_1.16.0.json").read_text(encoding="utf-8")
)
LOSS_TYPES = tuple(LOSSES)
POISONS = (math.nan, math.inf, -math.inf)
CISPO_CAP = (0.0, 5.0)  # TRL's epsilon_high of cispo is the cap itself; see tests/golden/README.md

# Per golden case: the config, and what else goes into the call.
GOLDEN_CASES = {
    "grpo": ({}, {}),
    "bnpo": ({"loss_type": "bnpo"}, {}),
    "dr_grpo": ({"loss_type": "dr_grpo", "max_completion_length": 8}, {}),
    "dapo": ({"loss_type": "dapo"}, {}),
    "cispo": ({"loss_type": "cispo", "clip_coef": CISPO_CAP}, {}),
    "sapo": ({"loss_type": "sapo"}, {}),
    "vespo": ({"loss_type": "vespo"}, {}),
    "luspo_seq": ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, {}),
    "gspo(grpo+sequence,eps=3e-4,hi=4e-4)": (
        {"importance_sampling_level": "sequence", "clip_coef": (1 - 3e-4, 1 + 4e-4)},
        {},
    ),
    "gspo(grpo+sequence,eps=.2)": ({"loss_type": "gspo"}, {}),
    "dapo_cliphigher_.28": ({"loss_type": "dapo", "clip_coef": (0.8, 1.28)}, {}),
    "grpo_delta_1.25": ({"delta": 1.25}, {}),
    "grpo_beta.04_bias": ({"beta": 0.04, "kl_bias_correction": True}, {}),
    "grpo_beta.04_nobias": ({"beta": 0.04}, {}),
    "dapo_onpolicy_beta0(old=None)": ({"loss_type": "dapo"}, {"old": None}),
    "dapo_onpolicy_beta.04_bias": (
        {"loss_type": "dapo", "beta": 0.04, "kl_bias_correction": True},
        {"old": None},
    ),
    "dapo_onpolicy_beta.04_nobias": ({"loss_type": "dapo", "beta": 0.04}, {"old": None}),
    "dapo_gas4_spg4": ({"loss_type": "dapo"}, {"num_tokens": 14}),
    "grpo_gas4": ({}, {"num_rows": 16}),
    "grpo_offmask_-.001": ({"off_policy_mask_threshold": -0.001}, {}),
    # 3.5 is above the cap of 3, so that row 1 is dropped.
    "dapo_seqIS": ({"loss_type": "dapo"}, {"sampler_ratio": (1.1, 3.5, 0.9, 2.5)}),
}


def golden_inputs():
    tensors = {k: torch.tensor(GOLDEN["inputs"][k], dtype=torch.float64) for k in ("lp", "old")}
    tensors["ref"] = torch.tensor(GOLDEN["inputs"]["ref"], dtype=torch.float64)
    tensors["mask"] = torch.tensor(GOLDEN["inputs"]["mask"])
    tensors["adv"] = torch.tensor(GOLDEN["inputs"]["adv"], dtype=torch.float64)
    tensors["lp"].requires_grad_()
    return tensors


def test_every_golden_case_is_here():
    assert set(GOLDEN_CASES) == set(GOLDEN["loss_cases"])


@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_golden_case(name):
    settings_, call = GOLDEN_CASES[name]
    call = dict(call)
    given_, want = golden_inputs(), GOLDEN["loss_cases"][name]
    old = call.pop("old", given_["old"])
    if "sampler_ratio" in call:
        ratio = torch.tensor(call.pop("sampler_ratio"), dtype=torch.float64)[:, None]
        call["sampler_logprobs"] = old - ratio.log() / given_["mask"].sum(-1, keepdim=True)
    config = LossConfig(**settings_)
    loss, terms = policy_loss(
        given_["lp"], old, given_["mask"], given_["adv"], given_["ref"], config=config, **call
    )
    metrics = trl_metrics(terms, given_["lp"], given_["mask"], given_["adv"], config)
    loss.backward()
    grad = given_["lp"].grad
    assert loss.item() == pytest.approx(want["loss"], abs=1e-6)
    assert grad[0].tolist() == pytest.approx(want["grad_row0"], abs=1e-6)
    assert grad.sum().item() == pytest.approx(want["grad_sum"], abs=1e-6)
    logged = {k: v for k, v in want["metrics"].items() if k != "entropy"}
    assert metrics == pytest.approx(logged, abs=1e-6)
    for name in ("ratio", "kl", "clipped_low", "clipped_high"):
        value = getattr(terms, name)
        assert value is None or not value.requires_grad


@st.composite
def batches(draw, loss_type):
    level = (
        "sequence" if loss_type == "gspo" else draw(st.sampled_from([None, "token", "sequence"]))
    )
    low = draw(st.floats(0.5, 0.99))
    scalar = draw(st.booleans())
    config = LossConfig(
        loss_type=loss_type,
        clip_coef=1 - low if scalar else (low, draw(st.floats(1.01, 1.6))),
        beta=draw(st.sampled_from([0.0, 0.04, 0.5])),
        importance_sampling_level=level,
        delta=draw(st.sampled_from([None, 1.3, 2.0])),
        kl_bias_correction=draw(st.booleans()),
        max_completion_length=7,
        sapo_temperature_neg=draw(st.sampled_from([1.05, 2.0])),
        off_policy_mask_threshold=draw(st.sampled_from([None, None, 0.0501])),
        sampler_correction=draw(
            st.sampled_from(
                ["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
            )
        ),
        sampler_ratio_cap=1.2,
    )
    rng = random.Random(draw(st.integers(0, 2**32)))
    rows, tokens = rng.randint(1, 4), rng.randint(1, 5)

    def table(low, high):
        return [[rng.uniform(low, high) for _ in range(tokens)] for _ in range(rows)]

    logprobs = table(-3, -0.01)
    old = [[x + rng.uniform(-0.4, 0.4) for x in row] for row in logprobs]
    if draw(st.integers(0, 4)) == 0:
        old = None
    ref = [[x + rng.uniform(-0.6, 0.6) for x in row] for row in logprobs]
    sampler = None
    # How the sampler's ratio enters vespo's weight is tested on its own.
    if loss_type != "vespo" and draw(st.booleans()):
        sampler = [[x + rng.uniform(-0.2, 0.2) for x in row] for row in old or logprobs]
    lengths = [rng.randint(0, tokens) for _ in range(rows)]
    mask = [[int(t < n) for t in range(tokens)] for n in lengths]
    if rng.random() < 0.3:  # tokens that an environment wrote lie between generated ones
        mask = [[m * rng.randint(0, 1) for m in row] for row in mask]
    per_row = [rng.uniform(-2, 2) * rng.choice([0, 1, 1, 1]) for _ in range(rows)]
    advantages = table(-2, 2) if rng.random() < 0.3 else per_row
    return config, logprobs, old, mask, advantages, ref, sampler, rng


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_and_gradient_agree_with_the_slow_loss(loss_type):
    @settings(max_examples=60)
    @given(batches(loss_type))
    def check(batch):
        config, logprobs, old, mask, advantages, ref, sampler, rng = batch
        kinks = slow_kinks(logprobs, old or logprobs, mask, config, sampler=sampler)
        assume(min(kinks, default=1.0) > 1e-4)

        def slow(changed):
            return slow_loss(
                changed, old, mask, advantages, ref, config, frozen=logprobs, sampler=sampler
            )

        lp = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
        loss, _ = policy_loss(
            lp,
            None if old is None else torch.tensor(old, dtype=torch.float64),
            torch.tensor(mask),
            torch.tensor(advantages, dtype=torch.float64),
            torch.tensor(ref, dtype=torch.float64),
            config=config,
            sampler_logprobs=None
            if sampler is None
            else torch.tensor(sampler, dtype=torch.float64),
        )
        loss.backward()
        assert loss.item() == pytest.approx(slow(logprobs), rel=1e-9, abs=1e-10)
        for _ in range(4):
            i, t = rng.randrange(len(mask)), rng.randrange(len(mask[0]))
            step = 1e-5

            def moved(by, i=i, t=t):
                copy = [list(row) for row in logprobs]
                copy[i][t] += by
                return slow(copy)

            difference = (moved(step) - moved(-step)) / (2 * step)
            assert lp.grad[i, t].item() == pytest.approx(difference, rel=1e-6, abs=1e-7)

    check()


def value_and_grad(batch, config, **call):
    lp = batch["lp"].clone().requires_grad_()
    terms = token_terms(
        lp, batch["old"], batch["mask"], batch["adv"], batch["ref"], config=config, **call
    )
    weights = token_weights(
        config.loss_type, batch["mask"], num_rows=6, num_tokens=20, max_completion_length=5
    )
    torch.where(batch["mask"], weights * terms.loss, 0).sum().backward()
    return terms, lp.grad


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_poisoned_row_reaches_no_other_row(loss_type):
    config = config_of(loss_type, beta=0.1, kl_bias_correction=True, off_policy_mask_threshold=0.05)
    places, others = ("lp", "old", "ref", "adv", "sampler"), torch.arange(20) >= 15
    batch = random_batch(rows=20)
    batch["sampler"] = batch["old"] + 0.01
    clean_terms, clean_grad = value_and_grad(batch, config, sampler_logprobs=batch["sampler"])
    for row, (where, poison) in enumerate(itertools.product(places, POISONS)):
        batch[where] = batch[where].clone()
        batch[where][row] = poison
    terms, grad = value_and_grad(batch, config, sampler_logprobs=batch["sampler"])
    assert torch.equal(terms.loss[others], clean_terms.loss[others])
    assert torch.equal(terms.ratio[others], clean_terms.ratio[others])
    assert torch.equal(terms.kl[others], clean_terms.kl[others])
    assert torch.equal(grad[others], clean_grad[others])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_poisoned_bound_stays_in_its_row(loss_type):
    names = [field.name for field in fields(LossValues)]
    rows = len(names) + 2
    config, batch = config_of(loss_type), random_batch(rows=rows)
    others, entropies = torch.arange(rows) >= len(names), torch.ones_like(batch["lp"])
    values = {name: torch.full((rows, 1), 0.9, dtype=torch.float64) for name in names}
    clean_terms, clean_grad = value_and_grad(
        batch, config, values=LossValues(**values), entropies=entropies
    )
    for row, name in enumerate(names):
        values[name][row] = math.nan
    terms, grad = value_and_grad(batch, config, values=LossValues(**values), entropies=entropies)
    assert torch.equal(terms.loss[others], clean_terms.loss[others])
    assert torch.equal(grad[others], clean_grad[others])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_masked_places_may_hold_anything(loss_type):
    config = config_of(loss_type, beta=0.1, kl_bias_correction=True, off_policy_mask_threshold=0.05)
    batch = random_batch()
    batch["adv"] = batch["adv"][:, None].expand(6, 5).clone()
    batch["sampler"] = batch["old"] + 0.01
    clean, clean_grad = value_and_grad(batch, config, sampler_logprobs=batch["sampler"])
    assert (~batch["mask"]).sum() >= 9
    at = (torch.arange(6)[:, None] + torch.arange(5)) % 3
    poison = torch.tensor(POISONS, dtype=torch.float64)[at]
    for name in ("lp", "old", "ref", "adv", "sampler"):
        batch[name] = batch[name].where(batch["mask"], poison)
    terms, grad = value_and_grad(batch, config, sampler_logprobs=batch["sampler"])
    assert torch.equal(terms.loss, clean.loss)
    assert torch.equal(grad, clean_grad)
    assert (grad[~batch["mask"]] == 0).all()
    assert (terms.ratio[~batch["mask"]] == 1).all()
    loss, _ = policy_loss(
        batch["lp"], batch["old"], batch["mask"], batch["adv"], batch["ref"], config=config
    )
    assert loss.isfinite()
    assert terms.kl.isfinite().all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_per_row_settings_equal_one_call_per_agent(loss_type):
    config = config_of(loss_type)
    batch = random_batch(rows=9)
    agents = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2])
    bounds = [(0.8, 1.2), (0.95, 1.6), (0.5, 1.05)]
    betas = [0.0, 0.04, 0.3]
    hparams = [Hparams(clip_coef=c, beta=b) for c, b in zip(bounds, betas, strict=True)]
    batch["ref"][:2] = math.nan  # the agent without a KL term has no reference
    lp = batch["lp"].clone().requires_grad_()
    terms = token_terms(
        lp,
        batch["old"],
        batch["mask"],
        batch["adv"],
        batch["ref"],
        config=config,
        values=LossValues.of_agents(hparams, agents, torch.float64),
    )
    rows = torch.bincount(agents)
    tokens = torch.bincount(agents, weights=batch["mask"].sum(-1).double())
    weights = token_weights(
        loss_type,
        batch["mask"],
        num_rows=rows[agents][:, None],
        num_tokens=tokens[agents][:, None],
        max_completion_length=5,
        dtype=torch.float64,
    )
    losses = torch.where(batch["mask"], weights * terms.loss, 0).sum(-1)
    losses.sum().backward()
    for agent in range(3):
        mine = agents == agent
        alone_lp = batch["lp"][mine].requires_grad_()
        alone = config_of(loss_type, clip_coef=bounds[agent], beta=betas[agent])
        loss, own = policy_loss(
            alone_lp,
            batch["old"][mine],
            batch["mask"][mine],
            batch["adv"][mine],
            batch["ref"][mine],
            config=alone,
        )
        loss.backward()
        assert losses[mine].sum().item() == pytest.approx(loss.item(), rel=1e-12)
        torch.testing.assert_close(lp.grad[mine], alone_lp.grad, rtol=1e-12, atol=1e-15)
        for field in fields(own):
            value = getattr(own, field.name)
            if value is not None:
                torch.testing.assert_close(getattr(terms, field.name)[mine], value)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batches_add_up_to_the_whole_step(loss_type):
    config, batch = config_of(loss_type, beta=0.1), random_batch()
    arguments = [batch[k] for k in ("lp", "old", "mask", "adv", "ref")]
    whole, _ = policy_loss(*arguments, config=config)
    parts = [
        policy_loss(
            *(a[rows] for a in arguments),
            config=config,
            num_rows=6,
            num_tokens=batch["mask"].sum(),
        )[0]
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-12)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_is_a_ratio_of_one_with_the_gradient_of_the_policy(loss_type):
    config, batch = config_of(loss_type), random_batch()
    lp = batch["lp"].clone().requires_grad_()
    loss, terms = policy_loss(lp, None, batch["mask"], batch["adv"], config=config)
    loss.backward()
    weights = token_weights(
        loss_type,
        batch["mask"],
        num_rows=6,
        num_tokens=batch["mask"].sum(),
        max_completion_length=5,
        dtype=torch.float64,
    )
    # Every one of the losses is REINFORCE at the point where it was sampled.
    torch.testing.assert_close(lp.grad, -weights * batch["adv"][:, None])
    assert (terms.ratio == 1).all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_row_without_tokens_weighs_nothing(loss_type):
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    weights = token_weights(
        loss_type, mask, num_rows=2, num_tokens=2, max_completion_length=4, dtype=torch.float64
    )
    assert weights[1].tolist() == [0, 0, 0]
    assert weights.isfinite().all()
    nothing = token_weights(loss_type, mask * 0, num_rows=0, num_tokens=0, max_completion_length=4)
    assert nothing.tolist() == [[0, 0, 0], [0, 0, 0]]
    lp = torch.zeros(2, 3, requires_grad=True)
    loss, _ = policy_loss(lp, None, mask * 0, torch.ones(2), config=config_of(loss_type))
    loss.backward()
    assert loss == 0
    assert (lp.grad == 0).all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_ratio_beyond_float32_leaves_a_finite_gradient(loss_type):
    lp = torch.tensor([[-0.1, -0.2]], requires_grad=True)
    old = torch.tensor([[-500.0, -0.2]])
    for advantage in (1.0, -1.0):
        loss, _ = policy_loss(
            lp, old, torch.ones(1, 2), torch.tensor([advantage]), config=config_of(loss_type)
        )
        (grad,) = torch.autograd.grad(loss, lp)
        assert loss.isfinite()
        assert grad.isfinite().all()


def test_half_precision_is_computed_in_float32():
    batch = random_batch(dtype=torch.float32)
    lp = batch["lp"].bfloat16()
    loss, _ = policy_loss(lp, batch["old"], batch["mask"], batch["adv"], config=LossConfig())
    wide, _ = policy_loss(
        lp.float(), batch["old"], batch["mask"], batch["adv"], config=LossConfig()
    )
    assert loss.dtype == torch.float32
    assert torch.equal(loss, wide)


def test_the_sampler_ratio_enters_the_weight_of_vespo():
    batch, config = random_batch(), LossConfig(loss_type="vespo")
    arguments = [batch[k] for k in ("lp", "old", "mask", "adv")]
    sampler = batch["old"] + 0.03
    truncated = LossConfig(loss_type="vespo", sampler_correction="sequence_truncate")
    ours, _ = policy_loss(*arguments, config=truncated, sampler_logprobs=sampler)
    # trainer / old times old / sampler is trainer / sampler.
    direct, _ = policy_loss(batch["lp"], sampler, batch["mask"], batch["adv"], config=config)
    assert ours.item() == pytest.approx(direct.item(), rel=1e-9)


def test_vespo_bounds_the_log_ratio_of_a_token():
    lp = torch.tensor([[-1.0, -31.0]], requires_grad=True)
    old = torch.tensor([[-31.0, -2.0]])  # log-ratios 30 and -29 both count as 20
    mask, advantages = torch.ones(1, 2), torch.ones(1)
    _, terms = policy_loss(lp, old, mask, advantages, config=LossConfig(loss_type="vespo"))
    assert vespo_weights(terms, lp, mask, advantages) == 1


def test_the_level_defaults_to_that_of_the_paper():
    levels = {name: ratio_level(config_of(name)) for name in LOSS_TYPES}
    assert {name for name, level in levels.items() if level == "sequence"} == {"gspo", "luspo"}
    assert ratio_level(LossConfig(importance_sampling_level="sequence")) == "sequence"
    assert ratio_level(config_of("luspo", importance_sampling_level="token")) == "token"


def test_bounds_of_a_scalar_and_of_a_pair():
    assert LossConfig(clip_coef=0.2).clip_bounds == pytest.approx((0.8, 1.2))
    assert LossConfig(clip_coef=(0.7, 1.5)).clip_bounds == (0.7, 1.5)
    assert LossConfig(clip_coef=[0.7, 1.5]) == LossConfig(clip_coef=(0.7, 1.5))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"clip_coef": (0.8,)}, "clip_coef"),
        ({"clip_coef": math.nan}, "clip_coef"),
        ({"beta": -0.1}, "beta: expected a number >= 0, got -0.1"),
        ({"importance_sampling_level": "turn"}, "importance_sampling_level: expected 'token'"),
        (
            {"loss_type": "gspo", "importance_sampling_level": "token"},
            "importance_sampling_level: expected 'sequence'.*loss_type='grpo'",
        ),
        ({"delta": 1.0}, "delta: expected a number > 1.*got 1.0"),
        ({"loss_type": "dr_grpo"}, "max_completion_length: .* got null; give the most tokens"),
        ({"vespo_positive": (1.0,)}, "vespo_positive: expected two finite numbers"),
        ({"sampler_correction": "sequence"}, "sampler_correction: expected .*did you mean"),
        ({"off_policy_mask_threshold": math.nan}, "threshold: expected a finite number"),
    ],
)
def test_a_wrong_setting_says_what_was_expected(wrong, message):
    with pytest.raises(ConfigError, match=f"(?s){message}") as caught:
        LossConfig(**wrong)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, EvoGrpoError)


def values_of(beta):
    return replace(LossValues.of_config(LossConfig()), beta=beta)


@pytest.mark.parametrize("beta", [0.1, torch.tensor([[0.0], [0.1]])])
def test_a_penalty_without_a_reference_is_refused(beta):
    tensors = (torch.zeros(2, 3), None, torch.ones(2, 3), torch.zeros(2))
    with pytest.raises(ConfigError, match=r"ref_logprobs: .*beta > 0, got None; .*set beta to 0"):
        token_terms(*tensors, config=LossConfig(), values=values_of(beta))


def test_dr_grpo_needs_the_longest_completion():
    with pytest.raises(ConfigError, match="max_completion_length"):
        token_weights("dr_grpo", torch.ones(2, 3), num_rows=2, num_tokens=6)


def test_rows_of_all_losses_in_one_batch_equal_one_call_per_loss():
    batch = random_batch(rows=2 * len(LOSSES))
    batch["sampler"] = batch["old"] + 0.01
    configs = [config_of(loss_type, beta=0.1, delta=1.5) for loss_type in tuple(LOSSES) * 2]
    bounds = torch.linspace(1.05, 1.5, 2 * len(LOSSES), dtype=torch.float64)[:, None]
    values = LossValues(beta=0.1 * bounds, clip_low=0.8, clip_high=bounds)
    names = {"old_logprobs": "old", "mask": "mask", "advantages": "adv", "ref_logprobs": "ref"}
    given = {name: batch[key] for name, key in names.items()}
    given |= {"entropies": None, "sampler_logprobs": batch["sampler"]}
    totals = {"num_rows": bounds * 10, "num_tokens": bounds * 40}
    lp = batch["lp"].clone().requires_grad_()
    terms = token_terms_of(configs, lp, given, values)
    weights = token_weights_of(configs, batch["mask"], **totals)
    (weights * terms.loss).sum().backward()
    for place, config in enumerate(configs[: len(LOSSES)]):
        rows = torch.tensor([place, place + len(LOSSES)])
        own = {name: None if one is None else one[rows] for name, one in given.items()}
        alone_lp = batch["lp"][rows].requires_grad_()
        its = LossValues(beta=values.beta[rows], clip_low=0.8, clip_high=bounds[rows])
        alone = token_terms(alone_lp, **own, config=config, values=its)
        its_weights = token_weights(
            config.loss_type,
            batch["mask"][rows],
            **{name: total[rows] for name, total in totals.items()},
            max_completion_length=5,
        )
        (its_weights * alone.loss).sum().backward()
        assert torch.equal(lp.grad[rows], alone_lp.grad)
        assert torch.equal(weights[rows], its_weights)
        for field in fields(alone):
            assert torch.equal(getattr(terms, field.name)[rows], getattr(alone, field.name))

"""The fused step: the same as one agent after the other, blind to a neighbour's NaN, and right."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig
from slow_step import slow_step
from tiny_cohort import (
    PLAIN,
    build_cohort,
    distance,
    learn,
    make_rows,
    moments,
    same,
    weights,
)

from evo_grpo.learn.objective.advantages import group_advantages
from evo_grpo.learn.rows import Row
from evo_grpo.model.llama.train import LlamaForward

#: Eight unlike agents; the first two take several minibatches and epochs.
UNLIKE = [
    PLAIN.replace(
        lr=lr, beta=beta, entropy_coef=entropy, clip_coef=clip, temperature=temperature,
        max_grad_norm=norm, update_epochs=epochs, batch_size=size,
    )
    for lr, beta, entropy, clip, temperature, norm, epochs, size in (
        (1e-2, 0.0, 0.0, 0.2, 1.0, 0.5, 2, 3),
        (3e-3, 0.1, 0.02, (0.8, 1.3), 0.7, 9.0, 2, None),
        (1e-3, 0.01, 0.0, 0.1, 1.3, 0.1, 1, 5),
        (2e-2, 0.0, 0.5, 0.3, 1.0, 1.0, 3, None),
        (1e-2, 0.5, 0.0, 0.2, 0.9, 1.0, 1, None),
        (5e-3, 0.0, 0.0, 0.2, 1.1, 0.3, 2, 2),
        (1e-2, 0.2, 0.1, 0.05, 1.0, 1.0, 2, 4),
        (4e-3, 0.0, 0.0, 0.2, 2.0, 0.7, 1, 64),
    )
]  # fmt: skip


def ragged_rows(count):
    """Unlike numbers of groups, group sizes and lengths per agent."""
    return [make_rows(20 + i, groups=1 + i % 3, group_size=2 + i % 4) for i in range(count)]


def equal_rows(count):
    """The same shapes for every agent."""
    return [
        [
            replace(row, token_ids=np.roll(row.token_ids, i), advantage=row.advantage * (1 + i))
            for row in make_rows(20, groups=2)
        ]
        for i in range(count)
    ]


def compare_with_alone(size, rows, **settings):
    together = build_cohort(size, UNLIKE[:size], **settings)
    apart = build_cohort(size, UNLIKE[:size], **settings)
    slots = list(range(size))
    before = [weights(together, s) for s in slots]
    for call in range(2):
        fused = learn(together, slots, rows, seed=call)
        alone = [learn(apart, [s], [rows[s]], seed=call)[0] for s in slots]
    for slot in slots:
        assert distance(weights(together, slot), before[slot]) > 1e-4
        # AdamW divides a gradient by its own size: how a processor rounds moves a weight that
        # hardly has one. The step itself is a hundred times as long.
        assert distance(weights(together, slot), weights(apart, slot)) < 3e-5
        for key, value in moments(apart, slot).items():
            torch.testing.assert_close(moments(together, slot)[key], value, atol=1e-5, rtol=1e-3)
    for ours, theirs in zip(fused, alone, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_rewards_equal_but_for_rounding_move_no_weight():
    cohort = build_cohort(1, [PLAIN])
    before = weights(cohort, 0)
    # 0.1 + 0.2 is not 0.3, and Adam makes a full step of any gradient.
    rewards = np.array([[0.1, 0.2], [0.3, 0.0], [0.2, 0.1], [0.0, 0.3]])
    advantages = group_advantages(rewards, 4, weights=[1.0, 1.0])
    rows = make_rows(7, groups=1)
    rows = [replace(row, advantage=float(a)) for row, a in zip(rows, advantages, strict=True)]
    metrics = learn(cohort, [0], [rows])[0]
    assert same(weights(cohort, 0), before)
    assert (metrics["skipped_rows"], metrics["updates"]) == (4, 0)


@pytest.mark.parametrize(("size", "make"), [(2, equal_rows), (8, ragged_rows)])
def test_fused_step_equals_one_agent_at_a_time(size, make):
    compare_with_alone(size, make(size))


WHITENED = {"filter_zero_adv": True, "adv_filter_eps": 0.01, "whiten_advantages": True}
OPTIONS = {
    "budget": {"max_tokens_per_microbatch": 24},
    "rows": {"max_rows_per_microbatch": 1},
    "checkpointing": {"gradient_checkpointing": True},
    **{kind: {"loss_type": kind} for kind in ("gspo", "cispo", "dapo")},
    "dr_grpo": {"loss_type": "dr_grpo", "max_output_tokens": 8},
    "whiten": {**WHITENED, "adv_clip_range": 1.0},
    "use_kl": {"kl_shaping": True},
    "reference": {"separate_reference": True},
    "dropout": {"dropout": 0.3, "max_tokens_per_microbatch": 24},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_fused_step_equals_alone_with_every_option(name):
    compare_with_alone(2, ragged_rows(2), **OPTIONS[name])


def test_gradient_checkpointing_changes_nothing_and_leaves_the_model_as_it_was():
    plain, saving = build_cohort(2), build_cohort(2, gradient_checkpointing=True)
    hooks = sum(len(m._forward_hooks) for m in saving.base.model.modules())
    for cohort in (plain, saving):
        learn(cohort, [0, 1], ragged_rows(2))
    for slot in (0, 1):
        assert distance(weights(plain, slot), weights(saving, slot)) < 1e-6
    assert sum(len(m._forward_hooks) for m in saving.base.model.modules()) == hooks
    assert not any(m.training for m in saving.base.model.model.layers)
    assert not saving.base.model.is_gradient_checkpointing


def test_gradient_checkpointing_recomputes_the_layers():
    kept = []
    for recompute in (False, True):
        cohort = build_cohort(1, gradient_checkpointing=recompute)
        learn(cohort, [0], [make_rows(1)])  # the base is compared with its modules once
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x
        ):
            learn(cohort, [0], [make_rows(1)])
        kept.append(sum(sizes))
    assert kept[1] < 0.5 * kept[0]


def poison_advantage(cohort, rows):
    return [replace(row, advantage=math.nan) if i == 1 else row for i, row in enumerate(rows)]


@torch.no_grad()
def poison_weight(cohort, rows):
    cohort.slots.parameters(cohort.agents[1].adapter)[0][0, 0] = math.nan
    return rows


@torch.no_grad()
def poison_other_matrix(cohort, rows):
    cohort.slots.parameters(cohort.agents[1].adapter)[-1][0, 0] = math.inf
    return rows


POISONS = (poison_advantage, poison_weight, poison_other_matrix)
IN_PIECES = {"max_tokens_per_microbatch": 40, "gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("poison", "make", "size", "options"),
    [
        *((one, ragged_rows, 3, IN_PIECES) for one in POISONS),
        (poison_weight, equal_rows, 2, {}),
        (poison_weight, ragged_rows, 8, {}),
    ],
)
def test_a_nan_of_one_agent_leaves_the_others_bit_identical(poison, make, size, options):
    clean = build_cohort(size, UNLIKE[:size], **options)
    dirty = build_cohort(size, UNLIKE[:size], **options)
    slots, rows = list(range(size)), make(size)
    bad = [poison(dirty, r) if s == 1 else r for s, r in zip(slots, rows, strict=True)]
    before, old = weights(dirty, 1), moments(dirty, 1)
    expected, got = learn(clean, slots, rows), learn(dirty, slots, bad)
    for slot in slots:
        if slot != 1:
            assert same(weights(clean, slot), weights(dirty, slot))
            assert moments(clean, slot).keys() == moments(dirty, slot).keys()
            for key, value in moments(clean, slot).items():
                assert torch.equal(value, moments(dirty, slot)[key])
            assert got[slot] == expected[slot]
            assert got[slot]["failed"] == 0
    assert got[1]["failed"] == 1
    after = weights(dirty, 1)
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(after, before, strict=True)
    )
    assert moments(dirty, 1) == old == {}


def test_a_failed_step_leaves_the_moments_of_earlier_ones():
    cohort = build_cohort(1)
    learn(cohort, [0], [make_rows(1)])
    before, old = weights(cohort, 0), moments(cohort, 0)
    (metrics,) = learn(cohort, [0], [poison_advantage(cohort, make_rows(2))])
    assert metrics["failed"] == 1
    assert metrics["updates"] == 0
    assert same(weights(cohort, 0), before)
    assert all(torch.equal(v, moments(cohort, 0)[k]) for k, v in old.items())
    (metrics,) = learn(cohort, [0], [make_rows(3)])
    assert metrics["failed"] == 0
    assert not same(weights(cohort, 0), before)


@pytest.mark.parametrize(
    ("kind", "beta"),
    [
        # The loss of every kind is held against a slow one in objective/test_losses.py.
        *((kind, 0.3) for kind in ("grpo", "gspo", "cispo", "dapo")),
        ("grpo", 0.0),
    ],
)
def test_step_matches_a_slow_reference(kind, beta):
    hparams = PLAIN.replace(beta=beta, temperature=0.8, update_epochs=3, max_grad_norm=0.4)
    rows = make_rows(5, groups=3)
    cohort = build_cohort(1, hparams, loss_type=kind, max_tokens_per_microbatch=30)
    expected, (value, norm) = slow_step(
        build_cohort(1, hparams), rows, hparams, cohort.learner.loss
    )
    start = weights(cohort, 0)
    (metrics,) = learn(cohort, [0], [rows])
    # Adam divides by the gradient's own size, so where that is next to nothing rounding shows.
    assert distance(weights(cohort, 0), expected) < 2e-5
    assert distance(start, expected) > 1e-3
    assert metrics["loss"] == pytest.approx(value, rel=1e-3, abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert metrics["updates"] == 3
    assert ("kl" in metrics) == (metrics.get("kl", 0) > 0) == (beta > 0)


def test_a_rank_above_the_width_of_every_layer_learns_as_in_peft():
    lora = LoraConfig(r=40, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    cohort, rows = build_cohort(1, lora=lora), make_rows(5, groups=3)
    start = weights(cohort, 0)
    expected, (_, norm) = slow_step(build_cohort(1, lora=lora), rows, PLAIN, cohort.learner.loss)
    (metrics,) = learn(cohort, [0], [rows])
    assert distance(weights(cohort, 0), expected) < 2e-5
    assert distance(start, expected) > 1e-3
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "dropout"),
    [
        ({}, 0.0),
        ({"max_tokens_per_microbatch": 24}, 0.4),
        ({"gradient_checkpointing": True}, 0.4),
    ],
)
def test_first_ratio_is_exactly_one(dropout, options):
    cohort = build_cohort(2, dropout=dropout, **options)
    for metrics in learn(cohort, [0, 1], ragged_rows(2)):
        assert metrics["ratio_max"] == 1.0
        assert metrics["clip_fraction"] == 0.0


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_later_minibatches_are_compared_with_the_policy_before_the_step(dropout):
    # A step of nearly no size leaves the policy, and so the ratios, as they were.
    cohort = build_cohort(2, PLAIN.replace(lr=1e-12, batch_size=3), dropout=dropout)
    for metrics in learn(cohort, [0, 1], ragged_rows(2)):
        assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)


def test_lora_dropout_acts_and_repeats():
    one, two, other, none = (build_cohort(1, dropout=p) for p in (0.4, 0.4, 0.4, 0.0))
    for cohort, seed in ((one, 3), (two, 3), (other, 4), (none, 3)):
        learn(cohort, [0], [make_rows(1)], seed=seed)
    assert same(weights(one, 0), weights(two, 0))
    assert distance(weights(one, 0), weights(other, 0)) > 1e-6
    assert distance(weights(one, 0), weights(none, 0)) > 1e-6


def test_dead_groups_skip_the_backward_and_are_counted(monkeypatch):
    dead = [replace(row, advantage=0.0) for row in make_rows(1)]
    live = make_rows(2)
    cohort = build_cohort(1)
    before = weights(cohort, 0)
    (metrics,) = learn(cohort, [0], [dead])
    assert metrics["skipped_rows"] == metrics["rows"] == len(dead)
    assert metrics["updates"] == 0
    assert same(weights(cohort, 0), before)
    seen = []
    hidden_at = LlamaForward.hidden_at
    monkeypatch.setattr(
        LlamaForward,
        "hidden_at",
        lambda step, ids, *rest: seen.append(len(ids)) or hidden_at(step, ids, *rest),
    )
    (metrics,) = learn(cohort, [0], [dead + live])
    assert metrics["skipped_rows"] == len(dead)
    assert seen == [len(live)]


@pytest.mark.parametrize("kind", ["grpo", "dapo"])
def test_denominators_count_dead_rows(kind):
    hparams = PLAIN.replace(max_grad_norm=1e9)
    live = make_rows(2)
    dead = [replace(row, advantage=0.0) for row in make_rows(1)]
    mixed, alone = (build_cohort(1, hparams, loss_type=kind) for _ in range(2))
    (both,), (only,) = learn(mixed, [0], [dead + live]), learn(alone, [0], [live])
    if kind == "grpo":
        share = len(live) / len(dead + live)
    else:
        share = sum(r.generated for r in live) / sum(r.generated for r in dead + live)
    assert both["grad_norm"] == pytest.approx(only["grad_norm"] * share, rel=1e-4)


def test_dead_rows_are_kept_when_there_is_a_kl_term():
    cohort = build_cohort(1, PLAIN.replace(beta=0.2))
    before = weights(cohort, 0)
    (metrics,) = learn(cohort, [0], [[replace(row, advantage=0.0) for row in make_rows(1)]])
    assert metrics["skipped_rows"] == 0
    assert metrics["updates"] == 1
    assert distance(weights(cohort, 0), before) > 1e-4


@pytest.mark.parametrize("kind", ["dapo", "vespo"])
def test_token_means_use_each_agents_own_tokens(kind):
    # With a shared denominator the agent with few tokens would shrink beside one with many.
    options = {"loss_type": kind, "max_tokens_per_microbatch": 40}
    hparams = PLAIN.replace(max_grad_norm=1e9)
    few, many = make_rows(1, groups=1, answer=(1, 3)), make_rows(2, groups=5, answer=(4, 9))
    together, alone = (build_cohort(2, hparams, **options) for _ in range(2))
    (first, _), (only,) = learn(together, [0, 1], [few, many]), learn(alone, [0], [few])
    assert first["grad_norm"] == pytest.approx(only["grad_norm"], rel=1e-4)


def test_a_hyperparameter_changed_between_calls_acts():
    still, moved = build_cohort(1), build_cohort(1)
    for cohort in (still, moved):
        learn(cohort, [0], [make_rows(1)])
    moved.set_hparams(0, PLAIN.replace(lr=PLAIN.lr * 1.2))
    before = weights(still, 0)
    for cohort in (still, moved):
        learn(cohort, [0], [make_rows(2)])
    # The moments stay, so the step is the same but for its size.
    for a, b, start in zip(weights(still, 0), weights(moved, 0), before, strict=True):
        torch.testing.assert_close(b - start, (a - start) * 1.2, rtol=1e-3, atol=1e-5)


def test_each_optimizer_owns_its_own_adapter_alone():
    cohort = build_cohort(3, separate_reference=True)
    owned = [
        {id(p) for g in state.optimizer.param_groups for p in g["params"]}
        for state in cohort.agents.values()
    ]
    assert not owned[0] & owned[1]
    assert not owned[1] & owned[2]
    before = [weights(cohort, s) for s in range(3)]
    reference = [p.clone() for p in cohort.slots.parameters("reference_1")]
    base = [p.clone() for p in cohort.base.head.parameters()]
    learn(cohort, [1], [make_rows(1)])
    assert same(weights(cohort, 0), before[0])
    assert same(weights(cohort, 2), before[2])
    assert not same(weights(cohort, 1), before[1])
    assert same([p for p in cohort.slots.parameters("reference_1")], reference)
    assert same(list(cohort.base.head.parameters()), base)


def test_an_agent_without_rows_and_an_empty_completion_are_harmless():
    cohort = build_cohort(2)
    before = weights(cohort, 0)
    empty = Row(np.array([3, 4, 5]), np.zeros(3, bool), advantage=1.0)
    nothing, some = learn(cohort, [0, 1], [[], [*make_rows(1), empty]])
    assert nothing["rows"] == nothing["updates"] == nothing["failed"] == 0
    assert same(weights(cohort, 0), before)
    assert some["failed"] == 0
    learn(cohort, [0], [make_rows(2)])  # moments, which a step of no gradient would follow
    before = weights(cohort, 0)
    (only,) = learn(cohort, [0], [[empty]])
    assert only["failed"] == only["loss"] == only["updates"] == 0
    assert only["skipped_rows"] == only["rows"] == 1
    assert same(weights(cohort, 0), before)


def test_a_minibatch_without_a_generated_token_is_no_step():
    empty = Row(np.array([3, 4, 5]), np.zeros(3, bool), advantage=1.0)
    hparams = PLAIN.replace(batch_size=1)
    cohort = build_cohort(1, hparams)
    (metrics,) = learn(cohort, [0], [[*make_rows(1, groups=1), empty]])
    assert metrics["updates"] == 4
    assert metrics["rows"] == 5


def test_the_end_token_is_trained_though_it_may_be_the_padding_token():
    cohort = build_cohort(1)
    cohort.base.set_padding(1)
    ends = Row(np.array([3, 4, 1]), np.array([False, False, True]), advantage=1.0)
    longer = Row(np.array([3, 4, 5, 6, 7]), np.array([False] * 2 + [True] * 3), advantage=-1.0)
    (alone,) = learn(cohort, [0], [[replace(ends)]])
    assert alone["grad_norm"] > 0
    one, two = build_cohort(1), build_cohort(1)
    two.base.set_padding(1)
    for cohort in (one, two):
        learn(cohort, [0], [[ends, longer]])
    assert same(weights(one, 0), weights(two, 0))


def test_metrics_mean_what_they_say():
    cohort = build_cohort(1)
    rows = make_rows(1)
    with torch.no_grad():
        cohort.slots.activate("actor_0")
        entropies, tokens = 0.0, 0
        for row in rows:
            ids = torch.as_tensor(row.token_ids)
            logits = cohort.slots.peft(input_ids=ids[None]).logits[0, :-1]
            lp = torch.log_softmax(logits, -1)
            keep = torch.as_tensor(row.mask[1:])
            entropies += float(-(lp.exp() * lp).sum(-1)[keep].sum())
            tokens += int(keep.sum())
            own = lp.gather(-1, ids[1:, None])[:, 0][keep]
            row.sampler_logprobs = (own + 0.25).numpy()
    (metrics,) = learn(cohort, [0], [rows])
    assert metrics["entropy"] == pytest.approx(entropies / tokens, rel=1e-4)
    assert metrics["sampler_gap"] == pytest.approx(0.25, rel=1e-3)
    assert metrics["rows"] == len(rows)

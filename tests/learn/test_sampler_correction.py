"""Rows of an engine with numbers of its own: the loss compares trainer and sampler."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_engines import SkewedEngine
from slow_step import logprob_table, slow_step
from tiny_cohort import PLAIN, build_cohort, distance, learn, make_rows, rows_of, same, weights

from evo_grpo.errors import ShapeError
from evo_grpo.learn.rows import AgentBatch
from evo_grpo.types import Prompt

CAP = 1.2

#: Several minibatches, several epochs, temperatures and KL terms: nothing the two agents share.
AGENTS = [
    PLAIN.replace(lr=2e-3, temperature=0.8, update_epochs=2, batch_size=3, max_grad_norm=0.5),
    PLAIN.replace(beta=0.2, clip_coef=(0.9, 1.2), update_epochs=2, lr=2e-3),
]


@torch.no_grad()
def sampled_rows(cohort, slot, missing=()):
    """Ragged rows with log-probs off the policy's own, to either side; some have none."""
    rows = make_rows(40 + slot, groups=1, group_size=4 + slot)
    own = logprob_table(cohort, slot, rows, cohort.agents[slot].hparams.temperature)
    rng = np.random.default_rng(slot)
    return [
        replace(
            row,
            sampler_logprobs=None
            if i in missing
            else line[: row.generated].numpy()
            + rng.normal(0.3 * (-1) ** i, 0.2, row.generated).astype(np.float32),
        )
        for i, (row, line) in enumerate(zip(rows, own, strict=True))
    ]


def build(missing=(), **loss):
    """Two agents and their rows."""
    cohort = build_cohort(2, AGENTS, max_tokens_per_microbatch=40, **loss)
    return cohort, [sampled_rows(cohort, slot, missing) for slot in (0, 1)]


def trained(missing=(), *, exact_sampler=False, **loss):
    """The metrics and the weights of two agents after one learn call."""
    cohort, rows = build(missing, **loss)
    metrics = learn(cohort, [0, 1], rows, exact_sampler=exact_sampler)
    return metrics, [weights(cohort, slot) for slot in (0, 1)]


def assert_equals_slow(missing=(), *, exact_sampler=False, **loss):
    """Compare every agent with the slow step; return the weights of both."""
    metrics, after = trained(missing, exact_sampler=exact_sampler, **loss)
    cohort, rows = build(missing, **loss)
    for slot in (0, 1):
        expected, (value, norm) = slow_step(
            cohort,
            rows[slot],
            AGENTS[slot],
            cohort.learner.loss,
            slot=slot,
            exact_sampler=exact_sampler,
        )
        # Adam divides by the gradient's own size: where that is next to nothing, rounding shows.
        assert distance(after[slot], expected) < 5e-5
        assert metrics[slot]["loss"] == pytest.approx(value, rel=1e-3, abs=1e-5)
        assert metrics[slot]["grad_norm"] == pytest.approx(norm, rel=1e-3)
    return after


def assert_apart(first, second):
    for one, other in zip(first, second, strict=True):
        assert distance(one, other) > 1e-4


@pytest.mark.parametrize(
    ("correction", "missing"),
    # The loss of each correction is held against a slow one in objective/test_losses.py.
    [("token_truncate", (0, 3)), ("sequence_mask", ())],
)
def test_an_inexact_samplers_loss_is_the_corrected_one(correction, missing):
    loss = {"sampler_correction": correction, "sampler_ratio_cap": CAP}
    corrected = assert_equals_slow(missing, **loss)
    assert_apart(corrected, trained(missing, exact_sampler=True, **loss)[1])
    assert_apart(corrected, trained(missing, **loss | {"sampler_ratio_cap": 1e6})[1])


@pytest.mark.parametrize("kind", ["gspo", "vespo"])
def test_every_loss_is_corrected(kind):
    loss = {
        "loss_type": kind,
        "sampler_correction": "sequence_truncate",
        "sampler_ratio_cap": CAP,
    }
    assert_apart(assert_equals_slow(**loss), trained(exact_sampler=True, **loss)[1])


@pytest.mark.parametrize("exact", [True, False])
def test_the_off_policy_mask_acts(exact):
    """Against the sampler where it is inexact, else against the policy before the learn call."""
    loss = {"sampler_correction": "none", "exact_sampler": exact}
    masked = assert_equals_slow(off_policy_mask_threshold=0.02 if exact else 0.05, **loss)
    assert_apart(masked, trained(**loss)[1])


@pytest.mark.parametrize(("kind", "threshold"), [("grpo", 0.02), ("vespo", None)])
def test_rows_without_sampler_logprobs_need_no_correction(kind, threshold):
    loss = {
        "loss_type": kind,
        "sampler_ratio_cap": CAP,
        "off_policy_mask_threshold": threshold,
    }
    exact, inexact = (trained(range(99), exact_sampler=e, **loss) for e in (True, False))
    assert exact[0] == inexact[0]
    assert all(same(one, other) for one, other in zip(exact[1], inexact[1], strict=True))


def test_an_exact_samplers_logprobs_change_no_bit_but_the_gap():
    """Whatever they are: the metric sees them, the loss does not."""
    cohorts, metrics = [], []
    for skew in (0.0, 5.0):
        cohort, rows = build()
        shifted = [
            [replace(r, sampler_logprobs=r.sampler_logprobs + skew) for r in a] for a in rows
        ]
        metrics.append(learn(cohort, [0, 1], shifted))
        cohorts.append(cohort)
    for slot in (0, 1):
        assert same(weights(cohorts[0], slot), weights(cohorts[1], slot))
        gaps = [m[slot].pop("sampler_gap") for m in metrics]
        assert gaps[0] < 1 < 4 < gaps[1]
        assert metrics[0][slot] == metrics[1][slot]


def test_the_gap_is_the_mean_over_the_tokens_whose_logprobs_are_known():
    cohort = build_cohort(1)
    rows = sampled_rows(cohort, 0, missing=(1,))
    own = logprob_table(cohort, 0, rows, PLAIN.temperature)
    gaps = [
        np.abs(line[: row.generated].detach().numpy() - row.sampler_logprobs)
        for row, line in zip(rows, own, strict=True)
        if row.sampler_logprobs is not None
    ]
    assert len(gaps) == len(rows) - 1
    (metrics,) = learn(cohort, [0], [rows], exact_sampler=False)
    assert metrics["sampler_gap"] == pytest.approx(np.concatenate(gaps).mean(), rel=1e-4)


def test_a_sampler_that_tells_nothing_has_no_gap():
    told, silent = trained()[0], trained(range(99))[0]
    for slot in (0, 1):
        assert told[slot].keys() - silent[slot].keys() == {"sampler_gap"}


def test_as_many_logprobs_as_generated_tokens():
    cohort, rows = build()
    rows[1][2] = replace(rows[1][2], sampler_logprobs=np.zeros(9, np.float32))
    with pytest.raises(ShapeError, match=r"sampler_logprobs: expected \d numbers, .* got 9; give"):
        learn(cohort, [0, 1], rows, exact_sampler=False)


def trained_with(engine, correction="sequence_truncate"):
    """The weights of two agents after one step of their cohort on their own samples."""
    cohort = build_cohort(
        2, AGENTS, engine=engine, sampler_correction=correction, sampler_ratio_cap=CAP
    )
    prompts = [Prompt(0, "", (3, 4, 5)), Prompt(1, "", (6, 7))]
    out = cohort.generate([0, 1], prompts, stream=("sample",), samples=4)
    advantages = np.array([1.0, -1.0, 0.5, -0.5, -2.0, 1.0, 0.7, 0.3])
    batches = [AgentBatch(s, rows_of(g, advantages)) for s, g in zip((0, 1), out, strict=True)]
    cohort.learn(batches, stream=("learn",))
    return [weights(cohort, slot) for slot in (0, 1)]


def test_a_cohort_corrects_for_its_engine_where_that_is_inexact():
    native = trained_with(None)
    exact = trained_with(SkewedEngine.factory(exact=True, skew=0.3))
    inexact = trained_with(SkewedEngine.factory(exact=False, skew=0.3))
    uncorrected = trained_with(SkewedEngine.factory(exact=False, skew=0.3), "none")
    for slot in (0, 1):
        assert same(native[slot], exact[slot])
        assert same(native[slot], uncorrected[slot])
    assert_apart(native, inexact)

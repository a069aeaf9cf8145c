"""Every KL estimator of the package against the analytic gradient of what it estimates.

That is the sum over positions of the token's KL divergence, averaged over the prefixes as sampled,
which the gradient does not pass. A k3 penalty descends KL(reference || policy); k3 times the ratio,
and k1 as an advantage, descend KL(policy || reference).
"""

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

from evo_grpo.learn.objective.losses import LOSSES, LossConfig, token_terms
from evo_grpo.learn.objective.shaping import token_advantages

VOCABULARY, LENGTH = 3, 4
WIDE = (0.0, 1e9)
BENCH = Path(__file__).resolve().parents[3] / "experiments" / "bench"


class Table:
    """Policies with logits of their own for every prefix; all completions are listed.

    Where `written` names positions, an environment wrote a 0 there: no token of the policy.
    """

    def __init__(self, written=()):
        generator = torch.Generator().manual_seed(0)
        choices = [torch.arange(1 if t in written else VOCABULARY) for t in range(LENGTH)]
        self.ids = torch.cartesian_prod(*choices)
        self.mask = torch.tensor([[t not in written for t in range(LENGTH)]] * len(self.ids))
        weights = VOCABULARY ** torch.arange(LENGTH - 1, -1, -1)
        # Prefixes of each length are numbered by their tokens, and lie after the shorter ones.
        starts = [(VOCABULARY**t - 1) // (VOCABULARY - 1) for t in range(LENGTH)]
        self.places = torch.stack(
            [starts[t] + (self.ids[:, :t] * weights[LENGTH - t :]).sum(-1) for t in range(LENGTH)],
            dim=1,
        )
        count = (VOCABULARY**LENGTH - 1) // (VOCABULARY - 1)

        def logits():
            return torch.randn(count, VOCABULARY, generator=generator, dtype=torch.float64)

        self.policy, self.old, self.reference = logits().requires_grad_(), logits(), logits()

    def all_logprobs(self, logits):
        return logits.log_softmax(-1)[self.places]

    def logprobs(self, logits):
        return self.all_logprobs(logits).gather(-1, self.ids[:, :, None])[..., 0]

    def shares(self, logits):
        """Probability of each completion, those tokens of an environment being certain."""
        return torch.where(self.mask, self.logprobs(logits), 0).sum(-1).exp().detach()

    def analytic(self, sampled_by, *, policy_first):
        policy = self.all_logprobs(self.policy)
        reference = self.all_logprobs(self.reference)
        kl = policy.exp() * (policy - reference)
        if not policy_first:
            kl = reference.exp() * (reference - policy)
        tokens = torch.where(self.mask, kl.sum(-1), 0).sum(-1)
        return torch.autograd.grad((self.shares(sampled_by) * tokens).sum(), self.policy)[0]

    def expected(self, config, sampled_by, *, shaped):
        """Gradient of the token losses, summed over a row and averaged over all rows exactly."""
        lp, reference = self.logprobs(self.policy), self.logprobs(self.reference)
        advantages = torch.zeros(len(lp), dtype=lp.dtype)
        if shaped:
            advantages, _ = token_advantages(advantages, self.mask, kl=lp - reference, beta=1.0)
        terms = token_terms(
            lp,
            self.logprobs(sampled_by).detach(),
            self.mask,
            advantages,
            reference,
            config=config.replace(beta=0.0 if shaped else 1.0),
        )
        total = (self.shares(sampled_by) * terms.loss.sum(-1)).sum()
        return torch.autograd.grad(total, self.policy)[0]


def config_of(loss_type, **more):
    more = {"clip_coef": WIDE, "max_completion_length": LENGTH, **more}
    return LossConfig(loss_type=loss_type, **more)


def assert_exact(table, found, sampled_by, *, policy_first):
    exact = table.analytic(sampled_by, policy_first=policy_first)
    other = table.analytic(sampled_by, policy_first=not policy_first)
    torch.testing.assert_close(found, exact, atol=1e-12, rtol=1e-9)
    assert (other - exact).norm() > 0.1 * exact.norm()  # the two directions can be told apart


@pytest.mark.parametrize(
    ("loss_type", "level", "written"),
    [
        *((one, "token", (0, 2)) for one in LOSSES if one != "gspo"),
        *((one, "sequence", (0, 2)) for one in LOSSES),
        *(("grpo", "token", written) for written in ((), (1,))),
    ],
)
def test_each_estimator_is_exact_on_the_policy_s_own_rows(loss_type, level, written):
    table = Table(written)
    config = config_of(loss_type, importance_sampling_level=level)
    corrected = config.replace(kl_bias_correction=True)
    own = table.policy.detach()
    plain = table.expected(config, own, shaped=False)
    assert_exact(table, plain, own, policy_first=False)
    assert_exact(table, table.expected(corrected, own, shaped=False), own, policy_first=True)
    assert_exact(table, table.expected(config, own, shaped=True), own, policy_first=True)


# gspo has no ratio per token, and one per sequence corrects in its own, approximate way.
@pytest.mark.parametrize("loss_type", sorted({*LOSSES} - {"gspo"}))
def test_the_corrected_penalty_is_exact_on_rows_of_another_policy(loss_type):
    table = Table()
    config = config_of(loss_type, importance_sampling_level="token", kl_bias_correction=True)
    found = table.expected(config, table.old, shaped=False)
    assert_exact(table, found, table.old, policy_first=True)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"])
def test_shaping_is_exact_on_rows_of_another_policy_where_nothing_is_clipped(loss_type):
    table = Table()
    found = table.expected(config_of(loss_type), table.old, shaped=True)
    assert_exact(table, found, table.old, policy_first=True)


def test_a_row_of_one_token_is_shaped():
    """The mean over the whole row would be the token's own, and take all of it away."""
    table = Table(written=(1, 2, 3))
    own = table.policy.detach()
    found = table.expected(config_of("grpo"), own, shaped=True)
    assert found.norm() > 0.1
    assert_exact(table, found, own, policy_first=True)


@pytest.fixture(scope="module")
def bench():
    """The script that makes the table of the docs."""
    environment, modules = dict(os.environ), set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield importlib.import_module("kl")
    for name in {"kl", "common"} - modules:
        sys.modules.pop(name, None)
    os.environ.clear()
    os.environ.update(environment)


ESTIMATORS = (
    *("GRPO, beta", "GRPO, kl_bias_correction", "GRPO, kl_shaping"),
    *("GSPO, kl_bias_correction", "GSPO, kl_shaping", "quickstart, kl_coef"),
)


def test_every_estimator_of_the_script_is_tested(bench):
    assert {*bench.PENALTIES, bench.QUICKSTART} == set(ESTIMATORS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_reaches_the_optimizer_is_within_four_standard_errors(bench, name):
    found = bench.gradients(name, samples=60)
    assert found["largest difference in errors"] < 4
    # Neither a gradient of zero nor that of the other direction would pass.
    assert found["analytic"] > 20 * found["error"]
    assert abs(found["analytic"] - found["the other direction's"]) > 4 * found["error"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
def test_learning_without_a_reward_approaches_the_reference(bench, name):
    found = bench.descent(name)
    assert len(found) == 4
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0] / 4

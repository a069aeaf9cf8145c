"""The entropy bonus: its gradient, its average over tokens, and what it does to a policy."""

import math

import pytest
import torch
from tiny_cohort import PLAIN, build_cohort, distance, learn, make_rows, same, weights

from evo_grpo.errors import ConfigError
from evo_grpo.learn.objective.losses import (
    LOSSES,
    LossConfig,
    LossValues,
    token_terms,
    token_weights,
)
from evo_grpo.learn.rows import assign_minibatches
from evo_grpo.schema.hparams import Hparams
from evo_grpo.seeding import derive

LONGEST = 4


def noise(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def config_of(loss_type):
    return LossConfig(loss_type=loss_type, max_completion_length=LONGEST)


def loss_of(logits, ids, mask, advantages, coefs, config):
    """The loss of rows (B, T) from logits (B, T, V), each row with the coefficient of its agent."""
    table = logits.log_softmax(-1)
    agents = [Hparams(entropy_coef=coef) for coef in coefs]
    terms = token_terms(
        table.gather(-1, ids[..., None])[..., 0],
        None,
        mask,
        advantages,
        config=config,
        values=LossValues.of_agents(agents, torch.arange(len(agents)), logits.dtype),
        entropies=-(table.exp() * table).sum(-1),
    )
    shares = token_weights(
        config.loss_type,
        mask,
        num_rows=len(mask),
        num_tokens=mask.sum(),
        max_completion_length=config.max_completion_length,
        dtype=logits.dtype,
    )
    return torch.where(mask, shares * terms.loss, 0).sum()


def share(loss_type, mask, row):
    """Weight of a token in the average, as the papers write it."""
    count, longest = len(mask), LONGEST
    return {
        "grpo": 1 / count / max(1, int(mask[row].sum())),
        "luspo": 1 / count,
        "dr_grpo": 1 / count / longest,
        "dapo": 1 / int(mask.sum()),
    }[loss_type]


SAME_AVERAGE = {"gspo": "grpo", "sapo": "grpo", "bnpo": "dapo", "cispo": "dapo", "vespo": "dapo"}


@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_gradient_equals_finite_differences(loss_type):
    """Of the bonus alone, written with plain numbers; masked tokens have none."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]], dtype=torch.bool)
    coefs = [0.3, 0.0, 0.02, 0.5]
    ids = torch.zeros(4, 3, dtype=torch.long)
    logits = noise(4, 3, 5).requires_grad_()
    loss = loss_of(logits, ids, mask, torch.zeros(4), coefs, config_of(loss_type))
    loss.backward()

    def written(row, place, numbers):
        whole = sum(math.exp(z) for z in numbers)
        odds = [math.exp(z) / whole for z in numbers]
        entropy = -sum(p * math.log(p) for p in odds)
        average = share(SAME_AVERAGE.get(loss_type, loss_type), mask, row)
        return -coefs[row] * average * entropy if mask[row, place] else 0.0

    values = logits.detach().tolist()
    total = sum(written(i, t, values[i][t]) for i in range(4) for t in range(3))
    assert loss.item() == pytest.approx(total, rel=1e-12)
    for row, place, token in ((0, 0, 1), (0, 2, 4), (1, 0, 0), (1, 1, 3), (2, 1, 2), (3, 0, 0)):
        sides = []
        for step in (1e-5, -1e-5):
            moved = list(values[row][place])
            moved[token] += step
            sides.append(written(row, place, moved))
        expected = (sides[0] - sides[1]) / 2e-5
        assert logits.grad[row, place, token].item() == pytest.approx(expected, abs=1e-9)


def test_the_sampled_gradient_agrees_with_the_exact_one():
    """Two tokens of a vocabulary of three: all prefixes and completions can be listed."""
    first, second = noise(3, seed=1).requires_grad_(), noise(3, 3, seed=2).requires_grad_()

    def entropy(logits):
        table = logits.log_softmax(-1)
        return -(table.exp() * table).sum(-1)

    # The prefixes of the second token come from the first, as sampled: their share has no gradient.
    reached = first.softmax(-1).detach()
    exact = torch.autograd.grad(
        -0.2 * (entropy(first) + (reached * entropy(second)).sum()), (first, second)
    )
    generator = torch.Generator().manual_seed(3)
    samples = []
    for _ in range(300):
        start = torch.multinomial(reached, 8, replacement=True, generator=generator)
        logits = torch.stack([first.expand(8, 3), second[start]], dim=1)
        mask = torch.ones(8, 2, dtype=torch.bool)
        ids = torch.zeros(8, 2, dtype=torch.long)
        loss = loss_of(logits, ids, mask, torch.zeros(8), [0.2] * 8, config_of("luspo"))
        samples.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, (first, second))]))
    found = torch.stack(samples)
    wanted = torch.cat([g.flatten() for g in exact])
    error = found.std(0) / math.sqrt(len(found)) + 1e-12
    assert ((found.mean(0) - wanted).abs() / error).max() < 4
    assert wanted.abs().max() > 20 * error.max()


def test_a_row_of_coefficient_0_is_as_without_to_the_bit():
    logits, ids = noise(3, 2, 5), torch.tensor([[0, 1], [2, 3], [4, 0]])
    mask, advantages = torch.ones(3, 2, dtype=torch.bool), torch.tensor([1.0, -1.0, 0.5])
    found = []
    for coefs in ([0.0, 0.1, 0.0], [0.0, 0.0, 0.0]):
        leaf = logits.clone().requires_grad_()
        loss_of(leaf, ids, mask, advantages, coefs, config_of("grpo")).backward()
        found.append(leaf.grad)
    equal = [torch.equal(*rows) for rows in zip(*found, strict=True)]
    assert equal == [True, False, True]


def test_entropies_of_rows_without_a_bonus_are_not_read():
    lp, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    entropies = torch.tensor([[math.nan] * 3, [1.0] * 3]).requires_grad_()

    def terms(coefs):
        agents = [Hparams(entropy_coef=coef) for coef in coefs]
        values = LossValues.of_agents(agents, torch.arange(2), lp.dtype)
        return token_terms(
            lp, None, mask, torch.zeros(2), config=LossConfig(), values=values, entropies=entropies
        )

    mixed = terms([0.0, 0.5])
    assert mixed.loss.tolist() == [[0.0] * 3, [-0.5] * 3]
    mixed.loss.sum().backward()
    assert entropies.grad.tolist() == [[0.0] * 3, [-0.5] * 3]
    assert not terms([0.0, 0.0]).loss.requires_grad


def test_a_bonus_without_entropies_is_refused():
    values = LossValues(beta=0.0, clip_low=0.8, clip_high=1.2, entropy_coef=0.1)
    with pytest.raises(ConfigError, match=r"entropies: expected .*\(2, 3\).* set entropy_coef to"):
        token_terms(
            torch.zeros(2, 3),
            None,
            torch.ones(2, 3),
            torch.zeros(2),
            config=LossConfig(),
            values=values,
        )


# Through the learner.

PATHS = {
    "joined": lambda cohort: None,
    "modules": lambda cohort: setattr(cohort.base, "specialized", False),
    "called head": lambda cohort: cohort.base.head.register_forward_hook(lambda m, a, out: out),
}


def without_advantage(rows):
    for row in rows:
        row.advantage = 0.0
    return rows


def slow_steps(cohort, rows, hparams, loss_type):
    """The weights after the steps of one agent, whose only gradient is that of the bonus."""
    assign_minibatches(rows, hparams, derive(3, "order", 0))
    parameters = cohort.slots.parameters(cohort.agents[0].adapter)
    optimizer = torch.optim.AdamW(parameters, lr=hparams.lr, weight_decay=0.0)
    cohort.slots.activate(cohort.agents[0].adapter)
    for minibatch in list(range(max(row.minibatch for row in rows) + 1)) * hparams.update_epochs:
        own = [row for row in rows if row.minibatch == minibatch]
        mask = torch.arange(9) < torch.tensor([row.generated for row in own])[:, None]
        loss = torch.zeros(())
        for i, row in enumerate(own):
            ids = torch.as_tensor(row.token_ids)
            logits = cohort.slots.peft(input_ids=ids[None]).logits[0, :-1] / hparams.temperature
            odds = logits[torch.as_tensor(row.mask[1:])].softmax(-1)
            entropies = -(odds * odds.log()).sum(-1)
            loss = loss - hparams.entropy_coef * share(loss_type, mask, i) * entropies.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, hparams.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return weights(cohort, 0)


@pytest.mark.parametrize(
    ("path", "loss_type"),
    [*((path, "grpo") for path in PATHS), *(("joined", t) for t in ("dapo", "dr_grpo", "luspo"))],
)
def test_a_step_matches_the_definition(path, loss_type, monkeypatch):
    # Blocks of few rows and columns, so that every row of logits is in several.
    monkeypatch.setattr("evo_grpo.model.logprobs.CPU_COLUMNS", 7)
    monkeypatch.setattr("evo_grpo.model.logprobs.CPU_ELEMENTS", 21)
    monkeypatch.setattr("evo_grpo.model.logprobs.CALLED_ELEMENTS", 60)
    hparams = PLAIN.replace(
        entropy_coef=0.2, temperature=0.8, update_epochs=2, batch_size=5, max_grad_norm=0.01
    )
    cohort = build_cohort(1, hparams, loss_type=loss_type, max_output_tokens=LONGEST)
    PATHS[path](cohort)
    start = weights(cohort, 0)
    (metrics,) = learn(cohort, [0], [without_advantage(make_rows(5))])
    expected = slow_steps(build_cohort(1), without_advantage(make_rows(5)), hparams, loss_type)
    assert metrics["updates"] == 4
    assert metrics["skipped_rows"] == 0
    assert distance(start, expected) > 1e-2
    # Adam divides by the gradient's own size, so where that is next to nothing rounding shows.
    assert distance(weights(cohort, 0), expected) < 2e-4


MIXED = [
    PLAIN.replace(update_epochs=2, batch_size=3),
    PLAIN.replace(entropy_coef=0.02, update_epochs=2, batch_size=3, temperature=0.7),
    PLAIN.replace(entropy_coef=0.5, beta=0.1, update_epochs=2, batch_size=3),
]


def test_a_bonus_of_other_agents_in_the_batch_changes_no_bit_of_an_agent():
    mixed, none = build_cohort(3, MIXED), build_cohort(3, MIXED)
    for slot in (1, 2):
        none.set_hparams(slot, MIXED[slot].replace(entropy_coef=0.0))
    rows = [make_rows(20 + slot, groups=1 + slot) for slot in range(3)]
    for cohort in (mixed, none):
        learn(cohort, [0, 1, 2], rows)
    assert same(weights(mixed, 0), weights(none, 0))
    for slot in (1, 2):
        assert distance(weights(mixed, slot), weights(none, slot)) > 1e-4


def test_a_larger_coefficient_leaves_a_policy_of_more_entropy():
    coefs = (0.0, 0.1, 1.0)
    cohort = build_cohort(3, [PLAIN.replace(entropy_coef=coef) for coef in coefs])
    rows = make_rows(5, groups=1)[:1]
    rows[0].advantage = 1.0  # each step makes the same completion likelier
    history = [[m["entropy"] for m in learn(cohort, [0, 1, 2], [rows] * 3)] for _ in range(30)]
    changes = [last - first for first, last in zip(history[0], history[-1], strict=True)]
    assert changes == sorted(changes)
    assert changes[0] < -1.5 < -0.5 < changes[2]

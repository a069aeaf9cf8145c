"""GRPO on a plain `nn.Module`, as the quickstart page shows it."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from evo_grpo.errors import (
    CheckpointError,
    ConfigError,
    RewardError,
    RunFailedError,
    ShapeError,
)
from evo_grpo.quickstart import GRPO

VOCABULARY = 8
PROMPTS = torch.tensor([[1, 2, 3], [4, 5, 6]])


class Tiny(nn.Module):
    """A GRU that maps ids (B, T) to logits (B, T, V)."""

    def __init__(self, seed=0, hidden=16):
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCABULARY, hidden)
            self.gru = nn.GRU(hidden, hidden, batch_first=True)
            self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, ids):
        return self.head(self.gru(self.embed(ids))[0])


def threes(completions, prompts):
    """The share of threes."""
    assert len(completions) == len(prompts)
    return (completions == 3).float().mean(1).tolist()


def trainer(reward_fn=threes, **given):
    model = Tiny()
    arguments = {"group_size": 8, "learning_rate": 2e-2, "max_new_tokens": 4, "kl_coef": 0.01}
    return GRPO(model, copy.deepcopy(model), reward_fn, **{**arguments, **given})


def same(first, second):
    return all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_it_learns(level):
    made = trainer(level=level)
    first = trainer().step(PROMPTS)
    assert (first.step, first.kl, first.total_loss) == (0, 0.0, first.policy_loss)
    frozen = copy.deepcopy(made.ref_model)
    last = made.train(PROMPTS, n_epochs=40)
    rewards = [m.average_reward for m in made.history]
    assert len(rewards) == 40
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.4
    assert set(last) == {"mean_reward", "kl", "policy_loss", "total_loss"}
    assert last["mean_reward"] == rewards[-1]
    assert same(made.ref_model, frozen)
    assert made.history[-1].kl > 0


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("level", ["sequence", "token"])
def test_a_step_measures_what_a_slow_loop_does(level, clip):
    seen = []

    def reward(completions, prompts):
        seen.append((prompts, completions))
        return threes(completions, prompts)

    made = trainer(reward, level=level, advantage_clip=clip, eos_id=5, kl_coef=0.2)
    made.train(PROMPTS, n_epochs=25)
    model = copy.deepcopy(made.model)
    last = made.step(PROMPTS)
    prompts, completions = seen[-1]
    rewards = torch.tensor(threes(completions, prompts), dtype=torch.float64).reshape(2, 8)
    centred = rewards - rewards.mean(1, keepdim=True)
    advantages = (centred / (rewards.std(1, keepdim=True) + 1e-4)).reshape(-1)
    if clip is not None:
        advantages = advantages.clamp(-clip, clip)
    sums, tokens, gaps, k3 = [], 0, [], []
    for prompt, completion, advantage in zip(prompts, completions, advantages, strict=True):
        total, ids = 0.0, prompt.tolist()
        for token in completion.tolist():
            both = [
                m(torch.tensor([ids]))[0, -1].detach().log_softmax(-1)[token]
                for m in (model, made.ref_model)
            ]
            total += float(both[0] * advantage)
            gaps.append(float(both[0] - both[1]))
            k3.append(np.exp(-gaps[-1]) + gaps[-1] - 1)
            tokens += 1
            ids.append(token)
            if token == 5:
                break
        sums.append(total)
    policy_loss = -np.mean(sums) if level == "sequence" else -np.sum(sums) / tokens
    assert last.policy_loss == pytest.approx(policy_loss, abs=1e-5)
    assert last.kl == pytest.approx(np.mean(gaps), abs=1e-5)
    assert last.total_loss == pytest.approx(policy_loss + 0.2 * np.mean(k3), abs=1e-5)
    assert last.average_advantage == pytest.approx(float(advantages.mean()), abs=1e-6)
    assert last.average_reward == pytest.approx(float(rewards.mean()))
    recent = [m.average_reward for m in made.history[-20:]]
    assert last.rolling_reward == pytest.approx(np.mean(recent))


class Wordy(nn.Module):
    """Returns its logits inside of an output object, as transformers does."""

    def __init__(self):
        super().__init__()
        self.inner = Tiny()

    def forward(self, ids):
        return SimpleNamespace(logits=self.inner(ids))


def test_a_model_of_transformers_is_taken_as_it_is():
    plain, made = trainer(), GRPO(Wordy(), Wordy(), threes, 8, 0.01, 2e-2, 4)
    assert made.train(PROMPTS, n_epochs=2) == plain.train(PROMPTS, n_epochs=2)
    assert same(plain.model, made.model.inner)


def test_the_same_seed_repeats_and_another_does_not():
    runs = [trainer(seed=seed) for seed in (3, 3, 4)]
    for made in runs:
        made.train(PROMPTS, n_epochs=3)
    assert runs[0].history == runs[1].history
    assert same(runs[0].model, runs[1].model)
    assert runs[0].history != runs[2].history


def test_equal_rewards_move_nothing():
    made = trainer(lambda completions, prompts: [1.0] * len(completions), kl_coef=0.0)
    before = copy.deepcopy(made.model)
    made.step(PROMPTS)
    assert same(made.model, before)


def test_batches_and_callbacks_and_checkpoints(tmp_path):
    made, seen = trainer(), []
    made.train(
        PROMPTS,
        n_epochs=2,
        batch_size=1,
        checkpoint_dir=tmp_path,
        checkpoint_every=2,
        on_step=seen.append,
    )
    assert seen == made.history
    assert [m.step for m in seen] == [0, 1, 2, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_2", "step_4"]


def test_completions_end_at_the_end_token():
    seen = []

    def reward(completions, prompts):
        seen.append(completions)
        return threes(completions, prompts)

    made = trainer(reward, eos_id=5, pad_id=0, max_new_tokens=12)
    made.train(PROMPTS, n_epochs=3)
    rows = torch.cat(seen)
    ended = rows == 5
    assert ended.any()
    after = (ended.cumsum(1) - ended.int()) > 0
    assert (rows[after] == 0).all()
    assert made.generate(PROMPTS).shape == (2, 12)
    assert torch.equal(made.generate(PROMPTS, seed=1), made.generate(PROMPTS, seed=1))


def test_save_and_load(tmp_path):
    made = trainer()
    made.train(PROMPTS, n_epochs=3)
    made.save(tmp_path / "a")
    other = trainer()
    assert not same(made.model, other.model)
    other.load(tmp_path / "a")
    assert same(made.model, other.model)
    assert other.history == made.history
    assert torch.equal(made.generate(PROMPTS), other.generate(PROMPTS))
    assert other.step(PROMPTS).step == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", None, r"expected model\.safetensors"),
        ("model.safetensors", b"{}", "safetensors"),
        ("history.jsonl", None, "history"),
        ("history.jsonl", b'{"step": 0, "aver', r"expected model\.safetensors"),
        ("wide", None, "those of another model"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(name, content, message, tmp_path):
    made = trainer()
    made.save(tmp_path)
    if name == "wide":
        wide = Tiny(hidden=20)
        GRPO(wide, copy.deepcopy(wide), threes).save(tmp_path)
    elif content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    before = copy.deepcopy(made.model)
    with pytest.raises(CheckpointError, match=f"checkpoint .*{message}"):
        made.load(tmp_path)
    assert same(made.model, before)
    assert made.history == []


class Broken(Tiny):
    """Returns something else than logits, or logits that are no numbers."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, ids):
        return self.change(super().forward(ids))


NAN = float("nan")


@pytest.mark.parametrize(
    ("change", "returned", "error", "message"),
    [
        (None, [1.0], RewardError, "(?s)reward_fn 'rewards'.*16 finite numbers.*got 1"),
        (None, [NAN] * 16, RewardError, "(?s)reward_fn 'rewards'.*16 finite numbers.*nan"),
        (None, ["good"] * 16, ShapeError, "^reward_fn 'rewards': expected numbers, .*'good'"),
        (lambda x: x * NAN, [1.0, 2.0] * 8, RunFailedError, "expected a finite loss and gradient"),
        (lambda x: (x, None), [1.0] * 16, ShapeError, r"logits \(B, T, V\).*got tuple"),
        (lambda x: x[0], [1.0] * 16, ShapeError, r"model Broken: expected .*got \(3, 8\)"),
    ],
)
def test_a_reward_function_or_a_model_that_returns_something_else_changes_nothing(
    change, returned, error, message
):
    def rewards(completions, prompts):
        return returned

    model = Tiny() if change is None else Broken(change)
    made = GRPO(model, Tiny(), rewards, 8)
    before = copy.deepcopy(made.model)
    with pytest.raises(error, match=message):
        made.step(PROMPTS)
    assert same(made.model, before)
    assert made.history == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"group_size": 1}, "group_size: expected an integer >= 2"),
        ({"kl_coef": -1.0}, "kl_coef: expected a finite number >= 0, got -1.0"),
        ({"learning_rate": 0.0}, "learning_rate: expected a finite number > 0"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected an integer >= 1"),
        ({"temperature": 0.0}, "temperature: expected a finite number > 0"),
        (
            {"temperature": 1e-40},
            r"temperature: .* float32 computes with, from 1e-06 to 1e\+06",
        ),
        ({"advantage_clip": 0.0}, "advantage_clip: expected a finite number > 0, or None, got 0.0"),
        ({"level": "row"}, 'level: expected "sequence" or "token", got \'row\''),
        ({"eos_id": "a"}, "eos_id: expected an integer >= 0, or None, got 'a'; give a token id"),
        ({"eos_id": True}, "eos_id: expected an integer >= 0"),
        ({"pad_id": -1}, "pad_id: expected an integer >= 0, got -1"),
    ],
)
def test_values_out_of_range_are_named(given, message):
    with pytest.raises(ConfigError, match=message):
        trainer(**given)


def test_models_and_optimizers_that_cannot_train_are_refused():
    model, other = Tiny(), Tiny()
    with pytest.raises(ConfigError, match=r"ref_model: .*pass copy.deepcopy\(model\)"):
        GRPO(model, model, threes)
    with pytest.raises(ConfigError, match="optimizer: expected one over trainable weights"):
        GRPO(Tiny().requires_grad_(False), other, threes)
    with pytest.raises(ConfigError, match="optimizer: expected one over trainable weights"):
        GRPO(model, other, threes, optimizer=torch.optim.SGD(Tiny().parameters(), lr=1.0))
    own = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ConfigError, match=r"learning_rate=0.1: has no effect with optimizer="):
        GRPO(model, other, threes, learning_rate=0.1, optimizer=own)
    assert GRPO(model, other, threes, optimizer=own).optimizer is own
    assert GRPO(model, other, threes).optimizer.param_groups[0]["lr"] == 1e-4


def test_prompts_are_a_matrix():
    for prompts in ([[0.5, 1.0]], torch.rand(2, 3), "12"):
        with pytest.raises(ShapeError, match="prompts: expected token ids as an int64 tensor"):
            trainer().train(prompts)
    with pytest.raises(ShapeError, match=r"tensor \(P, T\) .* got \(3,\) torch.int64"):
        trainer().train(torch.tensor([1, 2, 3]))
    with pytest.raises(ConfigError, match="checkpoint_every=5: has no effect without checkpoint_d"):
        trainer().train(PROMPTS, checkpoint_every=5)
    for name in ("n_epochs", "batch_size", "checkpoint_every"):
        with pytest.raises(ConfigError, match=f"{name}: expected an integer >= 1.* got 0"):
            trainer().train(PROMPTS, **{name: 0})


def test_a_model_may_forbid_the_padding():
    class WithoutPadding(Tiny):
        def forward(self, ids):
            logits = super().forward(ids).clone()
            logits[..., 0] = -torch.inf
            return logits

    model = WithoutPadding()
    made = GRPO(
        model, copy.deepcopy(model), threes, eos_id=1, pad_id=0, max_new_tokens=6, group_size=8
    )
    made.train(PROMPTS, n_epochs=3)
    assert all(np.isfinite([m.total_loss, m.kl]).all() for m in made.history)
    assert all(p.isfinite().all() for p in made.model.parameters())

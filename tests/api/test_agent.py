"""GRPO, GSPO and CISPO as a user of the reference API meets them."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig
from tiny_cohort import (
    assert_same_image,
    build_model,
    distance,
    image,
    moments,
    same,
    weights,
)

from evo_grpo import CISPO, GRPO, GSPO, HyperparameterConfig, RLParameter
from evo_grpo.errors import CheckpointError, ConfigError, EngineUnavailable, ModelError, ShapeError
from evo_grpo.types import Prompt

LORA = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
OBS = [{"input_ids": torch.tensor([[3, 4, 5]])}, {"input_ids": torch.tensor([[6, 7]])}]


def make(cls=GRPO, **given):
    arguments = {
        "actor_network": build_model(),
        "lora_config": LORA,
        "group_size": 4,
        "max_output_tokens": 5,
        "lr": 1e-2,
        "batch_size": None,
    }
    return cls(pad_token="<pad>", **{"pad_token_id": 0, **arguments, **given})


def reward(ids, masks):
    """A reward for tokens below 9, which any agent can learn."""
    return torch.stack([((g[:, 1:] < 9) & m).sum(1) / m.sum(1) for g, m in zip(ids, masks)])  # noqa: B905 -- the two come together


def train(agent, steps):
    seen = []
    for _ in range(steps):
        ids, masks = agent.get_action(OBS)
        rewards = reward(ids, masks)
        seen.append(float(rewards.mean()))
        metrics = agent.learn((ids, masks, rewards))
    return seen, metrics


@pytest.mark.parametrize("cls", [GRPO, GSPO, CISPO])
def test_an_agent_learns_a_reward(cls):
    agent = make(cls, group_size=16, lr=3e-2, max_grad_norm=1.0, beta=0.0)
    assert agent.cohort.options.learn.loss.loss_type == cls.default_loss
    seen, metrics = train(agent, 15)
    assert seen[0] < 0.75
    assert np.mean(seen[-3:]) > 0.95
    assert agent.steps == 15
    assert metrics["failed"] == 0


def test_get_action_returns_groups_with_their_masks():
    agent = make(group_size=6)
    ids, masks = agent.get_action(OBS)
    assert [len(g) for g in ids] == [6, 6]
    for group, mask, prompt in zip(ids, masks, OBS, strict=True):
        start = prompt["input_ids"].shape[1]
        assert group.dtype == torch.long
        assert mask.dtype == torch.bool
        assert mask.shape == (6, group.shape[1] - 1)
        assert (group[:, :start] == prompt["input_ids"]).all()
        assert not mask[:, : start - 1].any()
        assert mask[:, start - 1].all()


def test_get_action_draws_anew_each_time_and_repeats_from_the_seed():
    agent, twin = make(), make()
    first, second = agent.get_action(OBS)[0], agent.get_action(OBS)[0]
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=False))
    assert all(torch.equal(a, b) for a, b in zip(first, twin.get_action(OBS)[0], strict=True))


def test_get_action_of_an_evaluation_samples_one_plain_completion():
    agent = make(top_k=1, repetition_penalty=9.0)
    ids, _ = agent.get_action(OBS, False)
    assert [len(g) for g in ids] == [1, 1]
    ids, _ = agent.get_action(OBS, True, False)
    assert [len(g) for g in ids] == [1, 1]
    # Training takes the likeliest token alone; evaluation draws from all of them.
    trained, plain = make(top_k=1), make(top_k=1)
    obs = [Prompt(i, "", (3, 4, 5)) for i in range(20)]
    assert len({tuple(g[0].tolist()) for g in trained.get_action(obs, True)[0]}) == 1
    assert len({tuple(g[0].tolist()) for g in plain.get_action(obs, False)[0]}) > 1


def test_learn_takes_rewards_in_either_shape_and_from_anywhere():
    one, two, three = make(), make(), make()
    for agent, turn in ((one, lambda r: r), (two, torch.flatten), (three, lambda r: r.tolist())):
        ids, masks = agent.get_action(OBS)
        agent.learn((ids, masks, turn(reward(ids, masks))))
    assert same(weights(one.cohort, 0), weights(two.cohort, 0))
    assert same(weights(one.cohort, 0), weights(three.cohort, 0))


def test_learn_wants_one_reward_per_completion():
    agent = make()
    ids, masks = agent.get_action(OBS)
    with pytest.raises(ShapeError, match=r"one reward per completion, 8 for groups of \[4, 4\]"):
        agent.learn((ids, masks, torch.zeros(7)))


def test_a_clone_is_equal_and_independent():
    agent = make()
    train(agent, 2)
    before = weights(agent.cohort, 0)
    clone = agent.clone(index=5)
    assert clone.index == 5
    assert type(clone) is GRPO
    assert clone.cohort is agent.cohort
    assert clone.slot != agent.slot
    assert clone.hparams == agent.hparams
    assert clone.steps == agent.steps == 2
    assert same(weights(agent.cohort, clone.slot), before)
    assert moments(agent.cohort, clone.slot).keys() == moments(agent.cohort, 0).keys()
    for key, value in moments(agent.cohort, 0).items():
        assert torch.equal(value, moments(agent.cohort, clone.slot)[key])
    train(clone, 1)
    assert same(weights(agent.cohort, 0), before)
    assert distance(weights(agent.cohort, clone.slot), before) > 1e-4
    assert agent.steps == 2


def test_copy_attributes_takes_all_but_weights():
    agent = make()
    train(agent, 1)
    other = make()
    start = weights(other.cohort, 0)
    agent.hparams = replace(agent.hparams, lr=7e-3)
    assert GRPO.copy_attributes(agent, other) is other
    assert other.hparams.lr == 7e-3
    assert other.steps == 1
    assert same(weights(other.cohort, 0), start)


def test_assigning_hyperparameters_reaches_the_optimizer():
    agent = make()
    agent.hparams = replace(agent.hparams, lr=5e-4, group_size=7)
    assert [g["lr"] for g in agent.state.optimizer.param_groups] == [5e-4]
    assert [len(g) for g in agent.get_action(OBS)[0]] == [7, 7]


def test_checkpoints_through_the_agent(tmp_path):
    agent = make()
    train(agent, 2)
    agent.save_checkpoint(tmp_path / "a")
    other = make()
    other.load_checkpoint(tmp_path / "a", load_optimizer=True)
    for mine in (agent, other):
        mine.cohort._calls = 50  # the same draws for both
        train(mine, 1)
    assert same(weights(agent.cohort, 0), weights(other.cohort, 0))
    with pytest.raises(CheckpointError, match=r"attributes.json is missing"):
        other.load_checkpoint(tmp_path / "b")


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "another hidden size.*adapter of another base model"),
        ({"intermediate_size": 48}, "another hidden size.*adapter of another base model"),
        ({"vocab_size": 23}, "a vocabulary of 23, but .* has 19; load it over its own base model"),
        (
            {"num_hidden_layers": 3},
            r"adapts model.layers.2\..*does not have: .*another base model",
        ),
    ],
)
def test_a_checkpoint_over_another_base_is_named_as_such(tmp_path, changes, message, merge):
    other = make(actor_network=build_model(**changes))
    train(other, 1)
    other.save_checkpoint(tmp_path)
    population = GRPO.population(2, 0, "<pad>", actor_network=build_model(), lora_config=LORA)
    before = [image(population.cohort, slot) for slot in (0, 1)]
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        population[1].load_checkpoint(tmp_path, load_optimizer=True, merge_lora_configs=merge)
    for slot in (0, 1):
        assert_same_image(before[slot], image(population.cohort, slot))


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        ([{"input_ids": torch.empty(1, 0, dtype=torch.long)}], "prompt 0 .*has no tokens"),
        (
            [*OBS, {"input_ids": torch.tensor([[3]]), "attention_mask": torch.zeros(1, 1)}],
            "prompt 2",
        ),
        ([{"input_ids": torch.tensor([[3, 19]])}], r"observation 0 holds .* 19, but .* is 0\.\.18"),
        ([{"input_ids": torch.tensor([[-1]])}], r"holds the token id -1"),
    ],
)
def test_prompts_that_the_model_cannot_read_are_named(obs, message):
    with pytest.raises(ShapeError, match=message):
        make().get_action(obs)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_padding_may_be_the_end_token_to_the_bit(dropout):
    """What is written into padding moves no weight; the end token is trained like any other."""
    lora = LoraConfig(r=2, lora_dropout=dropout, target_modules="all-linear")
    pads = {"another": 0, "the end token": 1}
    made = {k: make(pad_token_id=v, lora_config=lora, group_size=24) for k, v in pads.items()}
    seen = {}
    for name, agent in made.items():
        ids, masks = agent.get_action(OBS)
        assert any((~m[:, 3:]).any() for m in masks), "no row was padded, the test shows nothing"
        seen[name] = (ids, masks, reward(ids, masks))
        assert agent.learn(seen[name])["ratio_max"] == 1.0
    assert not all(torch.equal(a, b) for a, b in zip(*(s[0] for s in seen.values()), strict=True))
    one, two = made.values()
    assert same(weights(one.cohort, 0), weights(two.cohort, 0))
    # Without its end tokens in the mask the same batch teaches something else.
    ids, masks, rewards = seen["the end token"]
    without = [m & (g[:, 1:] != 1) for g, m in zip(ids, masks, strict=True)]
    assert any((a != b).any() for a, b in zip(masks, without, strict=True))
    third = make(pad_token_id=1, lora_config=lora, group_size=24)
    third.learn((ids, without, rewards))
    assert distance(weights(third.cohort, 0), weights(two.cohort, 0)) > 1e-6


def test_the_older_signature_begins_with_two_spaces():
    agent = GRPO(object(), object(), pad_token_id=0, actor_network=build_model(), lora_config=LORA)
    assert agent.cohort.base.pad_id == 0


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"group_sise": 4},
            ConfigError,
            "unknown argument 'group_sise'; did you mean 'group_size'",
        ),
        ({"critic_lr": 1}, ConfigError, "critic_lr: GRPO has no critic"),
        ({"group_size": 1}, ConfigError, "group_size: expected a whole number >= 2, got 1"),
        ({"lr": 0.0}, ConfigError, "lr: expected a finite number > 0, got 0.0"),
        ({"loss_type": "grop"}, ConfigError, "loss_type.*grpo.*'grop'"),
        ({"adv_norm": "std"}, ConfigError, "adv_norm: expected one of"),
        ({"actor_network": None}, ConfigError, "exactly one of model_name= and actor_network="),
        ({"model_name": "tiny-sums"}, ConfigError, "exactly one of model_name= and actor_network="),
        ({"device": "gpu"}, ConfigError, "device: expected auto, cpu, mps, cuda .* got 'gpu'"),
        ({"use_vllm": True}, EngineUnavailable, "use_vllm=True.*leave use_vllm out"),
        ({"accelerator": object()}, EngineUnavailable, "accelerator.*leave it out"),
    ],
)
def test_bad_arguments_are_named_with_the_remedy(given, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        make(**given)


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="so it is not a model folder"):
        make(actor_network=None, model_name=str(tmp_path))


@pytest.mark.parametrize("size", [0, -1])
def test_a_population_has_at_least_one_agent(size):
    with pytest.raises(ConfigError, match="population: size: expected a whole number >= 1"):
        GRPO.population(size, actor_network=build_model())


def test_a_population_shares_one_base_and_its_agents_start_alike():
    hp_config = HyperparameterConfig(lr=RLParameter(min=1e-4, max=1e-2))
    population = GSPO.population(
        size=3, actor_network=build_model(), lora_config=LORA, lr=1e-3, hp_config=hp_config
    )
    assert [type(agent) for agent in population] == [GSPO] * 3
    assert [agent.index for agent in population] == [0, 1, 2]
    assert len({id(agent.cohort.base) for agent in population}) == 1
    assert population[1].hp_config == hp_config
    assert same(weights(population.cohort, 0), weights(population.cohort, 2))


def still(agent):
    """One step on a group of equal rewards and one of unlike ones."""
    ids, masks = agent.get_action(OBS)
    return agent.learn((ids, masks, [1.0] * 4 + [0.0, 1.0, 0.0, 1.0]))


@pytest.mark.parametrize(("beta", "skipped"), [(0.0, 4.0), (0.1, 0.0)])
def test_learn_counts_groups_without_an_advantage(beta, skipped):
    agent = make(beta=beta)
    metrics = still(agent)
    assert metrics["zero_variance"] == 0.5
    assert metrics["skipped_rows"] == skipped
    assert agent.state.last == metrics


def test_learn_counts_filtered_rows():
    metrics = still(make(filter_zero_adv=True, beta=0.1))
    assert (metrics["rows"], metrics["skipped_rows"]) == (8.0, 4.0)
    metrics = still(make(filter_zero_adv=True, adv_filter_eps=50.0))
    assert (metrics["rows"], metrics["skipped_rows"], metrics["updates"]) == (8.0, 8.0, 0.0)


def test_kl_shaping_reports_the_kl():
    agent = make(use_kl_advantage_shaping=True, beta=0.1)
    assert train(agent, 1)[1]["kl"] == 0.0  # before the first update policy and reference agree
    assert train(agent, 1)[1]["kl"] > 0.0


def test_dr_grpo_divides_by_the_limit_in_force():
    def scale(hint, **given):
        agent = GRPO(
            model_name="tiny-sums", lora_config=LORA, loss_type="dr_grpo", batch_size=None, **given
        )
        agent.cohort.suit(SimpleNamespace(max_output_tokens=hint, limit_context=lambda _: None))
        assert agent.cohort.learner.options.loss.max_completion_length == (
            agent.cohort.max_output_tokens
        )
        ids, masks = agent.get_action(["12+07="])
        ids, masks = [ids[0][:, :8]], [masks[0][:, :7]]
        return agent.learn((ids, masks, [float(i) for i in range(8)]))["grad_norm"]

    assert scale(4) == pytest.approx(2 * scale(8), rel=1e-4)
    assert scale(4) == pytest.approx(scale(None, max_output_tokens=4), rel=1e-4)
    assert scale(4) == pytest.approx(scale(8, max_output_tokens=4), rel=1e-4)


@pytest.mark.parametrize(
    ("experiences", "message"),
    [
        ({"ids": 1}, "learn: expected .ids, action masks, rewards. .* got dict of 1"),
        ((1, 2), "learn: expected .*got tuple of 2"),
        (([torch.full((2, 3), 99999)], [torch.ones(2, 2)], [1, 2]), "group 0 holds token ids from"),
        (([torch.full((2, 3), -1)], [torch.ones(2, 2)], [1, 2]), "group 0 holds token ids from -1"),
        (([[1, 2]], [torch.ones(2, 2)], [1, 2]), "one tensor of ids"),
        (([torch.ones(2, 3)], [torch.ones(2, 2)], ["a", "b"]), "one number per completion"),
    ],
)
def test_experiences_that_learn_cannot_take_are_named(experiences, message):
    with pytest.raises(ShapeError, match=message):
        make().learn(experiences)


def test_observations_that_are_none_are_named():
    with pytest.raises(ShapeError, match=r"get_action: expected a Prompt, a text, .* got 5"):
        make().get_action(5)

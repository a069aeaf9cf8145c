"""GRPO, GSPO and CISPO: what the constructors show and refuse, and what the methods do."""

import inspect
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig
from tiny_cohort import (
    build_model,
    same,
    weights,
)

from evo_grpo import CISPO, GRPO, GSPO, HyperparameterConfig, Population, RLParameter
from evo_grpo.api.keywords import PopulationKeywords, TrainKeywords
from evo_grpo.errors import ConfigError, RewardError, ShapeError
from evo_grpo.settings import AgentSettings
from evo_grpo.settings.keywords import AGENT_KEYWORDS, POPULATION_KEYWORDS, TRAIN_KEYWORDS
from evo_grpo.types import Prompt, Score

LORA = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
OBS = [{"input_ids": torch.tensor([[3, 4, 5]])}, {"input_ids": torch.tensor([[6, 7]])}]


def make(cls=GRPO, **given):
    settings = {
        "model": build_model(),
        "lora": LORA,
        "group_size": 4,
        "max_output_tokens": 5,
        "lr": 1e-2,
        "update_epochs": 1,
        "device": "cpu",
    }
    return cls(**{**settings, **given})


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
    agent = make(cls, group_size=16, lr=3e-2)
    assert agent.cohort.learner.loss.loss_type == cls.kind
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


def test_assigning_hyperparameters_reaches_the_optimizer():
    agent = make()
    agent.hparams = agent.hparams.replace(lr=5e-4, group_size=7)
    assert [g["lr"] for g in agent.state.optimizer.param_groups] == [5e-4]
    assert [len(g) for g in agent.get_action(OBS)[0]] == [7, 7]


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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"group_sise": 4}, "unknown argument 'group_sise'. Did you mean 'group_size'"),
        ({"learning_rate": 1e-3}, "unknown argument 'learning_rate'. Here it is lr"),
        ({"num_generations": 4}, "'num_generations'. Here it is group_size"),
        ({"epsilon": 0.2}, "'epsilon'. Here it is clip_coef"),
        ({"kl_coef": 0.1}, "'kl_coef'. Here it is beta"),
        ({"max_new_tokens": 9}, "'max_new_tokens'. Here it is max_output_tokens"),
        ({"max_completion_length": 9}, "Here it is max_output_tokens"),
        ({"model_name": "tiny-sums"}, "unknown argument 'model_name'. Here it is model"),
        ({"actor_network": 3}, "unknown argument 'actor_network'. Here it is model"),
        ({"use_vllm": True}, "GRPO: unknown argument 'use_vllm'"),
        ({"group_size": 1}, r"^group_size: expected an integer >= 2, got 1; a group of one has no"),
        ({"lr": 0.0}, r"^lr: expected a number > 0, or null, got 0.0"),
        (
            {"lr": "1e-3"},
            r"^lr: expected a number > 0, or null, got the string '1e-3'; write it without",
        ),
        ({"lr": 1e308}, r"^lr: expected a number from 1e-30 to 1e\+06, which float32 can"),
        ({"temperature": 1e-40}, r"^temperature: expected a number from 1e-06 to 1e\+06"),
        (
            {"lora": LoraConfig(r=2, lora_alpha=0, target_modules="all-linear")},
            "^lora.lora_alpha: expected a number > 0 .*, got 0; an update scaled by 0 learns",
        ),
        (
            {"lora": LoraConfig(r=0, target_modules="all-linear")},
            "^lora.r: expected an integer",
        ),
        ({"lora": {"alpha": 0.0}}, "^lora.alpha: expected a number > 0"),
        ({"loss_type": "grop"}, "^loss_type: .*got the string 'grop'; did you mean 'grpo'"),
        ({"adv_norm": "std"}, "^adv_norm: expected 'mean_std', 'mean_only' or 'batch_std', got"),
        (
            {"model": None},
            "^model: expected the name of a model or a transformers module, got none",
        ),
        ({"model": 3}, "^model: expected the name of a model or a transformers causal .* got int"),
        ({"model": torch.nn.Linear(2, 2)}, "^model: expected the name of a model .*got Linear"),
        ({"config": {"a": 1}}, "^config: expected only with the name of a model, got"),
        ({"tokenizer": "abc"}, "^tokenizer: expected a transformers tokenizer, got str"),
        ({"device": "gpu"}, "^device: expected auto, cpu, mps, cuda or cuda:N, got .*'gpu'"),
        ({"lora": {"rank": 4}}, "^lora.rank: unknown key"),
        ({"lora": 4}, "^lora: expected a mapping, got 4"),
        ({"hyperparameters": {"lr": 1}}, "^hyperparameters.lr: expected a range"),
        (
            {"max_output_tokens": 8, "max_model_len": 8},
            r"^max_output_tokens: expected less than max_model_len \(8\)",
        ),
        (
            {"lr": 1.0, "hyperparameters": {"lr": {"min": 1e-4, "max": 1e-2}}},
            r"^lr: expected a value inside hyperparameters.lr \[0.0001, 0.01\], got 1",
        ),
    ],
)
def test_bad_arguments_are_named_with_the_remedy(given, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        make(**given)


def test_arguments_by_position_say_where_the_older_spelling_lives():
    where = r"import it from evo_grpo.agilerl"
    with pytest.raises(ConfigError, match=rf"^GRPO: .* got 2 by position; .*{where}"):
        GRPO(0, "<pad>")
    with pytest.raises(ConfigError, match=rf"^population: .* got 1 by position; .*{where}"):
        GRPO.population(3, model="tiny-sums")


@pytest.mark.parametrize("cls", [GRPO, GSPO, CISPO])
def test_the_signature_shows_every_setting_with_its_default(cls):
    shown = inspect.signature(cls).parameters
    assert set(shown) == {*AGENT_KEYWORDS, "tokenizer"}
    assert {p.kind for p in shown.values()} == {inspect.Parameter.KEYWORD_ONLY}
    defaults = AgentSettings()
    for name, path in AGENT_KEYWORDS.items():
        if path[0] == "model":
            continue
        value = defaults
        for part in path:
            value = getattr(value, part)
        # The default lr and its range follow the model.
        assert shown[name].default == (None if name in ("lr", "hyperparameters") else value), name
    several = inspect.signature(cls.population).parameters
    assert set(several) == {*AGENT_KEYWORDS, *POPULATION_KEYWORDS, "tokenizer"}
    assert (several["size"].default, several["init"].default) == (8, "latin_hypercube")
    assert set(PopulationKeywords.__annotations__) == set(several)
    assert "\n    temperature: Sampling temperature in training" in cls.population.__doc__
    train = inspect.signature(Population.train).parameters
    own = {"self", "env", "out", "force", "observer", "progress"}
    assert set(train) - own == set(TRAIN_KEYWORDS) == set(TrainKeywords.__annotations__)


def test_the_shortest_call_has_the_defaults_of_yaml():
    agent = GRPO(model="tiny-sums")
    assert agent.settings == AgentSettings(model="tiny-sums")
    assert agent.hp_config.names() == ["lr"]
    assert (agent.hp_config["lr"].min, agent.hp_config["lr"].max) == pytest.approx((1e-4, 1e-2))
    assert agent.cohort.slots.lora_config(agent.state.adapter).r == 8
    assert not agent.state.has_reference


def test_a_start_that_no_population_can_have_is_refused_before_the_model_is_loaded():
    message = r"^init\[1\]\.lr: .*inside of its range \[1e-06, 0.0003\], got 1"
    with pytest.raises(ConfigError, match=message):
        GRPO.population(size=2, model="no-such-model", init=[{}, {"lr": 1.0}])


def test_a_repr_says_which_agent_of_what_it_is():
    population = GSPO.population(size=2, model="tiny-sums", lora={"r": 2}, init="same")
    assert repr(population[1]) == "GSPO(agent 1 of 2 over 'tiny-sums', lr=0.001, steps=0)"
    population[1].state.history.append(Score(0.25, 0.1, 4))
    assert repr(population[1]).endswith("steps=0, fitness=0.250)")


def test_a_population_shares_one_base_and_its_agents_start_alike():
    hp_config = HyperparameterConfig(lr=RLParameter(min=1e-4, max=1e-2))
    population = GSPO.population(
        size=3, model=build_model(), lora=LORA, lr=1e-3, hyperparameters=hp_config, init="same"
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


def test_dr_grpo_divides_by_the_limit_in_force():
    def scale(hint, **given):
        agent = GRPO(model="tiny-sums", lora=LORA, loss_type="dr_grpo", update_epochs=1, **given)
        agent.cohort.adapt_to(SimpleNamespace(max_output_tokens=hint, limit_context=lambda _: None))
        assert agent.cohort.learner.loss.max_completion_length == (agent.cohort.max_output_tokens)
        ids, masks = agent.get_action(["12+07="])
        ids, masks = [ids[0][:, :8]], [masks[0][:, :7]]
        return agent.learn((ids, masks, [float(i) for i in range(8)]))["grad_norm"]

    assert scale(4) == pytest.approx(2 * scale(8), rel=1e-4)
    assert scale(4) == pytest.approx(scale(None, max_output_tokens=4), rel=1e-4)
    assert scale(4) == pytest.approx(scale(8, max_output_tokens=4), rel=1e-4)


@pytest.mark.parametrize(
    ("experiences", "message"),
    [
        (([torch.full((2, 3), 99999)], [torch.ones(2, 2)], [1, 2]), "group 0 holds token ids from"),
        (([torch.full((2, 3), -1)], [torch.ones(2, 2)], [1, 2]), "group 0 holds token ids from -1"),
        (([[1, 2]], [torch.ones(2, 2)], [1, 2]), r"group 0: expected tensors of ids \(G, T\) and"),
        (
            ([torch.ones(2, 3)], [torch.ones(2, 3)], [1, 2]),
            r"group 0: .* \(2, 3\) and \(2, 3\)",
        ),
        (
            ([torch.ones(2, 3).long()], [torch.zeros(2, 2)], [1, 2]),
            "learn: expected at least one generated token, got 2 rows whose action masks are all F",
        ),
        (([], [], []), "learn: expected at least one generated token, got 0 rows"),
        (
            ([torch.ones(2, 3).long()], [torch.ones(2, 2)], [1.0]),
            r"one reward per completion, 2 for groups of \[2\], got 1 ids, 1 masks and 1 rewards",
        ),
    ],
)
def test_experiences_that_learn_cannot_take_are_named(experiences, message):
    with pytest.raises(ShapeError, match=message):
        make().learn(experiences)


@pytest.mark.parametrize(
    ("rewards", "adv_norm"),
    [
        ([1e308, -1e308] * 4, "mean_std"),
        (np.float32([1e20, 0.0] * 4), "mean_only"),
        ([math.inf] * 8, "batch_std"),
    ],
)
def test_rewards_that_float32_cannot_compute_with_are_named(rewards, adv_norm):
    agent = make(adv_norm=adv_norm)
    before = weights(agent.cohort, 0)
    ids, masks = agent.get_action(OBS)
    with pytest.raises(RewardError, match=r"^rewards\[0\]: expected a finite number.*clip the rew"):
        agent.learn((ids, masks, rewards))
    assert agent.steps == 0
    assert same(weights(agent.cohort, 0), before)

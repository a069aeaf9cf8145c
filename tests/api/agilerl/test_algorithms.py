"""Every method of AgileRL's agents acts on one agent of three and leaves the others bit for bit.

Each runs twice: with the base as every agent's reference, and with a reference adapter per agent.
"""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from text_agents import agilerl_agents, gym, lora
from tiny_cohort import assert_same_image, image, perturb

from evo_grpo.agilerl import GRPO, CosineLRScheduleConfig
from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.types import Score

OBS = [{"input_ids": torch.tensor([[3, 4, 5]])}]


class Pair(NamedTuple):
    first: torch.Tensor
    second: list


def take(agent):
    ids, masks = agent.get_action(OBS)
    return agent.learn((ids, masks, [0.0, 1.0, 0.5, 0.2]))


REFERENCES = {"params": [False, True], "ids": ["base as reference", "own reference"]}


def trained(separate):
    """Three agents with weights, moments and, if any, references of their own."""
    made = agilerl_agents(3, use_separate_reference_adapter=separate, beta=0.05)
    for agent in made:
        if separate:
            agent.set_reference_policy(1)
        take(agent)
    return made


@pytest.fixture(**REFERENCES)
def population(request):
    """Three agents for a test that may change the one in the middle."""
    return trained(request.param)


@pytest.fixture(scope="module", **REFERENCES)
def shared(request):
    """Three agents for tests that change none of them."""
    return trained(request.param)


@contextmanager
def only_the_middle_one(population):
    """Give the agent in the middle; fail when the base or one of the other two changed."""
    cohort, slots = population.cohort, population.slots
    base = {name: value.clone() for name, value in cohort.base.weights().items()}
    others = {slot: image(cohort, slot) for slot in (slots[0], slots[2])}
    assert [bool(i["reference"]) for i in others.values()] == [
        cohort.settings.algorithm.separate_reference
    ] * 2
    assert all(i["moments"] for i in others.values())
    yield population[1]
    for slot, before in others.items():
        assert_same_image(before, image(cohort, slot))
    now = cohort.base.weights()
    assert base.keys() == now.keys()
    assert all(torch.equal(value, now[name]) for name, value in base.items())


def own(agent):
    return image(agent.cohort, agent.slot)


def equal(first, second, *names):
    """Whether two images agree in some tensors."""
    return all(
        first[name].keys() == second[name].keys()
        and all(torch.equal(v, second[name][k]) for k, v in first[name].items())
        for name in names
    )


def test_clone_makes_one_more_that_is_equal_and_apart(population):
    with only_the_middle_one(population) as agent:
        agent.set_training_mode(False)
        before = own(agent)
        made = agent.clone(index=9)
        assert (made.index, made.steps, made.hparams, made.training) == (9, 1, agent.hparams, False)
        assert made.reference_update_tracker == agent.reference_update_tracker
        assert equal(before, own(made), "actor", "reference", "moments")
        made.set_training_mode(True)
        take(made)
        assert not equal(before, own(made), "actor")
        assert_same_image(before, own(agent))


def test_copy_attributes_copies_all_but_weights(population):
    with only_the_middle_one(population) as agent:
        made = agent.clone()
        perturb(agent.cohort, made.slot)
        agent.hparams = agent.hparams.replace(lr=7e-3)
        agent.state.history.append(Score(0.5, 0.1, 4))
        before = own(made)
        assert GRPO.copy_attributes(agent, made) is made
        assert (made.hparams.lr, made.fitness) == (7e-3, [0.5])
        assert equal(before, own(made), "actor", "reference", "moments")


def test_calls_that_scripts_make_without_training_change_nothing(population):
    with only_the_middle_one(population) as agent:
        before, called = own(agent), []
        assert set(agent.evolvable_attributes()) == {"actor", "optimizer"}
        assert agent.evolvable_attributes()["optimizer"] is agent.state.optimizer
        assert set(agent.evolvable_attributes(networks_only=True)) == {"actor"}
        assert agent.get_policy().active_adapters == [agent.state.adapter]
        assert agent.preprocess_observation(OBS) is OBS
        assert_same_image(before, own(agent))
        agent.register_mutation_hook(lambda: called.append(1))
        for slot in population.slots:
            population.cohort.mutated(slot)
        assert called == [1]


def test_get_state_dim_and_get_action_dim_are_the_size_of_a_space(shared):
    with only_the_middle_one(shared) as agent:
        assert agent.get_action_dim(SimpleNamespace(n=5)) == (5,)
        assert agent.get_state_dim(SimpleNamespace(shape=(2, 3))) == (2, 3)
        assert agent.get_state_dim(SimpleNamespace(n=np.array([2, 3]))) == (2, 3)
        assert agent.get_state_dim(SimpleNamespace(nvec=np.array([[2, 3], [4, 5]]))) == (2, 3, 4, 5)


def test_inspect_attributes_tells_arguments_and_state(shared):
    with only_the_middle_one(shared) as agent:
        before = own(agent)
        seen = GRPO.inspect_attributes(agent)
        assert (seen["index"], seen["steps"], seen["lr"]) == (1, 1, agent.hparams.lr)
        assert "steps" not in GRPO.inspect_attributes(agent, input_args_only=True)
        assert_same_image(before, own(agent))


def test_learn_moves_the_agent_and_not_its_reference(population):
    with only_the_middle_one(population) as agent:
        before = own(agent)
        assert take(agent)["failed"] == 0
        assert not equal(before, own(agent), "actor")
        assert not equal(before, own(agent), "moments")
        assert equal(before, own(agent), "reference")


def test_load_builds_an_agent_over_a_base_of_its_own(population, tmp_path):
    with only_the_middle_one(population) as agent:
        agent.save_checkpoint(tmp_path)
        before = own(agent)
        made = GRPO.load(tmp_path)
        assert made.cohort is not agent.cohort
        assert equal(before, own(made), "actor", "reference", "moments")
        assert (made.hparams, made.steps) == (agent.hparams, 1)
        assert made.reference_update_tracker == agent.reference_update_tracker
        take(made)
        assert_same_image(before, own(agent))


@pytest.mark.parametrize("load_optimizer", [False, True])
def test_load_checkpoint_brings_the_agent_back(population, tmp_path, load_optimizer):
    with only_the_middle_one(population) as agent:
        before = own(agent)
        agent.save_checkpoint(tmp_path)
        take(agent)
        agent.hparams = agent.hparams.replace(lr=7e-3)
        agent.load_checkpoint(tmp_path, load_optimizer=load_optimizer)
        assert equal(before, own(agent), "actor", "reference")
        assert before["state"] == own(agent)["state"]
        assert equal(before, own(agent), "moments") is load_optimizer
        assert load_optimizer or own(agent)["moments"] == {}


def test_load_checkpoint_merges_lora_configurations(population, tmp_path):
    wide = agilerl_agents(1, lora_config=lora(rank=5))[0]
    take(wide)
    wide.save_checkpoint(tmp_path)
    with only_the_middle_one(population) as agent:
        before = own(agent)
        with pytest.raises(CheckpointError, match="pass merge_lora_configs=True"):
            agent.load_checkpoint(tmp_path)
        assert_same_image(before, own(agent))
        agent.load_checkpoint(tmp_path, load_optimizer=True, merge_lora_configs=True)
        assert own(agent)["rank"] == 5
        assert equal(own(wide), own(agent), "actor", "moments")
        take(agent)
        assert not equal(own(wide), own(agent), "actor")
        # Its rank is another than the population's now; a clone has the same.
        made = agent.clone()
        assert equal(own(agent), own(made), "actor", "reference", "moments")


def test_the_loaded_actor_becomes_the_reference_of_a_chain(tmp_path):
    first = agilerl_agents(1, use_separate_reference_adapter=False)[0]
    take(first)
    first.save_checkpoint(tmp_path)
    population = agilerl_agents(3, use_separate_reference_adapter=True)
    for agent in population:
        take(agent)
    with only_the_middle_one(population) as agent:
        agent.load_checkpoint(tmp_path)
        assert equal({"reference": own(first)["actor"]}, own(agent), "reference")


class Wrapper:
    """What a user may put around an agent: passes everything on, and counts."""

    def __init__(self, agent, tag):
        self.agent, self.tag, self.calls = agent, tag, 0

    def __getattr__(self, name):
        return getattr(self.agent, name)

    def get_action(self, obs):
        self.calls += 1
        return self.agent.get_action(obs)


@pytest.mark.slow
@pytest.mark.parametrize("separate", [False, True])
def test_population_wraps_agents_without_changing_a_bit(separate):
    given = {"use_separate_reference_adapter": separate, "beta": 0.05}
    plain = agilerl_agents(3, **given)
    wrapped = agilerl_agents(3, wrapper_cls=Wrapper, wrapper_kwargs={"tag": "x"}, **given)
    assert [(w.tag, type(w), w.slot) for w in wrapped] == [("x", Wrapper, i) for i in range(3)]
    assert wrapped.slots == [0, 1, 2]
    for population in (plain, wrapped):
        for agent in population:
            if separate:
                agent.set_reference_policy(1)
            take(agent)
        with only_the_middle_one(population) as agent:
            take(agent)
        population.train(
            "sums", rounds=1, steps_per_round=1, fitness={"prompts": 4}, progress=False
        )
    assert [w.calls for w in wrapped] == [1, 2, 1]
    for slot in range(3):
        assert_same_image(image(plain.cohort, slot), image(wrapped.cohort, slot))


def test_reinit_optimizers_forgets_the_moments(population):
    with only_the_middle_one(population) as agent:
        before = own(agent)
        agent.reinit_optimizers()
        assert own(agent)["moments"] == {}
        assert equal(before, own(agent), "actor", "reference")
        assert agent.hparams == before["state"][0]
        agent.register_network_group(SimpleNamespace(eval_network="actor"))
        take(agent)


@pytest.mark.parametrize("lora_only", [True, False])
@pytest.mark.parametrize("save_optimizer", [True, False])
def test_save_checkpoint_writes_what_was_asked(shared, lora_only, save_optimizer, tmp_path):
    with only_the_middle_one(shared) as agent:
        before = own(agent)
        agent.save_checkpoint(tmp_path, lora_only, save_optimizer)
        assert (tmp_path / "base").is_dir() is not lora_only
        assert (tmp_path / "optimizer.safetensors").is_file() is save_optimizer
        assert (tmp_path / "reference").is_dir() is agent.state.has_reference
        assert_same_image(before, own(agent))


def test_save_checkpoint_says_where_it_cannot_write(shared, tmp_path):
    (tmp_path / "file").touch()
    with only_the_middle_one(shared) as agent:
        for path in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(CheckpointError, match=r"^save_checkpoint: path: .*a file; choose"):
                agent.save_checkpoint(path, lora_only=False)
        with pytest.raises(ConfigError, match=r"^save_checkpoint: path: expected .*got None$"):
            agent.save_checkpoint(None)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_select_adapter_switches_for_a_while(population):
    with only_the_middle_one(population) as agent:
        if not agent.state.has_reference:
            with pytest.raises(ConfigError, match="after a call of set_reference_policy"):
                agent.use_adapter("reference")
            agent.set_reference_policy(1)
        before = own(agent)
        with agent.select_adapter("reference"):
            assert agent.cohort.slots.peft.active_adapters == [agent.state.reference]
        assert agent.cohort.slots.peft.active_adapters == [agent.state.adapter]
        with pytest.raises(KeyError), agent.select_adapter("reference"):
            raise KeyError
        assert agent.cohort.slots.peft.active_adapters == [agent.state.adapter]
        assert_same_image(before, own(agent))


def test_set_reference_policy_freezes_the_present_policy(population):
    with only_the_middle_one(population) as agent:
        with pytest.raises(
            ConfigError, match=r"^reference_update_tracker: expected an integer, got 1.5$"
        ):
            agent.set_reference_policy(1.5)
        agent.set_reference_policy(np.int64(5))  # as JSON can hold it
        assert type(agent.reference_update_tracker) is int
        now = own(agent)
        assert equal(
            {"w": dict(enumerate(now["actor"].values()))},
            {"w": dict(enumerate(now["reference"].values()))},
            "w",
        )
        assert agent.reference_update_tracker == 5
        take(agent)
        agent.set_reference_policy(5)
        assert equal(now, own(agent), "reference")
        assert not equal(now, own(agent), "actor")


def test_set_training_mode_samples_plainly(population):
    with only_the_middle_one(population) as agent:
        agent.set_training_mode(False)
        assert [len(group) for group in agent.get_action(OBS)[0]] == [1]
        assert [one.training for one in population] == [True, False, True]


@pytest.mark.parametrize("loop", [1, 2])
def test_test_appends_to_the_fitness_of_its_agent(population, loop):
    with only_the_middle_one(population) as agent:
        before = own(agent)
        rewards = agent.test(gym(population), loop=loop)
        assert agent.fitness == [pytest.approx(float(np.mean(rewards)))]
        assert equal(before, own(agent), "actor", "reference", "moments")


def test_to_device_moves_what_is_nested(shared):
    with only_the_middle_one(shared) as agent:
        ((one, two),) = agent.to_device((torch.ones(2), {"x": torch.zeros(1)}))
        assert one.device == two["x"].device == agent.cohort.base.device
        (pair,) = agent.to_device(Pair(torch.ones(2), [torch.zeros(1)]))
        assert isinstance(pair, Pair)
        assert pair.second[0].device == agent.cohort.base.device


@pytest.mark.parametrize("schedule", [None, CosineLRScheduleConfig(num_epochs=6)])
def test_update_lr_lasts_and_keeps_the_place_in_the_schedule(schedule):
    updated, assigned = (
        agilerl_agents(3, lr=1e-3, cosine_lr_schedule_config=schedule) for _ in range(2)
    )
    for population in (updated, assigned):
        for agent in population:
            take(agent)
    with only_the_middle_one(updated) as agent:
        optimizer = agent.evolvable_attributes()["optimizer"]
        assert GRPO.update_lr(optimizer, 4e-2) == (None, None)
        assert agent.hparams.lr == 4e-2
        take(agent)
        take(agent)
    assigned[1].hparams = assigned[1].hparams.replace(lr=4e-2)
    take(assigned[1])
    take(assigned[1])
    one, two = own(updated[1]), own(assigned[1])
    assert_same_image(one, two)
    factor = 1.0 if schedule is None else schedule.factor(2)
    assert one["groups"][0]["lr"] == 4e-2 * factor


def test_update_lr_is_saved_cloned_and_reset(population, tmp_path):
    with only_the_middle_one(population) as agent:
        GRPO.update_lr(agent.state.optimizer, 4e-2)
        assert agent.clone().hparams.lr == 4e-2
        agent.save_checkpoint(tmp_path)
        agent.reinit_optimizers()
        assert (agent.hparams.lr, own(agent)["groups"][0]["lr"]) == (4e-2, 4e-2)
        agent.hparams = agent.hparams.replace(lr=1e-3)
        agent.load_checkpoint(tmp_path, load_optimizer=True)
        assert agent.hparams.lr == 4e-2
        take(agent)
        assert agent.hparams.lr == 4e-2
        population.cohort.copy(population.slots[0], population.slots[1])
        # A copy takes weights and moments; hyperparameters are the caller's.
        assert agent.hparams.lr == 4e-2


def test_update_lr_says_what_it_cannot_do(population):
    with only_the_middle_one(population) as agent:
        before, optimizer = own(agent), agent.state.optimizer
        with pytest.raises(ConfigError, match=r"lr: expected a number > 0, got .*0\.01"):
            GRPO.update_lr(optimizer, (1e-2, 1e-2))
        with pytest.raises(ConfigError, match=r"lr: expected a number > 0, got 0\.0"):
            GRPO.update_lr(optimizer, 0.0)
        assert_same_image(before, own(agent))
        with pytest.warns(UserWarning, match="leave scheduler_config out"):
            _, scheduler = GRPO.update_lr(optimizer, 1e-2, None, CosineLRScheduleConfig(9))
        assert scheduler is not None


def test_use_adapter_switches_by_role(population):
    with only_the_middle_one(population) as agent:
        before = own(agent)
        agent.use_adapter("actor")
        assert agent.cohort.slots.peft.active_adapters == [agent.state.adapter]
        if agent.state.has_reference:
            agent.use_adapter("reference")
            assert agent.cohort.slots.peft.active_adapters == [agent.state.reference]
            assert not any(
                p.requires_grad for p in agent.cohort.slots.parameters(agent.state.reference)
            )
        with pytest.raises(ConfigError, match=r"^adapter 'critic': expected 'actor', or"):
            agent.use_adapter("critic")
        assert_same_image(before, own(agent))

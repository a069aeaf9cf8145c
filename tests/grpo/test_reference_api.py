"""Every method of the reference API, called on one agent of three, leaves the others alone."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from text_agents import agents, gym
from torch import nn

from evo_grpo.errors import ConfigError
from evo_grpo.grpo.agent import GRPO
from evo_grpo.grpo.schedule import CosineLRScheduleConfig

OBS = [{"input_ids": torch.tensor([[3, 4, 5]])}]


def take(agent):
    ids, masks = agent.get_action(OBS)
    return agent.learn((ids, masks, [0.0, 1.0, 0.5, 0.2]))


def image(agent):
    """All that belongs to an agent, copied."""
    state, slots = agent.state, agent.cohort.slots
    names = [state.adapter, *([state.reference] if state.has_reference else [])]
    optimizer = state.optimizer.state_dict()
    return {
        "weights": [p.detach().clone() for n in names for p in slots.parameters(n)],
        "moments": [
            v.clone() for _, s in sorted(optimizer["state"].items()) for _, v in sorted(s.items())
        ],
        "plain": (optimizer["param_groups"], state.hparams, state.steps, list(state.history)),
        "more": (state.member, list(state.hooks), agent.training, agent.reference_update_tracker),
    }


def assert_same(first, second):
    for name in ("weights", "moments"):
        assert len(first[name]) == len(second[name])
        assert all(torch.equal(a, b) for a, b in zip(first[name], second[name], strict=True))
    assert first["plain"] == second["plain"]
    assert first["more"] == second["more"]


def clone(p, a, tmp):
    made = a.clone(index=9)
    assert (made.index, made.steps, made.hparams) == (9, a.steps, a.hparams)
    one, two = image(a), image(made)
    assert all(torch.equal(x, y) for x, y in zip(one["weights"], two["weights"], strict=True))
    take(made)


def copy_attributes(p, a, tmp):
    other = a.clone()
    a.hparams = replace(a.hparams, lr=7e-3)
    assert GRPO.copy_attributes(a, other) is other
    assert other.hparams.lr == 7e-3


def attributes(p, a, tmp):
    assert set(a.evolvable_attributes()) == {"actor", "optimizer"}
    assert set(a.evolvable_attributes(networks_only=True)) == {"actor"}
    seen = GRPO.inspect_attributes(a)
    assert (seen["index"], seen["steps"], seen["lr"]) == (1, 1, a.hparams.lr)
    assert "steps" not in GRPO.inspect_attributes(a, input_args_only=True)


def get_action(p, a, tmp):
    assert [len(g) for g in a.get_action(OBS)[0]] == [4]


def dims(p, a, tmp):
    assert a.get_action_dim(SimpleNamespace(n=5)) == (5,)
    assert a.get_state_dim(SimpleNamespace(shape=(2, 3))) == (2, 3)
    with pytest.raises(ConfigError, match="expected a gymnasium space"):
        a.get_state_dim(object())


def policy(p, a, tmp):
    assert a.get_policy().active_adapters == [a.state.adapter]


def learn(p, a, tmp):
    before = image(a)["weights"]
    assert take(a)["failed"] == 0
    after = image(a)["weights"]
    assert any(not torch.equal(x, y) for x, y in zip(before, after, strict=True))


def checkpoints(p, a, tmp):
    a.save_checkpoint(tmp)
    before = image(a)
    take(a)
    a.load_checkpoint(tmp, load_optimizer=True)
    after = image(a)
    for name in ("weights", "moments"):
        assert all(torch.equal(x, y) for x, y in zip(before[name], after[name], strict=True))


def load(p, a, tmp):
    a.save_checkpoint(tmp)
    made = GRPO.load(tmp)
    assert made.cohort is not a.cohort
    assert (made.hparams, made.steps) == (a.hparams, a.steps)


def preprocess(p, a, tmp):
    assert a.preprocess_observation(OBS) is OBS


def hook(p, a, tmp):
    called = []
    a.register_mutation_hook(lambda: called.append(1))
    p.cohort.mutated(a.slot)
    assert called == [1]
    with pytest.raises(ConfigError, match="expected a callable"):
        a.register_mutation_hook(3)


def network_group(p, a, tmp):
    a.register_network_group(SimpleNamespace(eval_network="actor"))
    with pytest.raises(ConfigError, match="'critic'"):
        a.register_network_group("critic")


def reinit(p, a, tmp):
    a.reinit_optimizers()
    assert image(a)["moments"] == []
    with pytest.raises(ConfigError, match="reinit_optimizers"):
        a.reinit_optimizers("other")


def adapters(p, a, tmp):
    a.set_reference_policy(1)
    a.set_reference_policy(1)
    assert a.reference_update_tracker == 1
    with a.select_adapter("reference"):
        assert a.cohort.slots.peft.active_adapters == [a.state.reference]
    a.use_adapter("actor")
    assert a.cohort.slots.peft.active_adapters == [a.state.adapter]
    with pytest.raises(ConfigError, match="GRPO has no critic"):
        a.use_adapter("critic")


def training_mode(p, a, tmp):
    a.set_training_mode(False)
    assert [len(g) for g in a.get_action(OBS)[0]] == [1]


def evaluation(p, a, tmp):
    assert len(a.test(gym(p), loop=1)) > 0
    assert len(a.fitness) == 1


def to_device(p, a, tmp):
    ((one, two),) = a.to_device((torch.ones(2), {"x": torch.zeros(1)}))
    assert one.device == two["x"].device == a.cohort.base.device


def update_lr(p, a, tmp):
    optimizer = a.evolvable_attributes()["optimizer"]
    assert GRPO.update_lr(optimizer, 1e-2) == (None, None)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert GRPO.update_lr(optimizer, 1e-2, None, CosineLRScheduleConfig(9))[1] is not None
    with pytest.raises(ConfigError, match="no critic"):
        GRPO.update_lr(optimizer, (1e-2, 1e-2))


CALLS = [
    clone,
    copy_attributes,
    attributes,
    get_action,
    dims,
    policy,
    learn,
    checkpoints,
    load,
    preprocess,
    hook,
    network_group,
    reinit,
    adapters,
    training_mode,
    evaluation,
    to_device,
    update_lr,
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_call_on_one_agent_leaves_the_others(call, tmp_path):
    population = agents(3)
    for agent in population:
        take(agent)
    before = [image(agent) for agent in population]
    call(population, population[1], tmp_path)
    for index in (0, 2):
        assert_same(before[index], image(population[index]))


@pytest.mark.parametrize("lora_only", [True, False])
@pytest.mark.parametrize("save_optimizer", [True, False])
def test_save_checkpoint_writes_what_was_asked(lora_only, save_optimizer, tmp_path):
    population = agents(3)
    for agent in population:
        take(agent)
    before = [image(agent) for agent in population]
    population[1].save_checkpoint(tmp_path, lora_only, save_optimizer)
    assert (tmp_path / "base").is_dir() is not lora_only
    assert (tmp_path / "optimizer.safetensors").is_file() is save_optimizer
    for old, agent in zip(before, population, strict=True):
        assert_same(old, image(agent))


def test_recompile_marks_modules_without_adapters(monkeypatch):
    seen = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **given: seen.append((self, given)))
    population = agents(3)
    before = [image(agent) for agent in population]
    population[1].recompile()
    assert seen
    for module, given in seen:
        assert given["mode"] == "default"
        assert not any("lora" in name for name, _ in module.named_parameters())
    for old, agent in zip(before, population, strict=True):
        assert_same(old, image(agent))


def test_a_population_may_be_wrapped():
    population = agents(
        3,
        warm=False,
        wrapper_cls=lambda agent, tag: SimpleNamespace(agent=agent, tag=tag),
        wrapper_kwargs={"tag": "x"},
    )
    assert [(w.tag, w.agent.slot) for w in population] == [("x", 0), ("x", 1), ("x", 2)]
    assert population.slots == [0, 1, 2]

"""Agents of one population that differ in rank and modules, after one loaded another adapter."""

import random

import pytest
import torch
from peft import LoraConfig, PeftModel
from tiny_cohort import assert_same_agents, fresh, make_rows, perturb, same, weights
from transformers import AutoModelForCausalLM

from evo_grpo import GRPO, Population
from evo_grpo.analysis.export.export import export
from evo_grpo.learn.rows import AgentBatch
from evo_grpo.model.forward.choice import open_forward
from evo_grpo.model.forward.stacks import RowLayout
from evo_grpo.sources import resolve

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IDS = torch.arange(3, 15)[None]
ROUND = {
    "steps_per_round": 1,
    "fitness": {"prompts": 6, "test_prompts": 4, "test_samples": 1},
    "archive": True,
    "progress": False,
}

pytestmark = pytest.mark.filterwarnings("ignore:merge_lora_configs", "ignore:checkpoint")


def config(rank, modules, alpha):
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(modules), task_type="CAUSAL_LM")


def drawn(seed):
    """Two configurations of unlike ranks and modules, which scale a merged adapter alike."""
    rng = random.Random(seed)
    ranks = rng.sample(range(1, 7), 2)
    theirs, ours = (rng.sample(MODULES, rng.randint(1, 4)) for _ in range(2))
    return config(ranks[0], theirs, 2 * ranks[0]), config(ranks[1], ours, 2 * max(ranks))


def population(lora, size=3):
    return GRPO.population(
        model="tiny-sums",
        lora=lora,
        size=size,
        init="same",
        group_size=4,
        prompts_per_step=2,
        lr=1e-2,
        device="cpu",
    )


def checkpoint(lora, folder):
    """Another agent's checkpoint, and what it makes of some ids."""
    agent = population(lora, size=1)[0]
    perturb(agent.cohort, agent.slot)
    agent.save_checkpoint(folder)
    return hidden(agent)


def merged(seed, folder):
    """A population of three, whose second agent loads a checkpoint of another configuration."""
    theirs, ours = drawn(seed)
    there = checkpoint(theirs, folder)
    agents = population(ours)
    agents[1].load_checkpoint(folder, merge_lora_configs=True)
    return agents, there


@torch.no_grad()
def hidden(agent):
    forward = open_forward(agent.cohort.slots, [agent.state.adapter])
    with forward.rows(RowLayout((agent.state.adapter,), (1,))):
        return forward.hidden_at(IDS, torch.arange(IDS.numel()))


def learn(agents, steps=1):
    for seed in range(steps):
        agents.learn([AgentBatch(a.slot, fresh(make_rows(seed + a.slot))) for a in agents])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_an_agent_of_other_modules_is_cloned_trained_archived_saved_and_loaded(seed, tmp_path):
    agents, there = merged(seed, tmp_path / "other")
    one = agents[1]
    torch.testing.assert_close(hidden(one), there, rtol=1e-5, atol=1e-5)

    # A new agent of the population's own configuration, and one of the merged one.
    assert same(weights(agents.cohort, agents[0].clone().slot), weights(agents.cohort, 0))
    twin = one.clone()
    assert same(weights(agents.cohort, twin.slot), weights(agents.cohort, one.slot))
    learn(agents)
    assert not same(weights(agents.cohort, twin.slot), weights(agents.cohort, one.slot))

    agents.save(tmp_path / "saved")
    again = Population.load(tmp_path / "saved")
    assert_same_agents(agents, again)
    learn(again)


@pytest.mark.parametrize("seed", range(3))
def test_padded_ranks_and_added_modules_learn(seed, tmp_path):
    agents, _ = merged(seed, tmp_path)
    learn(agents, steps=3)
    slots = agents.cohort.slots
    for key, value in slots.state(agents[1].state.adapter).items():
        assert (value != 0).all(), (key, int((value == 0).sum()), value.numel())


def test_a_smaller_adapter_leaves_ranks_that_learn(tmp_path):
    checkpoint(config(2, ["q_proj"], 4), tmp_path)
    agents = population(config(6, ["q_proj"], 12), size=1)
    learn(agents, steps=2)  # what the slot has learned is no part of what is loaded
    agents[0].load_checkpoint(tmp_path, merge_lora_configs=True)
    first = agents.cohort.slots.state("actor_0")
    other = population(config(6, ["q_proj"], 12), size=1)
    other[0].load_checkpoint(tmp_path, merge_lora_configs=True)
    second = other.cohort.slots.state("actor_0")
    assert all(torch.equal(value, first[key]) for key, value in second.items())
    learn(agents, steps=2)
    assert all((v != 0).all() for v in agents.cohort.slots.state("actor_0").values())


@pytest.mark.parametrize("start", [True, "gaussian", "orthogonal", False])
def test_what_a_merge_adds_changes_no_answer_whatever_peft_starts_with(start, tmp_path):
    there = checkpoint(config(2, ["q_proj"], 4), tmp_path)
    ours = config(4, ["q_proj", "v_proj"], 8)
    ours.init_lora_weights = start
    agents = population(ours, size=1)
    agents[0].load_checkpoint(tmp_path, merge_lora_configs=True)
    torch.testing.assert_close(hidden(agents[0]), there, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_unlike_agents_train_in_rounds_with_an_archive_and_are_exported(seed, tmp_path):
    agents, _ = merged(seed, tmp_path / "other")
    agents.train("sums", rounds=2, selection={"kind": "truncation"}, **ROUND)
    assert len(agents.rounds) == 2

    again, _ = merged(seed, tmp_path / "other")
    again.train("sums", rounds=2, out=tmp_path / "run", **ROUND)
    export(tmp_path / "run", tmp_path / "exported")
    base = AutoModelForCausalLM.from_pretrained(resolve("tiny-sums").path)
    network = PeftModel.from_pretrained(base, tmp_path / "exported")
    ranks = {agent.cohort.slots.lora_config(agent.state.adapter).r for agent in again}
    assert network.peft_config["default"].r in ranks

"""Supervised fine-tuning with plain PEFT, then GRPO: by a folder, or by the PeftModel itself."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_cohort import build_model
from transformers import AutoModelForCausalLM

from evo_grpo import GRPO
from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.sources import resolve

IDS = torch.tensor([[12, 13, 14, 15]])
OBS = [{"input_ids": torch.tensor([[10, 11, 12]])}]
pytestmark = pytest.mark.filterwarnings(
    # PEFT 0.21 asks transformers 5 by the old name.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def lora(**changes):
    given = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]} | changes
    return LoraConfig(task_type="CAUSAL_LM", **given)


def fine_tuned(**changes):
    """A few steps of plain supervised fine-tuning."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(resolve("tiny-sums").path)
        peft = get_peft_model(model, lora(**changes))
    optimizer = torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], lr=1e-2)
    rows = torch.randint(10, 60, (4, 12), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        peft(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return peft.eval()


def make(**given):
    named = {} if "model" in given else {"model": "tiny-sums", "lora": lora()}
    settings = {"group_size": 4, "max_output_tokens": 3, "lr": 1e-2, "beta": 0.1}
    settings |= {"update_epochs": 1, "separate_reference": True, "device": "cpu"}
    return GRPO(**{**named, **settings, **given})


@torch.no_grad()
def logits(agent, role="actor"):
    state = agent.state
    agent.cohort.slots.activate(state.adapter if role == "actor" else state.reference)
    return agent.cohort.slots.peft(IDS).logits


@torch.no_grad()
def own_logits(peft):
    return peft(IDS).logits


def step(agent):
    ids, masks = agent.get_action(OBS)
    return agent.learn((ids, masks, [0.0, 1.0, 0.5, 0.2]))


def assert_goes_on(agent, expected):
    """The actor and the reference are what was fine-tuned, and only the actor moves."""
    for role in ("actor", "reference"):
        torch.testing.assert_close(logits(agent, role), expected, atol=1e-5, rtol=1e-5)
    assert step(agent)["kl"] == pytest.approx(0, abs=1e-6)
    assert step(agent)["kl"] > 0
    assert (logits(agent) - expected).abs().max() > 1e-4
    torch.testing.assert_close(logits(agent, "reference"), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("place", ["", "actor"])
@pytest.mark.parametrize("load_optimizer", [False, True])
def test_a_peft_folder_becomes_actor_and_reference(tmp_path, place, load_optimizer):
    peft = fine_tuned()
    expected = own_logits(peft)
    peft.save_pretrained(tmp_path / place)
    agent = make()
    step(agent)
    hparams, steps = agent.hparams, agent.steps
    with pytest.warns(UserWarning, match="a PEFT folder, so its weights are taken alone") as told:
        agent.load_checkpoint(tmp_path, load_optimizer=load_optimizer)
    assert len(told) == 1
    assert "this agent's is" not in str(told[0].message)
    assert (agent.hparams, agent.steps) == (hparams, steps)
    # Moments of other weights would push these ones.
    assert agent.state.optimizer.state_dict()["state"] == {}
    assert_goes_on(agent, expected)
    with pytest.raises(CheckpointError, match=r"build one with GRPO.* and call load_checkpoint"):
        GRPO.load(tmp_path / place)
    # The next stage is an ordinary checkpoint.
    agent.save_checkpoint(tmp_path / "next")
    later = logits(agent)
    assert torch.equal(logits(GRPO.load(tmp_path / "next", device="cpu")), later)


def test_a_peft_folder_is_merged_when_asked_into_actor_and_reference(tmp_path):
    fine_tuned(r=2, lora_alpha=4, target_modules=["q_proj", "k_proj"]).save_pretrained(tmp_path)
    agent = make()
    with pytest.warns(UserWarning, match="a PEFT folder|merge_lora_configs"):
        agent.load_checkpoint(tmp_path, merge_lora_configs=True)
    assert torch.equal(logits(agent), logits(agent, "reference"))
    step(agent)


def test_a_peft_folder_of_another_base_says_so(tmp_path):
    with torch.random.fork_rng([]):
        foods = AutoModelForCausalLM.from_pretrained(resolve("tiny-foods").path)
        get_peft_model(foods, lora()).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="its base is '.*tiny-foods', this agent's is 'tiny-sums'"):
        make().load_checkpoint(tmp_path)


def test_a_folder_that_lost_its_attributes_is_no_peft_folder(tmp_path):
    agent = make()
    step(agent)
    agent.save_checkpoint(tmp_path)
    (tmp_path / "attributes.json").unlink()
    with pytest.raises(CheckpointError, match="is missing; put it back, or load_checkpoint"):
        agent.load_checkpoint(tmp_path)
    with pytest.warns(UserWarning, match="a PEFT folder"):
        agent.load_checkpoint(tmp_path / "actor")


@pytest.mark.parametrize("given", [{}, {"lora": lora()}])
def test_a_peft_model_goes_on_as_an_agent(given):
    peft = fine_tuned()
    expected = own_logits(peft)
    agent = make(model=peft, **given)
    assert agent.cohort.slots.names == ("actor_0", "reference_0")
    assert_goes_on(agent, expected)
    torch.testing.assert_close(logits(agent.clone(), "reference"), expected, atol=1e-5, rtol=1e-5)


def test_a_peft_model_is_taken_apart_and_a_copy_stays():
    peft = fine_tuned()
    kept, expected = copy.deepcopy(peft), own_logits(peft)
    agent = make(model=peft)
    step(agent)
    assert torch.equal(own_logits(kept), expected)
    # What the docstring says of the one that was given.
    assert peft.get_base_model() is agent.cohort.base.model
    assert torch.equal(own_logits(peft), logits(agent))


def test_a_population_begins_with_a_peft_model():
    peft = fine_tuned(r=3, lora_alpha=5, target_modules="all-linear")
    expected = own_logits(peft)
    population = GRPO.population(size=2, model=peft, group_size=4, max_output_tokens=3)
    for agent in population:
        torch.testing.assert_close(logits(agent), expected, atol=1e-5, rtol=1e-5)
        assert agent.cohort.slots.lora_config(agent.state.adapter).r == 3


def test_another_lora_config_than_the_peft_models_is_refused():
    with pytest.raises(
        ConfigError, match=r"adapter of the model: .*r: checkpoint 4, live 2.*; or leave lora out"
    ):
        make(model=fine_tuned(), lora=lora(r=2))


def two_adapters(peft):
    peft.add_adapter("second", lora())
    peft.base_model.set_adapter(["default", "second"])
    return peft


def merged(peft):
    peft.merge_adapter()
    return peft


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda peft: peft.get_base_model(), "already carries adapters.*save_pretrained"),
        (two_adapters, "expected a PeftModel with one active adapter"),
        (merged, "unmerge_adapter"),
        (lambda _: get_peft_model(build_model(), lora(use_dora=True)), "use_dora"),
    ],
)
def test_adapters_that_cannot_be_taken_over_are_left_alone(change, message):
    network = change(fine_tuned())
    before = own_logits(network)
    with pytest.raises(ConfigError, match=message):
        make(model=network)
    assert torch.equal(own_logits(network), before)


def test_the_model_of_another_agent_is_not_taken_apart():
    agent = make()
    before = logits(agent)
    with pytest.raises(ConfigError, match="adapters of an agent"):
        make(model=agent.cohort.slots.peft)
    assert torch.equal(logits(agent), before)

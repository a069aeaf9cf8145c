"""What the KL term holds agents to: the adapter that they start from, or the base."""

import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel
from small_run import Told, small
from tiny_cohort import fresh, make_rows, perturb, same, weights
from transformers import AutoModelForCausalLM

from evo_grpo import GRPO, Population, agilerl, resume, run
from evo_grpo.errors import ConfigError
from evo_grpo.learn.rows import AgentBatch
from evo_grpo.model.forward.stacks import RowLayout
from evo_grpo.record.folder import read_rounds
from evo_grpo.sources import resolve

GIVEN = {
    "model": "tiny-sums",
    "group_size": 4,
    "beta": 0.1,
    "lr": 1e-2,
    "update_epochs": 1,
    "max_output_tokens": 4,
    "hyperparameters": {},
    "device": "cpu",
}
LORA = LoraConfig(
    r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A PEFT folder with an adapter far from the base."""
    folder = tmp_path_factory.mktemp("start")
    agent = GRPO(**GIVEN, lora=LORA)
    perturb(agent.cohort, agent.slot, scale=0.2)
    agent.save_checkpoint(folder)
    return folder / "actor"


def learn(agents, advantage=None, seed=1):
    """One step on the same rows for all; returns the KL of each."""
    batches = []
    for agent in agents:
        rows = fresh(make_rows(seed))
        if advantage is not None:
            for row in rows:
                row.advantage = advantage
        batches.append(AgentBatch(agent.slot, rows))
    return [m["kl"] for m in agents.learn(batches)]


def test_agents_start_at_their_reference_which_is_there_once(start):
    agents = GRPO.population(size=4, adapter=str(start), **GIVEN)
    slots = agents.cohort.slots
    assert sorted(slots.names) == ["actor_0", "actor_1", "actor_2", "actor_3", "start"]
    assert not slots.is_trainable("start")
    assert learn(agents) == pytest.approx([0.0] * 4, abs=1e-10)
    # As it was before: the base with adapters off, where no adapter is given.
    plain = GRPO.population(size=2, lora=LORA, **GIVEN)
    assert sorted(plain.cohort.slots.names) == ["actor_0", "actor_1"]
    for agent in plain:
        perturb(plain.cohort, agent.slot, scale=0.2)
    assert min(learn(plain)) > 0.05


def test_beta_pulls_back_to_the_start_adapter(start):
    agents = GRPO.population(size=2, adapter=str(start), **{**GIVEN, "beta": 1.0, "lr": 3e-3})
    for agent in agents:
        perturb(agents.cohort, agent.slot, scale=0.1)
    found = [sum(learn(agents, advantage=0.0)) for _ in range(40)]
    assert found[0] > 0.01
    assert found[-1] < found[0] / 5


def test_one_slot_for_all_computes_what_a_slot_for_each_does(start):
    shared = GRPO.population(size=3, adapter=str(start), **GIVEN)
    own = GRPO.population(size=3, adapter=str(start), separate_reference=True, **GIVEN)
    for step in range(3):
        assert learn(shared, seed=step) == pytest.approx(learn(own, seed=step), rel=1e-4, abs=1e-9)
    for one, other in zip(shared, own, strict=True):
        torch.testing.assert_close(
            weights(shared.cohort, one.slot), weights(own.cohort, other.slot), rtol=1e-3, atol=1e-4
        )


def test_clones_and_copies_keep_the_reference(start):
    agents = GRPO.population(size=2, adapter=str(start), **GIVEN)
    before = agents.cohort.slots.state("start")
    learn(agents)
    twin = agents[0].clone()
    assert agents.cohort.references.of(twin.state) == "start"
    agents.cohort.freeze_reference(twin.slot)
    assert agents.cohort.references.of(twin.state) == twin.state.reference
    assert agents.cohort.references.of(agents[0].state) == "start"
    after = agents.cohort.slots.state("start")
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_a_saved_agent_keeps_its_reference(start, tmp_path):
    agents = GRPO.population(size=2, adapter=str(start), **GIVEN)
    learn(agents)
    agents[0].save_checkpoint(tmp_path / "one")
    agents.save(tmp_path / "all")
    again = GRPO.load(tmp_path / "one")
    population = Population.load(tmp_path / "all")
    # Into an agent that started from the same adapter it is no other reference: nothing to say.
    agents[1].load_checkpoint(tmp_path / "one")
    with pytest.warns(UserWarning, match="its reference was an adapter of its own, this agent's"):
        GRPO(**GIVEN, lora=LORA).load_checkpoint(tmp_path / "one")
    batch = AgentBatch(again.slot, fresh(make_rows(2)))
    (expected, _), (loaded, _) = learn(agents, seed=2), learn(population, seed=2)
    (found,) = again.cohort.learn([batch], stream=("x",))
    assert expected > 1e-4
    assert (found["kl"], loaded) == pytest.approx((expected, expected), rel=1e-3)


def test_agilerl_has_the_same_reference(start):
    given = {"beta": 0.1, "use_separate_reference_adapter": False, "max_model_len": None}
    base = AutoModelForCausalLM.from_pretrained(resolve("tiny-sums").path)
    network = PeftModel.from_pretrained(base, start)
    (agent,) = agilerl.GRPO.population(1, actor_network=network, **given)
    assert agent.cohort.references.of(agent.state) == "start"
    (plain,) = agilerl.GRPO.population(1, model_name="tiny-sums", **given)
    assert plain.cohort.references.of(plain.state) is None
    with pytest.raises(ConfigError, match="or 'reference' of an agent with use_separate_reference"):
        plain.use_adapter("reference")


def started(start, **changes):
    model = {"name": "tiny-sums", "adapter": str(start)}
    given = {"model": model, "algorithm__beta": 0.05, "population__rounds": 2}
    return small(**given, **changes)


def digests(folder):
    return [[a.adapter_sha256 for a in r.agents] for r in read_rounds(folder)]


def stopped(config, folder):
    with pytest.raises(KeyboardInterrupt):
        run(config, out=folder, observer=Told(("done", 0)))


def test_a_run_is_held_to_its_start_adapter_and_so_is_its_resume(start, tmp_path):
    whole = run(started(start), out=tmp_path / "whole")
    first, *_, last = read_rounds(whole)
    assert max(a.metrics["kl"] for a in first.agents) < 0.05  # 0 in the first of two epochs
    stopped(started(start), tmp_path / "cut")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resume(tmp_path / "cut")
    assert [str(w.message) for w in caught] == []
    assert digests(tmp_path / "cut") == digests(whole)
    # No copy in each checkpoint: the run has the adapter among its inputs.
    place = whole / last.agents[0].checkpoint
    assert not (place / "reference").exists()
    with pytest.warns(UserWarning, match="its reference was the adapter that its agents started"):
        GRPO.load(place)


def test_neighbours_that_share_an_adapter_are_one():
    layout = RowLayout(("a", "a", None, None, "b", "a"), (1, 2, 3, 0, 4, 5)).joined()
    assert layout == RowLayout(("a", None, "b", "a"), (3, 3, 4, 5))


def test_the_same_reference_serves_as_the_modules_compute_it(start):
    """Without the family's own layers, too."""
    agents = GRPO.population(size=3, adapter=str(start), **GIVEN)
    agents.cohort.base.specialized = False
    assert learn(agents) == pytest.approx([0.0] * 3, abs=1e-10)
    assert not same(weights(agents.cohort, 0), list(agents.cohort.slots.parameters("start")))

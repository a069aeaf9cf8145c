"""An agent's state goes along with it, and its adapter follows its rank, alpha and layers."""

from dataclasses import fields

import pytest
import tiny
import torch
from peft import LoraConfig
from tiny_cohort import (
    PLAIN,
    assert_same_image,
    build_cohort,
    fresh,
    image,
    make_rows,
    moments,
    same,
    weights,
)

from evo_grpo.learn.rows import AgentBatch
from evo_grpo.model.llama.departures import departures_of
from evo_grpo.population.checkpoints.read import load_agent
from evo_grpo.population.checkpoints.write import save_agent
from evo_grpo.population.cohort.archive import LastWholeRound, put_into_archive
from evo_grpo.population.cohort.state import COUNTERS, AgentState
from evo_grpo.types import Prompt, Score

UNCLIPPED = PLAIN.replace(max_grad_norm=None, lora_r=4)


def step(cohort, slots, seed):
    batches = [AgentBatch(s, fresh(make_rows(seed))) for s in slots]
    return cohort.learn(batches, stream=("learn", seed))


def trained(hparams=UNCLIPPED, size=1, **settings):
    cohort = build_cohort(size, hparams, **settings)
    for seed in (1, 2):
        step(cohort, range(size), seed)
    return cohort


def rank(cohort, slot, reference=False):
    state = cohort.agents[slot]
    return cohort.slots.lora_config(state.reference if reference else state.adapter).r


def test_an_agent_whose_rank_grew_goes_on_as_it_would_have():
    # The new columns of B are zero, so the step of all that was there before is the same.
    grown, other = trained(), trained()
    grown.set_hparams(0, UNCLIPPED.replace(lora_r=7))
    for cohort in (grown, other):
        step(cohort, [0], seed=3)
    for wide, own in zip(weights(grown, 0), weights(other, 0), strict=True):
        there = wide[tuple(slice(0, size) for size in own.shape)]
        torch.testing.assert_close(there, own, atol=1e-6, rtol=1e-4)


def test_the_moments_of_new_parameters_are_zero():
    cohort = trained()
    before = moments(cohort, 0)
    cohort.set_hparams(0, UNCLIPPED.replace(lora_r=6))
    after = moments(cohort, 0)
    assert after.keys() == before.keys()
    for (place, name), value in after.items():
        own = before[place, name]
        if name == "step":
            assert value == own
            continue
        there = value[tuple(slice(0, size) for size in own.shape)]
        assert torch.equal(there, own)
        assert value.count_nonzero() == own.count_nonzero() < value.numel()


def test_a_change_of_alpha_changes_the_steps_of_b_alone():
    # B is divided by what multiplies the scale; AdamW moves it by the same step as before.
    cohort, other = trained(), trained()
    before = weights(other, 0)
    cohort.set_hparams(0, UNCLIPPED.replace(lora_alpha=32.0))
    for one in (cohort, other):
        step(one, [0], seed=3)
    for scaled, own, begin in zip(weights(cohort, 0), weights(other, 0), before, strict=True):
        factor = 0.25 if own.shape[1] == 4 else 1.0
        expected = begin * factor + (own - begin)
        torch.testing.assert_close(scaled, expected, atol=2e-4, rtol=1e-3)


def test_adamw_starts_afresh_where_a_rank_was_cut_and_the_error_is_kept():
    cohort = trained()
    cohort.set_hparams(0, UNCLIPPED.replace(lora_r=2))
    assert moments(cohort, 0) == {}
    assert 0 < cohort.agents[0].rank_error < 1
    step(cohort, [0], seed=3)
    assert rank(cohort, 0) == 2


def test_copies_and_the_archive_take_the_rank_of_their_source():
    cohort = trained([UNCLIPPED, UNCLIPPED.replace(lora_r=7)], size=2)
    put_into_archive(cohort, 1, Score(0.5, 0.1, 4))
    archive = cohort.archive.slot
    assert rank(cohort, archive) == cohort.archive.hparams.lora_r == 7
    assert same(weights(cohort, archive), weights(cohort, 1))
    cohort.copy(1, 0)
    cohort.set_hparams(0, UNCLIPPED.replace(lora_r=7))
    assert same(weights(cohort, 0), weights(cohort, 1))
    assert moments(cohort, 0).keys() == moments(cohort, 1).keys()


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("r", [2, 8])
def test_a_checkpoint_brings_its_rank_alpha_and_moments(r, merge, tmp_path):
    saved, other = trained(UNCLIPPED.replace(lora_r=r)), trained()
    save_agent(saved, 0, tmp_path / "one")
    load_agent(other, 0, tmp_path / "one", load_optimizer=True, merge_lora_configs=merge)
    assert other.agents[0].hparams.lora_r == rank(other, 0) == r
    assert other.agents[0].rank_error is None
    assert same(weights(saved, 0), weights(other, 0))
    assert all(
        torch.equal(value, moments(other, 0)[key]) for key, value in moments(saved, 0).items()
    )


def test_the_error_of_a_cut_is_of_the_agent_alone_and_not_of_its_copies():
    cohort = trained(size=2)
    cohort.set_hparams(0, UNCLIPPED.replace(lora_r=1))
    cohort.copy(0, 1)
    cohort.set_hparams(1, UNCLIPPED.replace(lora_r=1))
    assert cohort.agents[0].rank_error > 0
    assert cohort.agents[1].rank_error is None


def test_a_reference_keeps_its_rank_and_is_put_back_after_an_interrupted_round():
    cohort = trained([UNCLIPPED, UNCLIPPED.replace(lora_r=6)], size=2)
    cohort.freeze_reference(0)
    cohort.set_hparams(0, UNCLIPPED.replace(lora_r=2))
    assert (rank(cohort, 0), rank(cohort, 0, reference=True)) == (2, 4)
    step(cohort, [0, 1], seed=3)
    kept, before = LastWholeRound(cohort), [image(cohort, slot) for slot in (0, 1)]
    kept.keep([0, 1], 1)
    cohort.copy(0, 1)
    cohort.set_hparams(0, UNCLIPPED.replace(lora_r=8))
    step(cohort, [0, 1], seed=4)
    cohort.freeze_reference(0)
    assert rank(cohort, 0, reference=True) == 8
    kept.put_back()
    assert (rank(cohort, 0), rank(cohort, 0, reference=True), rank(cohort, 1)) == (2, 4, 6)
    for slot, own in enumerate(before):
        assert_same_image(image(cohort, slot), own)
    assert cohort.agents[0].rank_error > 0


def test_layers_with_a_rank_of_their_own_keep_it():
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", rank_pattern={"q_proj": 2})
    cohort = trained(PLAIN, lora=lora)
    cohort.set_hparams(0, PLAIN.replace(lora_r=6))
    ranks = {key: len(v) for key, v in cohort.slots.state("actor_0").items() if "lora_A" in key}
    assert {key: 2 if "q_proj" in key else 6 for key in ranks} == ranks


SETS = {
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "key": ["k_proj"],
    "up": ["up_proj"],
    "mlp": ["gate_proj", "up_proj", "down_proj"],
    "all": "all-linear",
}


def having(name, **changes):
    return UNCLIPPED.replace(lora_target_modules=name, **changes)


def layers(cohort, slot):
    return {name.rpartition(".")[2] for name in cohort.slots.modules(f"actor_{slot}")}


@pytest.mark.parametrize("family", ["modules", "llama"])
def test_agents_of_unequal_ranks_and_layers_learn_in_one_batch_as_each_alone(family):
    # Of the joined layers, q, k and v and gate and up, some agents adapt one, and one adapts none.
    ranks = {"attention": 4, "key": 1, "up": 3, "all": 9}
    hparams = [PLAIN.replace(lora_target_modules=name, lora_r=r) for name, r in ranks.items()]
    cohort = build_cohort(4, hparams, target_sets=SETS)
    alone = build_cohort(4, hparams, target_sets=SETS)
    for one in (cohort, alone):
        one.base.specialized = family == "llama"
    before = [weights(cohort, slot) for slot in range(4)]
    together = step(cohort, [0, 1, 2, 3], seed=1)
    for slot, name in enumerate(ranks):
        (own,) = step(alone, [slot], seed=1)
        assert rank(cohort, slot) == ranks[name]
        assert together[slot]["grad_norm"] == pytest.approx(own["grad_norm"], rel=1e-4)
        after = weights(cohort, slot)
        assert len(after) == 4 * (7 if name == "all" else len(SETS[name]))
        assert not any(torch.equal(a, b) for a, b in zip(after, before[slot], strict=True))
        for mine, its in zip(after, weights(alone, slot), strict=True):
            torch.testing.assert_close(mine, its, atol=3e-4, rtol=1e-3)
    if family == "llama":
        assert not departures_of(cohort.base, cohort.slots.layers)


def test_agents_of_unequal_layers_generate_in_one_batch_as_each_alone():
    hparams = [having(name) for name in ("key", "mlp", "all")]
    cohort = build_cohort(3, hparams, target_sets=SETS, max_output_tokens=5)
    for slot in range(3):
        tiny.stir(cohort.slots, f"actor_{slot}", slot + 1, scale=2.0)
    prompts = [Prompt(i, "", (3 + i, 7, 5)) for i in range(3)]
    together = cohort.generate([0, 1, 2], prompts, stream=("sample", 0))
    assert not departures_of(cohort.base, cohort.slots.layers)
    cohort.base.specialized = False
    for slot in range(3):
        (own,) = cohort.generate([slot], prompts, stream=("sample", 0))
        for groups in zip(own, together[slot], strict=True):
            first, second = ([c.token_ids for c in group.completions] for group in groups)
            assert first == second


def test_an_agent_that_gets_layers_goes_on_as_it_would_have():
    # B of the new layers is zero, so the first step of the others is the same.
    grown, other = (trained(having("attention"), target_sets=SETS) for _ in range(2))
    assert layers(other, 0) == set(SETS["attention"])
    grown.set_hparams(0, having("all"))
    assert grown.agents[0].rank_error is None
    steps = {key: value["step"] for key, value in by_key(grown, 0).items()}
    assert steps.keys() == set(other.slots.shapes("actor_0"))
    for cohort in (grown, other):
        step(cohort, [0], seed=3)
    wide = cohort_state(grown, 0)
    for key, own in cohort_state(other, 0).items():
        torch.testing.assert_close(wide[key], own, atol=1e-6, rtol=1e-4)
    steps = {float(value["step"]) for value in by_key(grown, 0).values()}
    assert steps == {1.0, 3.0}
    assert len(by_key(grown, 0)) == len(wide)


def cohort_state(cohort, slot):
    return cohort.slots.state(f"actor_{slot}")


def by_key(cohort, slot):
    keys, state = list(cohort.slots.shapes(f"actor_{slot}")), cohort.agents[slot].optimizer
    return {keys[place]: own for place, own in state.state_dict()["state"].items()}


def test_an_agent_that_loses_layers_keeps_the_others_with_their_moments():
    cohort = trained(having("all"), target_sets=SETS)
    before, state = by_key(cohort, 0), cohort_state(cohort, 0)
    cohort.set_hparams(0, having("mlp"))
    assert layers(cohort, 0) == set(SETS["mlp"])
    assert 0 < cohort.agents[0].rank_error < 1
    after = by_key(cohort, 0)
    assert after.keys() == cohort_state(cohort, 0).keys()
    for key, value in cohort_state(cohort, 0).items():
        assert torch.equal(value, state[key])
        for name, moment in after[key].items():
            assert torch.equal(moment, before[key][name])


def test_copies_the_archive_checkpoints_and_an_interrupted_round_keep_layers(tmp_path):
    cohort = trained([having("attention"), having("up", lora_r=8)], size=2, target_sets=SETS)
    put_into_archive(cohort, 1, Score(0.5, 0.1, 4))
    archive = cohort.archive.slot
    assert layers(cohort, archive) == {"up_proj"}
    assert same(weights(cohort, archive), weights(cohort, 1))
    kept = LastWholeRound(cohort)
    kept.keep([0, 1], 1)
    before = [image(cohort, slot) for slot in (0, 1)]
    cohort.copy(1, 0)
    cohort.set_hparams(0, having("all", lora_r=8))
    step(cohort, [0, 1], seed=4)
    assert len(weights(cohort, 0)) == 28
    save_agent(cohort, 0, tmp_path / "one")
    image_of_saved = image(cohort, 0)
    kept.put_back()
    for slot, own in enumerate(before):
        assert_same_image(image(cohort, slot), own)
    load_agent(cohort, 1, tmp_path / "one", load_optimizer=True)
    assert cohort.agents[1].hparams.lora_target_modules == "all"
    assert image(cohort, 1)["moments"].keys() == image_of_saved["moments"].keys()
    assert all(
        torch.equal(v, image_of_saved["actor"][k]) for k, v in cohort_state(cohort, 1).items()
    )


@pytest.mark.filterwarnings("ignore:checkpoint", "ignore:merge_lora_configs")
def test_a_peft_folder_brings_its_layers_and_their_name(tmp_path):
    cohort = trained([having("attention"), having("up")], size=2, target_sets=SETS)
    save_agent(cohort, 1, tmp_path / "one")
    load_agent(cohort, 0, tmp_path / "one/actor", merge_lora_configs=True)
    # The union of the layers of both is no set with a name, and stays what the agent has.
    assert cohort.agents[0].hparams.lora_target_modules is None
    assert layers(cohort, 0) == {*SETS["attention"], "up_proj"}
    cohort.set_hparams(0, having("all"))
    load_agent(cohort, 0, tmp_path / "one/actor", merge_lora_configs=True)
    assert cohort.agents[0].hparams.lora_target_modules == "all"


OTHERWISE = {
    "slot": "never changes", "rank": "placed anew", "shard": "dealt anew",
    "_hparams": "given by the caller of a copy", "optimizer": "copied with the weights",
    "member": "given by the caller of a copy", "history": "of the member",
    "rank_error": "of one rank and round", "last": "of one learn call",
    "has_reference": "copied with the weights", "hooks": "of the object",
}  # fmt: skip
"""Fields that are no counters, and why."""


def test_every_field_of_an_agent_is_a_counter_or_is_kept_otherwise():
    assert {field.name for field in fields(AgentState)} == {*OTHERWISE, *COUNTERS}


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_goes_along(name, tmp_path):
    cohort = build_cohort(3)

    def count(slot=0):
        return getattr(cohort.agents[slot], name)

    setattr(cohort.agents[0], name, 7)
    cohort.copy(0, 1)
    assert count(1) == 7, "copied"
    put_into_archive(cohort, 0, Score(0.5, 0.1, 4))
    assert getattr(cohort.archive, name) == 7, "archived"
    whole = LastWholeRound(cohort)
    whole.keep([0, 1, 2], 1)
    setattr(cohort.agents[0], name, 9)
    whole.put_back()
    assert count() == 7, "restored after an interruption"
    save_agent(cohort, 0, tmp_path / "agent")
    load_agent(cohort, 2, tmp_path / "agent", load_optimizer=True)
    assert count(2) == 7, "saved and loaded"

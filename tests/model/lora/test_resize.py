"""Changes of the rank and alpha of a trained adapter."""

import pytest
import tiny
import torch
from products import nearest, updates

from evo_grpo.model.base import SharedBase
from evo_grpo.model.lora.configs import with_targets
from evo_grpo.model.lora.resize import resize_slot, with_rank
from evo_grpo.model.lora.slots import AdapterSlots

IDS = torch.tensor([[3, 7, 11, 2, 30, 5]])


def trained(r, *, dtype=torch.float32, seed=1, **config):
    made = AdapterSlots(SharedBase(tiny.llama().to(dtype)), tiny.lora(r, **config))
    made.add("actor_0")
    tiny.stir(made, "actor_0", seed)
    return made


def resized(slots, r, alpha=None, name="actor_0"):
    config = with_rank(slots.lora_config(name), slots.config, r, alpha)
    return resize_slot(slots, name, config)


def with_layers(slots, layers, r=None, name="actor_0"):
    config = with_targets(slots.lora_config(name), layers)
    return resize_slot(slots, name, with_rank(config, slots.config, r, None))


def logits(slots, name="actor_0"):
    slots.activate(name)
    with torch.no_grad():
        return slots.peft(input_ids=IDS).logits


def norm(tensors):
    return torch.sqrt(sum(one.square().sum() for one in tensors))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("alpha", [None, 3.0])
@pytest.mark.parametrize("rslora", [False, True])
def test_a_rank_that_grows_keeps_the_function(dtype, bound, alpha, rslora):
    slots = trained(3, dtype=dtype, use_rslora=rslora)
    assert slots.parameters("actor_0")[0].dtype == dtype
    before, base, products = logits(slots), logits_of_base(slots), updates(slots, "actor_0")
    assert resized(slots, 8, alpha).error is None
    assert (before - base).abs().max() > 0.1
    assert (logits(slots) - before).abs().max() <= bound
    # Also of each layer alone, since the norms of Llama round to float32.
    for key, product in updates(slots, "actor_0").items():
        assert (product - products[key]).abs().max() <= bound
    assert slots.lora_config("actor_0").r == 8
    for key, value in slots.state("actor_0").items():  # what has grown can learn
        new = value[3:] if "lora_A" in key else value[:, 3:]
        assert bool(new.count_nonzero() == 0) == ("lora_B" in key)


def logits_of_base(slots):
    with slots.peft.disable_adapter(), torch.no_grad():
        return slots.peft(input_ids=IDS).logits


def test_the_scale_is_that_of_the_run_for_all_ranks_and_with_rslora_its_alpha():
    plain, stabilized = trained(4), trained(4, use_rslora=True)
    alpha = plain.config.lora_alpha
    for slots, expected in ((plain, alpha * 2), (stabilized, alpha)):
        resized(slots, 6)
        resized(slots, 8)
        assert slots.lora_config("actor_0").lora_alpha == expected


@pytest.mark.parametrize("alpha", [None, 2.5])
@pytest.mark.parametrize("r", [1, 3, 7])
def test_a_rank_that_shrinks_takes_the_nearest_product_and_tells_the_error(r, alpha):
    slots = trained(8)
    before = updates(slots, "actor_0")
    error = resized(slots, r, alpha).error
    after = updates(slots, "actor_0")
    measured = norm([before[key] - after[key] for key in before]) / norm(before.values())
    assert error == pytest.approx(float(measured), abs=1e-5)
    assert 0 < error < 1
    for key, product in before.items():
        torch.testing.assert_close(after[key], nearest(product, r), atol=1e-5, rtol=1e-4)


def test_the_two_matrices_of_a_cut_adapter_have_equal_norms():
    slots = trained(8)
    resized(slots, 3)
    state = slots.state("actor_0")
    for key in slots.layers:
        a, b = (state[f"{key}.lora_{part}.weight"] for part in "AB")
        torch.testing.assert_close(a.norm(dim=1), b.norm(dim=0), rtol=1e-4, atol=1e-5)


def test_a_cut_to_the_rank_that_is_used_loses_nothing_and_leaves_the_rest_able_to_learn():
    slots = trained(2)
    resized(slots, 8)
    before = logits(slots)
    assert resized(slots, 5).error == pytest.approx(0, abs=1e-6)
    assert (logits(slots) - before).abs().max() <= 1e-5
    for key, value in slots.state("actor_0").items():
        if "lora_A" in key:
            assert (value.norm(dim=1) > 0.1).all()


@pytest.mark.parametrize("r", [2, 6])
def test_an_adapter_that_has_learned_nothing_becomes_a_new_one(r):
    slots = AdapterSlots(SharedBase(tiny.llama()), tiny.lora(4))
    slots.add("actor_0")
    slots.add("actor_1", with_rank(slots.config, slots.config, r, None))
    assert resized(slots, r).error is None
    other = slots.state("actor_1")
    assert all(torch.equal(value, other[key]) for key, value in slots.state("actor_0").items())


@pytest.mark.parametrize("start", [True, "gaussian"])
@pytest.mark.parametrize("rank", [2, 7])
def test_every_way_to_a_rank_draws_what_peft_draws(start, rank):
    own = AdapterSlots(SharedBase(tiny.llama()), tiny.lora(rank, init_lora_weights=start), seed=3)
    own.add("actor_0")
    expected = own.state("actor_0")
    slots = AdapterSlots(SharedBase(tiny.llama()), tiny.lora(4, init_lora_weights=start), seed=3)
    config = tiny.lora(rank, init_lora_weights=start)
    slots.add("actor_0")
    slots.add("added", config)
    slots.add("changed")
    slots.rebuild("changed", config)
    slots.rebuild("changed", tiny.lora(4, init_lora_weights=start))
    first, again = slots.state("actor_0"), slots.state("changed")
    assert all(torch.equal(value, again[key]) for key, value in first.items())
    slots.rebuild("changed", config)
    for name in ("added", "changed"):
        found = slots.state(name)
        assert list(found) == list(expected)
        assert all(torch.equal(value, found[key]) for key, value in expected.items())
        assert slots.lora_config(name).r == rank
    assert all(p.requires_grad for name in slots.names for p in slots.parameters(name))


def test_the_other_slots_stay():
    slots = trained(4)
    slots.add("actor_1")
    tiny.stir(slots, "actor_1", 5)
    before, parameters = slots.state("actor_1"), slots.parameters("actor_1")
    resized(slots, 9)
    resized(slots, 2)
    assert all(torch.equal(value, before[key]) for key, value in slots.state("actor_1").items())
    assert all(a is b for a, b in zip(parameters, slots.parameters("actor_1"), strict=True))


ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("r", [None, 7])
def test_layers_that_are_added_keep_the_function_and_can_learn(dtype, bound, start, r):
    slots = trained(3, dtype=dtype, target_modules=["q_proj", "up_proj"], init_lora_weights=start)
    before, base, products = logits(slots), logits_of_base(slots), updates(slots, "actor_0")
    found = with_layers(slots, [*ATTENTION, *MLP], r)
    assert found.error is None
    assert found.factors.keys() == {
        key for key in slots.shapes("actor_0") if "q_proj" in key or "up_proj" in key
    }
    assert (before - base).abs().max() > 0.1
    assert (logits(slots) - before).abs().max() <= bound
    after = updates(slots, "actor_0")
    assert len(after) == 14
    for key, product in after.items():
        assert (product - products.get(key, 0)).abs().max() <= bound
    for key, value in slots.state("actor_0").items():
        if key not in found.factors:
            assert bool(value.count_nonzero() == 0) == ("lora_B" in key)


@pytest.mark.parametrize("r", [None, 1, 6])
def test_what_a_layer_that_is_left_out_had_learned_is_lost_and_its_share_is_told(r):
    slots = trained(4)
    before = updates(slots, "actor_0")
    found = with_layers(slots, ["v_proj", "down_proj"], r)
    after = updates(slots, "actor_0")
    kept = {key for key in before if key.endswith(("v_proj", "down_proj"))}
    assert after.keys() == kept
    lost = [before[key] - after.get(key, 0) for key in before]
    measured = norm(lost) / norm(before.values())
    assert found.error == pytest.approx(float(measured), abs=1e-5)
    # What stays as it was keeps its moments; a rank that is cut changes the basis.
    assert len(found.factors) == (0 if r == 1 else 2 * len(kept))
    assert slots.modules("actor_0") == {key.removeprefix("base_model.model.") for key in kept}
    assert set(slots.lora_config("actor_0").target_modules) == {"v_proj", "down_proj"}


def test_every_way_to_a_set_of_layers_draws_what_peft_draws():
    config = with_targets(tiny.lora(5), MLP)
    own = AdapterSlots(SharedBase(tiny.llama()), config, seed=3)
    own.add("actor_0")
    slots = AdapterSlots(SharedBase(tiny.llama()), with_targets(tiny.lora(4), ATTENTION), seed=3)
    for name in ("first", "changed"):
        slots.add(name)
    slots.add("added", config)
    slots.add("again", config)
    slots.rebuild("changed", config)
    slots.remove("added")
    slots.add("added", config)
    for name in ("added", "again", "changed"):
        assert list(slots.state(name)) == list(own.state("actor_0"))
        for key, value in own.state("actor_0").items():
            assert torch.equal(value, slots.state(name)[key])
        assert slots.lora_config(name).target_modules == set(MLP)
    assert slots.modules("first").isdisjoint(slots.modules("added"))
    assert all(p.requires_grad for name in slots.names for p in slots.parameters(name))

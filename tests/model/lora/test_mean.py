"""The mean of the products of adapters that may differ in rank, alpha and layers."""

import copy

import tiny
import torch
from products import nearest, updates

from evo_grpo.model.base import SharedBase
from evo_grpo.model.lora.configs import with_targets
from evo_grpo.model.lora.resize import mix_products
from evo_grpo.model.lora.slots import AdapterSlots


def stirred(r=4, wide=6):
    """Slots of rank 4 and 6 and a third one."""
    slots = AdapterSlots(SharedBase(tiny.llama()), tiny.lora(r))
    other = copy.deepcopy(slots.config)
    other.r, other.lora_alpha = wide, 5 * wide
    for name, config, seed in (("first", None, 1), ("second", other, 2), ("mean", None, 3)):
        slots.add(name, config)
        tiny.stir(slots, name, seed)
    return slots


def mixed(slots, *sources):
    mix_products(slots, sources or ("first", "second"), "mean")
    return updates(slots, "mean")


def test_the_mean_of_unequal_ranks_is_the_nearest_of_the_largest_rank():
    slots = stirred()
    first, second = updates(slots, "first"), updates(slots, "second")
    for key, found in mixed(slots).items():
        mean = nearest((first[key] + second[key]) / 2, 6)
        torch.testing.assert_close(found, mean, atol=1e-5, rtol=1e-4)
    assert slots.lora_config("mean").r == 6


def test_the_mean_of_unequal_layers_has_the_layers_of_both():
    attention = with_targets(tiny.lora(4), ["q_proj", "k_proj", "v_proj", "o_proj"])
    slots = AdapterSlots(SharedBase(tiny.llama()), attention)
    other = with_targets(tiny.lora(6, lora_alpha=30), ["v_proj", "up_proj"])
    for slot, config, seed in (("first", None, 1), ("second", other, 2), ("mean", None, 3)):
        slots.add(slot, config)
        tiny.stir(slots, slot, seed)
    first, second = updates(slots, "first"), updates(slots, "second")
    found = mixed(slots)
    assert found.keys() == first.keys() | second.keys()
    assert slots.lora_config("mean").r == 6
    for key, product in found.items():
        mean = nearest((first.get(key, 0) + second.get(key, 0)) / 2, 6)
        torch.testing.assert_close(product, mean, atol=1e-5, rtol=1e-4)


def test_the_mean_does_not_depend_on_how_a_product_is_factored():
    slots = stirred(wide=4)
    before = mixed(slots)
    # The same product with its ranks in the other order.
    turned = {
        key: value.flip(0 if ".lora_A." in key else 1)
        for key, value in slots.state("second").items()
    }
    slots.put("second", turned)
    for key, found in mixed(slots).items():
        torch.testing.assert_close(found, before[key], atol=1e-5, rtol=1e-4)


def test_the_mean_of_what_has_learned_nothing_has_not():
    slots = stirred()
    for name in ("first", "second"):
        state = slots.state(name)
        slots.put(name, {k: v * (".lora_A." in k) for k, v in state.items()})
    assert not any(found.any() for found in mixed(slots).values())


def test_the_mean_keeps_the_size_of_a():
    slots = stirred(wide=4)
    mixed(slots)
    like, own = slots.state("first"), slots.state("mean")
    ratios = [own[key].norm() / like[key].norm() for key in own if "lora_A" in key]
    assert all(0.7 < ratio < 1.5 for ratio in ratios)

"""Operators on slots of adapters."""

import copy

import numpy as np
import pytest
import tiny
import torch
from products import nearest, updates

from evo_grpo.model.base import SharedBase
from evo_grpo.model.lora.recombine.apply import recombine_slots
from evo_grpo.model.lora.recombine.registry import OPERATORS
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.model.lora.target_sets import with_targets


def stirred(r=4, wide=6):
    """Slots of rank 4 and 6 and a third one."""
    slots = AdapterSlots(SharedBase(tiny.llama()), tiny.lora(r))
    other = copy.deepcopy(slots.config)
    other.r, other.lora_alpha = wide, 5 * wide
    for name, config, seed in (("first", None, 1), ("second", other, 2), ("child", None, 3)):
        slots.add(name, config)
        tiny.stir(slots, name, seed)
    return slots


def recombined(slots, name, target="child", seed=0):
    rng = np.random.default_rng(seed)
    recombine_slots(slots, ["first", "second"], target, OPERATORS[name], rng)
    return updates(slots, target)


def test_the_average_of_unequal_ranks_is_the_nearest_of_the_largest_rank():
    slots = stirred()
    first, second = updates(slots, "first"), updates(slots, "second")
    for key, found in recombined(slots, "average").items():
        mean = nearest((first[key] + second[key]) / 2, 6)
        torch.testing.assert_close(found, mean, atol=1e-5, rtol=1e-4)
    assert slots.lora_config("child").r == 6


@pytest.mark.parametrize("name", OPERATORS)
def test_the_child_of_parents_with_unequal_layers_has_the_layers_of_both(name):
    attention = with_targets(tiny.lora(4), ["q_proj", "k_proj", "v_proj", "o_proj"])
    slots = AdapterSlots(SharedBase(tiny.llama()), attention)
    other = with_targets(tiny.lora(6, lora_alpha=30), ["v_proj", "up_proj"])
    for slot, config, seed in (("first", None, 1), ("second", other, 2), ("child", None, 3)):
        slots.add(slot, config)
        tiny.stir(slots, slot, seed)
    first, second = updates(slots, "first"), updates(slots, "second")
    found = recombined(slots, name)
    assert found.keys() == first.keys() | second.keys()
    assert slots.lora_config("child").r == 6
    for key, product in found.items():
        mean = nearest((first.get(key, 0) + second.get(key, 0)) / 2, 6)
        assert name != "average" or torch.allclose(product, mean, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_child_in_the_place_of_a_parent_is_the_same_child(name):
    elsewhere, in_place = recombined(stirred(), name), recombined(stirred(), name, "first")
    assert all(torch.equal(value, in_place[key]) for key, value in elsewhere.items())


def test_each_layer_is_that_of_a_parent_to_the_bit():
    slots = stirred(wide=4)
    slots.lora_config("second").lora_alpha = slots.lora_config("first").lora_alpha
    for layer in slots.layers.values():
        layer.scaling["second"] = layer.scaling["first"]
    recombined(slots, "layer_wise")
    states = {name: slots.state(name) for name in ("first", "second", "child")}
    took = {
        key: [name for name in ("first", "second") if torch.equal(value, states[name][key])]
        for key, value in states["child"].items()
    }
    assert {name for names in took.values() for name in names} == {"first", "second"}
    assert all(took[key] == took[key.replace("lora_A", "lora_B")] for key in took)


@pytest.mark.parametrize("name", ["average", "svd_subspace"])
def test_the_child_keeps_the_size_of_its_parents_a(name):
    slots = stirred(wide=4)
    recombined(slots, name)
    like, own = slots.state("first"), slots.state("child")
    ratios = [own[key].norm() / like[key].norm() for key in own if "lora_A" in key]
    assert all(0.7 < ratio < 1.5 for ratio in ratios)

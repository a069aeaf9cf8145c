"""A digest that tells bases of equal shapes apart."""

import tiny
import torch

from evo_grpo.model.base import SharedBase
from evo_grpo.model.digest import base_digest, comparable_digests
from evo_grpo.model.lora.slots import AdapterSlots


def base(seed=0, dtype=torch.float32, make=tiny.llama):
    return SharedBase(make(seed).to(dtype))


def test_it_follows_the_weights_and_not_the_adapters():
    one = base()
    assert base_digest(base()) == base_digest(one)
    assert base_digest(base(1)) != base_digest(one)
    adapted = base()
    slots = AdapterSlots(adapted, tiny.lora())
    slots.add("actor_0")
    tiny.stir(slots, "actor_0", 3)
    assert base_digest(adapted) == base_digest(one)


def test_float32_and_bfloat16_have_one_digest_and_float16_one_of_its_own_kind():
    whole, short, other = base(), base(dtype=torch.bfloat16), base(dtype=torch.float16)
    assert base_digest(whole) == base_digest(short)
    assert comparable_digests(base_digest(whole), base_digest(short))
    assert not comparable_digests(base_digest(whole), base_digest(other))


def test_it_is_computed_once(monkeypatch):
    made = base()
    first = base_digest(made)
    monkeypatch.setattr(made, "weights", lambda: 1 / 0)
    assert base_digest(made) == first

"""A digest that tells bases of equal shapes apart."""

import tiny
import torch

from evo_grpo.model.base import SharedBase
from evo_grpo.model.fingerprint import comparable, fingerprint
from evo_grpo.model.lora.slots import AdapterSlots


def base(seed=0, dtype=torch.float32, make=tiny.llama):
    return SharedBase(make(seed).to(dtype))


def test_it_follows_the_weights_and_not_the_adapters():
    one = base()
    assert fingerprint(base()) == fingerprint(one)
    assert fingerprint(base(1)) != fingerprint(one)
    adapted = base()
    slots = AdapterSlots(adapted, tiny.lora())
    slots.add("actor_0")
    tiny.stir(slots, "actor_0", 3)
    assert fingerprint(adapted) == fingerprint(one)


def test_tied_weights_count_once():
    assert fingerprint(base(make=tiny.qwen2)) == fingerprint(base(make=tiny.qwen2))


def test_float32_and_bfloat16_have_one_digest_and_float16_one_of_its_own_kind():
    whole, short, other = base(), base(dtype=torch.bfloat16), base(dtype=torch.float16)
    assert fingerprint(whole) == fingerprint(short)
    assert comparable(fingerprint(whole), fingerprint(short))
    assert not comparable(fingerprint(whole), fingerprint(other))


def test_it_is_computed_once(monkeypatch):
    made = base()
    first = fingerprint(made)
    monkeypatch.setattr(made, "weights", lambda: 1 / 0)
    assert fingerprint(made) == first

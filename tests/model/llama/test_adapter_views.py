"""Adapters side by side: shared where they can be, copied where they cannot, never mixed up."""

import pytest
import tiny
import torch
from fused_cases import all_hidden, inputs, scores

from evo_grpo.model.forward.stacks import RowLayout
from evo_grpo.model.llama import adapter_views as module
from evo_grpo.model.llama.adapter_views import adapter_views
from evo_grpo.model.llama.train import LlamaForward
from evo_grpo.model.llama.weights import LlamaWeights


def open_views(slots, adapters):
    return adapter_views(slots, LlamaWeights.of(slots.base, slots.layers), adapters)


def values(slots, name):
    return [p.detach().clone() for p in slots.parameters(name)]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def backward(slots, adapters, counts):
    layout = RowLayout(adapters, counts)
    input_ids, weights = inputs(layout.rows)
    step = LlamaForward(slots, adapters)
    with step.rows(layout):
        (scores(slots.base, all_hidden(step, input_ids), input_ids) * weights).sum().backward()
    step.collect_gradients()


def test_slots_of_one_shape_share_memory_and_keep_their_values():
    slots = tiny.population(tiny.llama(), (4, 4, 4))
    before = [values(slots, name) for name in slots.names]
    shared = open_views(slots, ("a0", "a2"))
    assert shared.adapters == ("a0", "a1", "a2")
    assert [same(values(slots, n), b) for n, b in zip(slots.names, before, strict=True)] == [
        True
    ] * 3
    assert open_views(slots, ("a1",)) is shared
    with torch.no_grad():
        for parameter in slots.parameters("a1"):
            parameter.fill_(7.0)
    for joined in shared.joined.values():
        assert bool((joined.a[1] == 7).all())
        assert all(bool((b[1] == 7).all()) for b in joined.b)
        assert not bool((joined.a[0] == 7).any())


def test_copying_saving_and_loading_go_through(tmp_path):
    slots = tiny.population(tiny.llama(), (4, 4))
    open_views(slots, ("a0", "a1"))
    kept = values(slots, "a0")
    tiny.save(slots, "a0", tmp_path / "a0")
    slots.copy("a1", "a0")
    assert same(values(slots, "a0"), values(slots, "a1"))
    tiny.load(slots, "a0", tmp_path / "a0")
    assert same(values(slots, "a0"), kept)
    slots.peft.save_pretrained(str(tmp_path / "all"))
    assert (tmp_path / "all" / "a1" / "adapter_model.safetensors").is_file()


def test_slots_that_come_and_go_are_laid_out_anew():
    slots = tiny.population(tiny.llama(), (4, 4))
    first = open_views(slots, ("a0",))
    slots.add("a2")
    tiny.stir(slots, "a2", 5)
    kept = {name: values(slots, name) for name in slots.names}
    second = open_views(slots, ("a0",))
    assert second is not first
    slots.remove("a1")
    third = open_views(slots, ("a2",))
    assert third.adapters == ("a0", "a2")
    for name in slots.names:
        assert same(values(slots, name), kept[name])


@pytest.mark.parametrize("case", ["ranks", "frozen", "none"])
def test_others_are_copied(case):
    slots = tiny.population(tiny.llama(), (4, 2) if case == "ranks" else (4, 4))
    adapters = ("a0", "a1")
    if case == "frozen":
        slots.add("frozen", trainable=False)
        adapters = ("a0", "frozen")
    if case == "none":
        adapters = ("a0", None)
    copies = open_views(slots, adapters)
    assert copies.adapters == adapters
    pointers = {p.data_ptr() for name in slots.names for p in slots.parameters(name)}
    assert not any(joined.a.data_ptr() in pointers for joined in copies.joined.values())


def test_only_the_agents_of_a_step_get_gradients():
    slots = tiny.population(tiny.llama(), (4, 4, 4))
    backward(slots, ("a2", "a0"), (1, 2))
    assert all(p.grad is None for p in slots.parameters("a1"))
    assert all(p.grad is not None for p in slots.parameters("a2"))
    expected = [p.grad.clone() for p in slots.parameters("a0")]
    for name in slots.names:
        for parameter in slots.parameters(name):
            parameter.grad = None
    backward(slots, ("a2", "a0"), (1, 2))
    assert same([p.grad for p in slots.parameters("a0")], expected)


def test_an_optimizer_moves_the_shared_memory():
    slots = tiny.population(tiny.llama(), (4, 4))
    optimizer = torch.optim.AdamW(slots.parameters("a0"), lr=0.1, fused=True)
    backward(slots, ("a0", "a1"), (2, 2))
    before = [values(slots, name) for name in slots.names]
    optimizer.step()
    shared = open_views(slots, ("a0", "a1"))
    assert not any(torch.equal(a, b) for a, b in zip(values(slots, "a0"), before[0], strict=True))
    assert same(values(slots, "a1"), before[1])
    first = next(iter(shared.joined.values()))
    assert torch.equal(first.b[0][0], slots.layers[first.parts[0].name].lora_B["a0"].weight)


@pytest.mark.parametrize("most", [0, 1 << 20])
def test_a_step_sees_the_weights_of_its_beginning(monkeypatch, most):
    monkeypatch.setattr(module, "KEPT_ELEMENTS", most)
    slots = tiny.population(tiny.llama(), (4, 4))
    fresh = tiny.population(tiny.llama(), (4, 4))
    for _ in range(2):
        backward(slots, ("a0", "a1"), (2, 2))
        for population in (slots, fresh):
            tiny.stir(population, "a0", 77)
    backward(slots, ("a0", "a1"), (2, 2))
    backward(fresh, ("a0", "a1"), (2, 2))
    for name in slots.names:
        ours = [p.grad for p in slots.parameters(name)]
        assert same(ours, [p.grad for p in fresh.parameters(name)])

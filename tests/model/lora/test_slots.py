import cProfile
import json
import math

import numpy as np
import pytest
import tiny
import torch
from peft import AdaLoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from evo_grpo.errors import ConfigError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.forward.fused import RowLayout, population_forward
from evo_grpo.model.lora.adapter_files import CONFIG, WEIGHTS
from evo_grpo.model.lora.load import plan_adapter
from evo_grpo.model.lora.slots import AdapterSlots


def snapshot(slots, *without):
    """Every bit and every switch of the slots but these."""
    return {
        name: [(p.detach().clone(), p.requires_grad, id(p)) for p in slots.parameters(name)]
        for name in slots.names
        if name not in without
    }


def assert_untouched(slots, before):
    for name, saved in before.items():
        now = slots.parameters(name)
        assert len(now) == len(saved)
        for parameter, (value, trains, identity) in zip(now, saved, strict=True):
            assert torch.equal(parameter, value), f"{name} changed"
            assert parameter.requires_grad == trains, f"{name} was switched"
            # An optimizer holds the parameter itself.
            assert id(parameter) == identity, f"{name} was replaced"


@pytest.fixture
def slots():
    """Three that train, of two ranks, and a frozen reference."""
    out = tiny.population(tiny.llama(), (4, 4, 2))
    out.add("reference", trainable=False)
    tiny.stir(out, "reference", 9)
    return out


@pytest.mark.parametrize("work", ["load", "remove"])
def test_an_agent_costs_the_same_beside_many_others(work, tmp_path):
    def calls(others):
        slots = tiny.population(tiny.llama(), (4,) * (others + 2))
        tiny.save(slots, "a0", tmp_path)
        profile = cProfile.Profile()
        if work == "load":
            profile.runcall(lambda: plan_adapter(slots, "a0", tmp_path).apply())
        else:
            profile.runcall(slots.remove, "a1")
        return sum(one.callcount for one in profile.getstats())

    calls(1)  # fills caches
    assert calls(16) < 1.1 * calls(1)


def logits(slots, name, input_ids):
    layout = RowLayout((name,), (len(input_ids),))
    with torch.no_grad(), population_forward(slots.layers, layout):
        return slots.base.logits(slots.base.hidden(input_ids))


def add_two(slots, folder):
    slots.add("new")
    slots.add("frozen", tiny.lora(8), trainable=False)
    assert all(p.requires_grad for p in slots.parameters("new"))
    assert not any(p.requires_grad for p in slots.parameters("frozen"))


def copy_one(slots, folder):
    ours = slots.parameters("a1")
    slots.copy("a0", "a1")
    assert all(a is b for a, b in zip(ours, slots.parameters("a1"), strict=True))
    assert_equal_weights(slots, "a0", "a1")


def activate_each(slots, folder):
    for name in ("a1", "reference", "a0"):
        slots.activate(name)
        assert slots.peft.active_adapter == name


def save_and_load(slots, folder):
    tiny.save(slots, "a0", folder)
    tiny.load(slots, "a1", folder)
    assert_equal_weights(slots, "a0", "a1")


def load_into_a_frozen_slot(slots, folder):
    tiny.save(slots, "a0", folder)
    tiny.load(slots, "reference", folder)
    assert not any(p.requires_grad for p in slots.parameters("reference"))


def remove_one(slots, folder):
    slots.remove("a0")
    assert slots.names == ("a1", "a2", "reference")
    assert not any(".a0." in name for name, _ in slots.peft.named_parameters())


def remove_the_active_one(slots, folder):
    slots.activate("a0")
    remove_one(slots, folder)


def rebuild_one(slots, folder):
    slots.rebuild("a0", tiny.lora(6))
    assert set(slots.names) == {"a0", "a1", "a2", "reference"}
    assert slots.lora_config("a0").r == 6
    assert all(p.requires_grad for p in slots.parameters("a0"))


def assert_equal_weights(slots, one, other):
    for a, b in zip(slots.parameters(one), slots.parameters(other), strict=True):
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr()
        assert b.requires_grad


@pytest.mark.parametrize(
    ("work", "changed"),
    [
        (add_two, ()),
        (copy_one, ("a1",)),
        (activate_each, ()),
        (save_and_load, ("a1",)),
        (load_into_a_frozen_slot, ("reference",)),
        (remove_one, ("a0",)),
        (remove_the_active_one, ("a0",)),
        (rebuild_one, ("a0",)),
    ],
)
def test_nothing_touches_another_slot_or_the_base(work, changed, slots, tmp_path):
    def base():
        named = slots.base.model.named_parameters()
        return {name: p for name, p in named if "lora_" not in name}

    slots.activate("a1")
    before = snapshot(slots, *changed)
    weights = {name: p.detach().clone() for name, p in base().items()}
    work(slots, tmp_path)
    assert_untouched(slots, before)
    assert not any(p.requires_grad for p in base().values())
    assert all(torch.equal(p, weights[name]) for name, p in base().items())


def test_one_slots_name_may_begin_another_ones(tmp_path):
    """Agent 1 of 12 is no part of agents 10 and 11."""
    slots = tiny.population(tiny.llama(), (2,) * 12)
    state = slots.state("a1")
    assert len(state) == len(slots.parameters("a1")) == len(slots.parameters("a11"))
    own = {p.data_ptr(): p for p in slots.parameters("a1")}
    for value in state.values():
        assert any(torch.equal(value, p) for p in own.values())
    before = snapshot(slots, "a1")
    tiny.save(slots, "a2", tmp_path)
    tiny.load(slots, "a1", tmp_path)
    slots.remove("a1")
    before.pop("a1", None)
    assert_untouched(slots, before)


def test_every_slot_starts_from_the_same_weights_and_moves_no_generator(generator_state):
    slots = AdapterSlots(SharedBase(tiny.llama()), tiny.lora(), seed=3)
    for name in ("one", "two"):
        slots.add(name)
    for a, b in zip(slots.parameters("one"), slots.parameters("two"), strict=True):
        assert torch.equal(a, b)
    other = AdapterSlots(SharedBase(tiny.llama()), tiny.lora(), seed=4)
    other.add("one")
    assert not torch.equal(other.parameters("one")[0], slots.parameters("one")[0])


@pytest.mark.parametrize("changes", [{}, {"lora_dropout": 0.5}, {"use_rslora": True}], ids=str)
@pytest.mark.parametrize("trainable", [True, False])
def test_a_slot_like_the_first_is_what_peft_itself_would_have_added(
    changes, trainable, monkeypatch
):
    made = []
    for by_peft in (False, True):
        slots = AdapterSlots(SharedBase(tiny.llama()), tiny.lora(**changes))
        slots.add("first")
        slots.add("second")
        tiny.stir(slots, "first", 3)
        if by_peft:
            monkeypatch.setattr(slots, "_slot_like", lambda settings: None)
        slots.add("new", trainable=trainable)
        made.append(slots)
    ours, theirs = made
    assert list(ours.state("new")) == list(theirs.state("new"))
    for key, value in ours.state("new").items():
        assert torch.equal(value, theirs.state("new")[key]), key
    assert ours.lora_config("new") == theirs.lora_config("new")
    assert ours.lora_config("new") is not ours.lora_config("second")
    for key, layer in ours.layers.items():
        other = theirs.layers[key]
        for name in ("r", "lora_alpha", "scaling", "use_rslora"):
            assert getattr(layer, name)["new"] == getattr(other, name)["new"]
        assert repr(layer.lora_dropout["new"]) == repr(other.lora_dropout["new"])
        assert not layer.lora_dropout["new"].training
    for slots in made:
        assert {p.requires_grad for p in slots.parameters("new")} == {trainable}
        assert {p.requires_grad for p in slots.parameters("first")} == {True}
    ids = torch.tensor([[3, 5, 7]])
    assert torch.equal(logits(ours, "first", ids), logits(theirs, "first", ids))
    ours.activate("new")
    names = {name for name, _ in ours.peft.named_parameters()}
    assert names == {name for name, _ in theirs.peft.named_parameters()}


def test_the_state_is_a_copy(pair):
    state = pair.state("a0")
    before = {key: value.clone() for key, value in state.items()}
    with torch.no_grad():
        for parameter in pair.parameters("a0"):
            parameter.zero_()
    assert all(torch.equal(state[key], value) for key, value in before.items())


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")  # PEFT, on GPT-2
@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2, tiny.qwen2])
@pytest.mark.parametrize("changes", [{}, {"use_rslora": True, "lora_dropout": 0.5}])
def test_peft_itself_reads_a_saved_slot(build, changes, tmp_path):
    base = tmp_path / "base"
    build().save_pretrained(base)
    slots = tiny.population(SharedBase.load(str(base), tokenizer=object()), (4, 2), **changes)
    input_ids = tiny.ids(3, 6)
    for name in slots.names:
        tiny.save(slots, name, tmp_path / name)
    for name in slots.names:
        model = AutoModelForCausalLM.from_pretrained(base)
        model = PeftModel.from_pretrained(model, tmp_path / name).eval()
        with torch.no_grad():
            theirs = model(input_ids=input_ids).logits
        torch.testing.assert_close(logits(slots, name, input_ids), theirs, atol=1e-5, rtol=1e-5)


def test_a_saved_slot_names_its_base_and_has_float32_over_any_base(tmp_path):
    slots = tiny.population(tiny.llama().to(torch.bfloat16))
    digests = tiny.save(slots, "a0", tmp_path)
    assert tiny.save(slots, "a0", tmp_path / "again") == digests
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["r"], config["inference_mode"]) == (4, True)
    assert config["base_model_name_or_path"] == "tiny"
    assert slots.lora_config("a0").inference_mode is False
    assert {v.dtype for v in load_file(tmp_path / WEIGHTS).values()} == {torch.float32}
    tiny.load(slots, "a1", tmp_path)
    for a, b in zip(slots.parameters("a0"), slots.parameters("a1"), strict=True):
        assert torch.equal(a, b)


def test_pefts_own_forward_does_not_drop_out():
    slots = tiny.population(tiny.llama(), (4,), lora_dropout=0.5)
    slots.activate("a0")
    input_ids = tiny.ids(2, 5)
    with torch.no_grad():
        first = slots.base.hidden(input_ids)
        assert torch.equal(first, slots.base.hidden(input_ids))


class TestRefusedSettings:
    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"use_dora": True}, r"lora.use_dora=True: .*plain LoRA on linear layers \(no varia"),
            ({"lora_bias": True}, r"lora.lora_bias=True: .* leave lora_bias out"),
            ({"bias": "all"}, r"lora.bias='all': .* stay frozen; expected \"none\""),
            ({"modules_to_save": ["lm_head"]}, r"lora.modules_to_save=\['lm_head'\]: agents share"),
            ({"trainable_token_indices": [1]}, r"leave trainable_token_indices out"),
            ({"target_parameters": ["q_proj.weight"]}, r"leave target_parameters out"),
            ({"layer_replication": [(0, 2)]}, r"leave layer_replication out"),
            ({"init_lora_weights": "pissa"}, r"='pissa': it rewrites the base, which every agent"),
            (
                {"lora_alpha": np.float32(8)},
                r"lora: expected what JSON can hold.*float32.*; give",
            ),
            (
                {"lora_alpha": 0},
                r"lora.lora_alpha: expected a number > 0 .*got 0; an update sc",
            ),
            (
                {"lora_alpha": 1e-40},
                r"lora.lora_alpha: expected a number > 0 from 1e-06 to 1e",
            ),
            ({"lora_alpha": math.nan}, r"lora.lora_alpha: expected a number > 0 from .*got nan"),
            ({"alpha_pattern": {"q_proj": 0}}, r"lora.alpha_pattern\['q_proj'\]: expected a numb"),
            ({"rank": 0}, r"lora.r: expected an integer from 1 to 65536, got 0"),
            ({"rank_pattern": {"q_proj": 0}}, r"lora.rank_pattern\['q_proj'\]: expected an integ"),
            ({"lora_dropout": 1.0}, r"lora.lora_dropout: expected a number in \[0, 1\), got 1.0"),
            ({"lora_dropout": math.nan}, r"lora.lora_dropout: expected a number in \[0, 1\), got"),
            (
                {"target_modules": ["q_prj"]},
                r"target_modules: \{'q_prj'\} names no layer of 't",
            ),
            (
                {"target_modules": ["lm_head"]},
                r"not the output head, .*, got 'lm_head', a L",
            ),
            (
                {"target_modules": r".*(q_proj|lm_head)"},
                r"expected linear layers, and not the o",
            ),
            (
                {"target_modules": ["q_proj", "embed_tokens"]},
                r"got 'model.embed_tokens', a E",
            ),
        ],
    )
    def test_a_setting_is_named_and_leaves_no_trace(self, changes, match):
        self.refused(tiny.lora(**changes), match, False)

    @pytest.mark.parametrize(
        ("config", "match"),
        [
            (tiny.lora(use_dora=True), "lora"),
            (tiny.lora(target_modules=["lm_head"]), "lora"),
            (tiny.lora(target_modules=["q_proj", "embed_tokens"]), "got 'model.embed_tokens'"),
            (AdaLoraConfig(target_modules=["q_proj"], total_step=10), "got peft_type ADALORA"),
        ],
    )
    def test_a_first_setting_leaves_no_trace_either(self, config, match):
        self.refused(config, match, True)

    def refused(self, config, match, first):
        slots = tiny.population(tiny.llama(), () if first else (4, 2))
        input_ids = tiny.ids(2, 5)
        before, shape = snapshot(slots), tiny.shape_of(slots.base.model)
        with pytest.raises(ConfigError, match=match):
            slots.add("bad", config)
        assert "bad" not in slots.names
        assert tiny.shape_of(slots.base.model) == shape
        assert_untouched(slots, before)
        assert not any(".bad." in name for name, _ in slots.base.model.named_parameters())
        # The next one works, and does what it does alone.
        slots.add("good")
        tiny.stir(slots, "good", 5)
        clean = tiny.population(tiny.llama(), ())
        clean.add("good")
        tiny.stir(clean, "good", 5)
        torch.testing.assert_close(
            logits(slots, "good", input_ids), logits(clean, "good", input_ids), atol=0, rtol=0
        )
        assert not any(
            p.requires_grad for n, p in slots.base.model.named_parameters() if "lora_" not in n
        )


class TestRefusedCalls:
    @pytest.mark.parametrize(
        ("call", "message"),
        [
            *(
                (lambda slots, n=n: slots.add(n), r"expected a new name without dots, got '.*'; th")
                for n in ("a0", "", "x.y")
            ),
            *(
                (call, r"no slot 'zz'; expected one of \['a0', 'a1'\]")
                for call in (
                    lambda slots: slots.parameters("zz"),
                    lambda slots: slots.activate("zz"),
                    lambda slots: slots.remove("zz"),
                    lambda slots: slots.snapshot("zz"),
                    lambda slots: slots.copy("a0", "zz"),
                    lambda slots: slots.copy("zz", "a0"),
                )
            ),
            (
                lambda slots: [slots.remove(n) for n in ("a0", "a1")],
                "'a1' is the only slot; add",
            ),
        ],
    )
    def test_a_name_that_does_not_fit(self, pair, call, message):
        with pytest.raises(ConfigError, match=message):
            call(pair)

    def test_before_any_slot(self, llama):
        slots = tiny.population(llama, ())
        with pytest.raises(
            ConfigError, match=r"no slot has been added yet; call add\(name\) first"
        ):
            _ = slots.peft


def test_state_is_what_peft_would_save():
    slots = tiny.population(tiny.llama(), (4, 2))
    for name in slots.names:
        theirs = get_peft_model_state_dict(slots.peft, adapter_name=name)
        ours = slots.state(name)
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)

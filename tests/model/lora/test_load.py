"""Loading an adapter whose LoRA configuration differs from the live slot's."""

import json
import shutil
import warnings

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.lora.adapter_files import CONFIG, WEIGHTS
from evo_grpo.model.lora.load import copy_slot, plan_adapter
from evo_grpo.model.lora.slots import AdapterSlots


def slots(config=None, seed=1, **model):
    made = AdapterSlots(SharedBase(tiny.llama(**model)), config or tiny.lora())
    for index, name in enumerate(("actor_0", "actor_1")):
        made.add(name)
        tiny.stir(made, name, seed + index)
    return made


def load_adapter(made, name, folder, merge=False):
    """Plan and apply, with the plan's notes as warnings, as loading an agent does."""
    plan = plan_adapter(made, name, folder, merge=merge)
    for note in plan.notes:
        warnings.warn(note, UserWarning, stacklevel=2)
    plan.apply()


def saved(folder, config=None, **model):
    """A folder with another agent's adapter, and its tensors."""
    other = slots(config, seed=50, **model)
    tiny.save(other, "actor_0", folder)
    return other.state("actor_0")


def states(made):
    return {name: made.state(name) for name in made.names}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, state in first.items():
        assert state.keys() == second[name].keys()
        assert all(torch.equal(value, second[name][key]) for key, value in state.items())


@pytest.mark.parametrize("shared", ["mlp", "up_proj"])
def test_layers_that_two_blocks_share_have_one_name(shared, tmp_path):
    def sharing(targets):
        model = tiny.llama()
        first, second = model.model.layers
        if shared == "mlp":
            second.mlp = first.mlp
        else:
            second.mlp.up_proj = first.mlp.up_proj
        made = AdapterSlots(SharedBase(model), tiny.lora(target_modules=targets))
        made.add("actor_0")
        return made

    other = sharing(".*up_proj")
    tiny.stir(other, "actor_0", 7)
    tiny.save(other, "actor_0", tmp_path)
    made = sharing(["up_proj"])
    load_adapter(made, "actor_0", tmp_path)
    assert made.modules("actor_0") == {"model.layers.0.mlp.up_proj"}
    assert_same({"a": other.state("actor_0")}, {"a": made.state("actor_0")})


def refuse(made, folder, message, merge=False):
    before, config = states(made), made.lora_config("actor_0")
    parameters, names = made.parameters("actor_0"), made.names
    active = made.peft.active_adapters
    with pytest.raises(CheckpointError, match=f"(?s){message}") as caught:
        load_adapter(made, "actor_0", folder, merge=merge)
    assert isinstance(caught.value, ValueError)
    assert_same(before, states(made))
    assert made.lora_config("actor_0") is config
    # The very tensors that an optimizer holds, still trained.
    assert all(a is b for a, b in zip(parameters, made.parameters("actor_0"), strict=True))
    assert all(p.requires_grad for p in parameters)
    assert (made.names, made.peft.active_adapters) == (names, active)


def test_equal_configurations_load_as_they_are(tmp_path):
    theirs, made = saved(tmp_path), slots()
    untouched = made.state("actor_1")
    load_adapter(made, "actor_0", tmp_path)
    assert_same({"actor_0": theirs, "actor_1": untouched}, states(made))


def test_a_mismatch_is_refused_and_names_the_fields(tmp_path):
    saved(tmp_path, tiny.lora(6, lora_alpha=12, target_modules=["q_proj"]))
    named = "r: checkpoint 6, live 4.*target_modules.*lora_alpha: checkpoint 12, live 8.*merge_lora"
    refuse(slots(), tmp_path, named)


@pytest.mark.filterwarnings("ignore:merge_lora_configs")
@pytest.mark.parametrize(("theirs", "ours"), [(2, 4), (6, 4)])
def test_a_merge_takes_the_larger_rank_and_pads_exactly(theirs, ours, tmp_path):
    loaded, made = saved(tmp_path, tiny.lora(theirs)), slots(tiny.lora(ours))
    untouched = made.state("actor_1")
    load_adapter(made, "actor_0", tmp_path, merge=True)
    rank = max(theirs, ours)
    assert made.lora_config("actor_0").r == rank
    for key, value in made.state("actor_0").items():
        rows, columns = loaded[key].shape
        assert value.shape[0 if "lora_A" in key else 1] == rank
        assert torch.equal(value[:rows, :columns], loaded[key])
        # What is added has a random A and B = 0: no answer changes, and a gradient reaches both.
        added = [value[rows:], value[:, columns:]]
        assert all((part != 0).all() if "lora_A" in key else not part.any() for part in added)
    assert_same({"actor_1": untouched}, {"actor_1": made.state("actor_1")})


def test_a_merge_takes_the_union_of_the_modules(tmp_path):
    loaded = saved(tmp_path, tiny.lora(target_modules=["q_proj", "k_proj"]))
    made = slots(tiny.lora(target_modules=["q_proj", "v_proj"]))
    load_adapter(made, "actor_0", tmp_path, merge=True)
    state = made.state("actor_0")
    assert modules(state) == {"q_proj", "k_proj", "v_proj"}
    assert all(torch.equal(state[key], value) for key, value in loaded.items())
    assert not any(v.any() for k, v in state.items() if "v_proj.lora_B" in k)


def test_of_every_other_field_the_live_value_stays_with_a_warning(tmp_path):
    saved(tmp_path, tiny.lora(lora_alpha=32, lora_dropout=0.25, alpha_pattern={"q_proj": 2}))
    made = slots()
    with pytest.warns(UserWarning, match="merge_lora_configs: ") as caught:
        load_adapter(made, "actor_0", tmp_path, merge=True)
    told = [str(w.message) for w in caught]
    fields = ["lora_alpha", "lora_dropout", "alpha_pattern", "the"]
    assert [text.split()[1] for text in told] == fields
    assert "alpha_pattern of the checkpoint is {'q_proj': 2}, the live value {} stays" in told[2]
    assert "was scaled by 8, the merged one is by 2 (from lora_alpha and r)" in told[3]
    assert "acts 0.25 times as strongly" in told[3]
    kept = made.lora_config("actor_0")
    assert (kept.lora_alpha, kept.lora_dropout, kept.alpha_pattern) == (8, 0.0, {})


@pytest.mark.parametrize(
    "given",
    [
        {"rank_pattern": None, "alpha_pattern": None},
        {"megatron_config": 5, "loftq_config": [], "a later release": {}},
        {"init_lora_weights": "loftq"},
    ],
)
def test_what_an_adapter_does_not_compute_with_is_passed_over(given, tmp_path):
    loaded = saved(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | given))
    made = slots()
    load_adapter(made, "actor_0", tmp_path)
    assert_same({"a": made.state("actor_0")}, {"a": loaded})


def with_config(**changes):
    def change(folder):
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | changes))

    return change


def with_tensors(change):
    def changed(folder):
        tensors = load_file(folder / WEIGHTS)
        change(tensors, min(key for key in tensors if "q_proj.lora_A" in key))
        save_file(tensors, folder / WEIGHTS)

    return changed


def truncated(kept):
    return lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:kept])


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, f"{CONFIG} is missing"),
        (lambda folder: (folder / CONFIG).unlink(), f"{CONFIG} is missing; a pickle .* is never"),
        (lambda folder: (folder / WEIGHTS).unlink(), f"{WEIGHTS} is missing; a pickle"),
        (
            lambda folder: torch.save({}, folder / WEIGHTS),
            "not a whole .* a pickle under that",
        ),
        *((truncated(kept), "not a whole safetensors file") for kept in (0, 5, 200, -1)),
        *(
            (lambda folder, text=text: (folder / CONFIG).write_text(text), f"{CONFIG}: not a LoRA")
            for text in ("{", "[]", "{}", '{"peft_type": "NONSENSE"}', "[" * 5000)
        ),
        (with_config(peft_type="LOHA"), f"{CONFIG}: not a LoRA"),
        (with_config(r=10**9), f"{CONFIG}: .* r: .* less than or equal to 65536"),
        (with_config(lora_alpha=float("inf")), f"{CONFIG}: .* lora_alpha.*got inf"),
        (with_config(target_modules=None), "target_modules: expected names .*, got null"),
        (with_config(target_modules="(q_proj"), "target_modules: expected a regular expression"),
        (with_config(r=2), r"lora_A.weight \(2, 48\), got \(4, 48\) of .*; give an adapter of thi"),
        (with_config(target_modules=["q_proj"]), "lora_A.weight none, got .* of torch.float32"),
        (with_tensors(lambda t, key: t.pop(key)), r"lora_A.weight \(4, 32\), got none; give an ad"),
        (
            with_tensors(lambda t, key: t.update(more=t[key].clone())),
            r"as more none, got \(4, 32\)",
        ),
        (with_tensors(lambda t, key: t.update({key: t[key][:-1].clone()})), r"got \(3, 32\) of"),
        (
            with_tensors(lambda t, key: t.update({key: t[key].to(torch.float8_e5m2)})),
            "in 16 bits or more, .* of torch.float8_e5m2",
        ),
    ],
)
def test_damaged_files_are_refused_and_leave_the_slot(change, message, merge, tmp_path):
    saved(tmp_path / "saved")
    change(tmp_path / "saved")
    refuse(slots(tiny.lora(6) if merge else None), tmp_path / "saved", message, merge)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("other", [{"hidden_size": 16}, {"num_hidden_layers": 3}])
def test_an_adapter_of_another_base_is_refused(other, merge, tmp_path):
    saved(tmp_path, tiny.lora(6), **other)
    refuse(slots(), tmp_path, "of the linear layers of 'LlamaForCausalLM' that", merge)


def test_a_merge_that_cannot_be_trained_leaves_the_slot(tmp_path):
    saved(tmp_path, tiny.lora(2))
    made = slots(tiny.lora(4, lora_alpha=1e-6))
    before = states(made)
    made.lora_config("actor_0").lora_alpha = 0
    with pytest.raises(ConfigError, match="lora_alpha: expected a number > 0"):
        load_adapter(made, "actor_0", tmp_path, merge=True)
    assert_same(before, states(made))


def modules(state):
    return {key.split(".")[-3] for key in state}


@pytest.mark.parametrize(
    ("theirs", "ours", "union"),
    [
        (["q_proj"], r".*k_proj", {"q_proj", "k_proj"}),
        (r".*k_proj", ["q_proj"], {"q_proj", "k_proj"}),
        (r".*[qk]_proj", r".*(k|v)_proj", {"q_proj", "k_proj", "v_proj"}),
        (["q_proj"], r".*[qk]_proj", {"q_proj", "k_proj"}),
    ],
)
def test_a_regular_expression_is_merged_by_what_it_matches(theirs, ours, union, tmp_path):
    loaded = saved(tmp_path, tiny.lora(target_modules=theirs))
    made = slots(tiny.lora(target_modules=ours))
    live = made.state("actor_0")
    refuse(made, tmp_path, "target_modules: checkpoint", merge=False)
    load_adapter(made, "actor_0", tmp_path, merge=True)
    state = made.state("actor_0")
    assert modules(state) == union
    assert len(state) == 4 * len(union)
    assert all(torch.equal(state[key], value) for key, value in loaded.items())
    assert all(not state[k].any() for k in live if k not in loaded and "lora_B" in k)
    # What is saved next says the same modules to anyone.
    tiny.save(made, "actor_0", tmp_path / "again")
    other = slots()
    load_adapter(other, "actor_0", tmp_path / "again", merge=True)
    assert all(torch.equal(other.state("actor_0")[key], value) for key, value in loaded.items())


def test_other_words_for_the_same_modules_are_no_difference(tmp_path):
    loaded = saved(tmp_path, tiny.lora(target_modules=["q_proj", "k_proj"]))
    made = slots(tiny.lora(target_modules=r".*\.(q|k)_proj"))
    parameters = made.parameters("actor_0")
    load_adapter(made, "actor_0", tmp_path)
    assert_same({"actor_0": loaded}, {"actor_0": made.state("actor_0")})
    assert all(a is b for a, b in zip(parameters, made.parameters("actor_0"), strict=True))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"rank": 6}, {"rank": 6, "rank_pattern": {"q_proj": 2}}),
        ({"rank_pattern": {"q_proj": 6}}, {}),
    ],
)
def test_a_merge_of_other_rank_patterns_is_refused(theirs, ours, tmp_path):
    saved(tmp_path, tiny.lora(**theirs))
    told = r"expected the live rank_pattern .*, got .* build the agent with the checkpoint's"
    refuse(slots(tiny.lora(**ours)), tmp_path, told, merge=True)


@pytest.mark.filterwarnings("ignore:merge_lora_configs")
def test_a_merge_keeps_one_rank_pattern_of_both(tmp_path):
    pattern = {"rank_pattern": {"q_proj": 2}}
    loaded, made = saved(tmp_path, tiny.lora(3, **pattern)), slots(tiny.lora(6, **pattern))
    load_adapter(made, "actor_0", tmp_path, merge=True)
    for key, value in made.state("actor_0").items():
        rank = 2 if "q_proj" in key else 6
        rows, columns = loaded[key].shape
        assert value.shape[0 if "lora_A" in key else 1] == rank
        assert torch.equal(value[:rows, :columns], loaded[key])


def test_weights_that_are_not_finite_load_with_a_warning(tmp_path):
    saved(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    key = min(tensors)
    save_file(tensors | {key: tensors[key] * float("nan")}, file)
    made = slots()
    with pytest.warns(UserWarning, match=f"{key} holds numbers that are not finite"):
        load_adapter(made, "actor_0", tmp_path)
    assert made.state("actor_0")[key].isnan().all()


def test_a_copy_takes_the_configuration_too(tmp_path):
    saved(tmp_path, tiny.lora(6, target_modules=["q_proj", "k_proj"]))
    made = slots(tiny.lora(4, target_modules=["q_proj", "v_proj"]))
    load_adapter(made, "actor_0", tmp_path, merge=True)
    copy_slot(made, "actor_0", "actor_1")
    assert made.lora_config("actor_1").r == 6
    assert_same({"a": made.state("actor_0")}, {"a": made.state("actor_1")})
    parameters = made.parameters("actor_1")
    copy_slot(made, "actor_0", "actor_1")
    assert all(a is b for a, b in zip(parameters, made.parameters("actor_1"), strict=True))

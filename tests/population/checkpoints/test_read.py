"""An agent on disk: exact when it comes back, and never a pickle."""

import json
import pickle
import shutil
from hashlib import sha256

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
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

from evo_grpo.errors import CheckpointError
from evo_grpo.learn.rows import AgentBatch
from evo_grpo.population.checkpoints.read import load_agent, read_attributes
from evo_grpo.population.checkpoints.write import save_agent, snapshot_agent
from evo_grpo.types import Member, Mutation, Score


def step(cohort, slot, seed):
    return cohort.learn([AgentBatch(slot, fresh(make_rows(seed)))], stream=("learn", seed))


def trained(size=1, steps=2, **settings):
    cohort = build_cohort(size, **settings)
    for slot in range(size):
        for seed in range(steps):
            step(cohort, slot, seed + 10 * slot)
    return cohort


@pytest.mark.parametrize("slot", [0, 1])
def test_a_loaded_agent_goes_on_bit_for_bit(tmp_path, slot):
    cohort = trained(2, hparams=PLAIN.replace(update_epochs=2, beta=0.1, clip_coef=(0.8, 1.3)))
    cohort.agents[1].history = [Score(0.25, 0.1, 4, (0.0, 0.5)), Score(0.5, 0.1, 4, (0.5, 0.5))]
    save_agent(cohort, 1, tmp_path / "a")
    other = build_cohort(2, warm=False)
    attributes = load_agent(other, slot, tmp_path / "a", load_optimizer=True)
    assert attributes["base"] == cohort.base.name
    state = other.agents[slot]
    assert state.hparams == cohort.agents[1].hparams
    assert [g["lr"] for g in state.optimizer.param_groups] == [PLAIN.lr]
    assert state.history == cohort.agents[1].history
    assert state.steps == 2
    assert same(weights(other, slot), weights(cohort, 1))
    before = moments(cohort, 1)
    assert moments(other, slot).keys() == before.keys()
    assert all(torch.equal(v, before[k]) for k, v in moments(other, slot).items())
    for seed in (5, 6):
        rows = make_rows(seed)
        ours = cohort.learn([AgentBatch(1, fresh(rows))], stream=("learn", seed))
        theirs = other.learn([AgentBatch(slot, fresh(rows))], stream=("learn", seed))
        assert ours == theirs
    assert same(weights(other, slot), weights(cohort, 1))


def test_what_is_written_later_is_the_agent_of_the_moment(tmp_path):
    cohort = trained()
    snapshot = snapshot_agent(cohort, 0)
    written = snapshot.write(tmp_path / "at once")
    step(cohort, 0, 5)
    assert snapshot.write(tmp_path / "later") == written
    assert snapshot_agent(cohort, 0).write(tmp_path / "another") != written


def test_loading_changes_no_other_agent(tmp_path):
    cohort = trained(3)
    save_agent(cohort, 0, tmp_path / "a")
    before = weights(cohort, 2), moments(cohort, 2)
    load_agent(cohort, 1, tmp_path / "a", load_optimizer=True)
    assert same(weights(cohort, 0), weights(cohort, 1))
    assert same(weights(cohort, 2), before[0])
    assert all(torch.equal(v, moments(cohort, 2)[k]) for k, v in before[1].items())
    # Loading through PEFT flips requires_grad of the other adapters.
    assert all(p.requires_grad for s in range(3) for p in cohort.slots.parameters(f"actor_{s}"))
    step(cohort, 2, 8)
    assert not same(weights(cohort, 2), before[0])


def test_saving_again_leaves_nothing_of_the_earlier_checkpoint(tmp_path):
    cohort = trained()
    save_agent(cohort, 0, tmp_path / "a")
    assert (tmp_path / "a" / "optimizer.safetensors").is_file()
    save_agent(cohort, 0, tmp_path / "a", save_optimizer=False)
    assert not (tmp_path / "a" / "optimizer.safetensors").exists()


def test_an_agent_that_has_not_learned_yet_has_no_moments_to_miss(tmp_path):
    cohort = build_cohort()
    before = weights(cohort, 0)
    save_agent(cohort, 0, tmp_path / "a")
    step(cohort, 0, 7)
    load_agent(cohort, 0, tmp_path / "a", load_optimizer=True)
    assert same(weights(cohort, 0), before)
    assert moments(cohort, 0) == {}


def test_references_come_back_and_may_be_overwritten(tmp_path):
    cohort = trained(separate_reference=True)
    cohort.freeze_reference(0)
    reference = [p.clone() for p in cohort.slots.parameters("reference_0")]
    step(cohort, 0, 7)
    save_agent(cohort, 0, tmp_path / "a")
    other = build_cohort(separate_reference=True)
    load_agent(other, 0, tmp_path / "a")
    assert same(list(other.slots.parameters("reference_0")), reference)
    assert not any(p.requires_grad for p in other.slots.parameters("reference_0"))
    load_agent(other, 0, tmp_path / "a", overwrite_reference_adapter=True)
    assert same(list(other.slots.parameters("reference_0")), weights(cohort, 0))


def test_a_broken_agent_is_saved_as_it_is(tmp_path):
    cohort = trained()
    with torch.no_grad():
        cohort.slots.parameters("actor_0")[0][0, 0] = float("nan")
    save_agent(cohort, 0, tmp_path / "a")
    other = build_cohort()
    with pytest.warns(UserWarning, match=r"layers.0.*lora_A.weight holds numbers that are not fin"):
        load_agent(other, 0, tmp_path / "a", load_optimizer=True)
    assert other.slots.parameters("actor_0")[0][0, 0].isnan()


def test_attributes_are_json_and_name_the_agent(tmp_path):
    cohort = trained()
    mutation = Mutation("mutate", {"lr": (1e-3, 2e-3)})
    cohort.set_member(0, Member(5, 0, parent=2, born=3, mutation=mutation))
    files = save_agent(cohort, 0, tmp_path / "a")
    data = read_attributes(tmp_path / "a")
    assert data["files"] | {"attributes.json": files["attributes.json"]} == files
    assert data["hparams"] == PLAIN.to_dict()
    assert data["member"]["id"] == 5
    assert data["member"]["parent"] == 2
    assert data["steps"] == 2
    assert not list((tmp_path / "a").rglob("*.pt")) + list((tmp_path / "a").rglob("*.bin"))


ACTOR = "actor/adapter_model.safetensors"
NOT_THAT = "it is not the one that attributes.json names"
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight.exp_avg"


def change_attributes(folder, **changes):
    data = json.loads((folder / "attributes.json").read_text())
    (folder / "attributes.json").write_text(json.dumps(data | changes))


def attributes(**changes):
    return lambda folder: change_attributes(folder, **changes)


def lost(name):
    return lambda folder: (folder / name).unlink()


def text(change):
    file = "attributes.json"
    return lambda folder: (folder / file).write_text(change((folder / file).read_text()))


def cut(name, end):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:end])


def pickle_into(name):
    return lambda folder: (folder / name).write_bytes(pickle.dumps({"lr": 1}))


def tensors(change):
    return lambda folder: save_file(change(load_file(folder / ACTOR)), folder / ACTOR)


def nothing_there(folder):
    for file in sorted(folder.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()


def moments_of(change):
    """As a stranger may, with a digest that is right."""

    def forge(folder):
        file = folder / "optimizer.safetensors"
        save_file(change(load_file(file)), file)
        files = json.loads((folder / "attributes.json").read_text())["files"]
        digest = sha256(file.read_bytes()).hexdigest()
        change_attributes(folder, files=files | {file.name: digest})

    return forge


FEWER_KEYS = tensors(lambda t: dict(list(t.items())[1:]))
INTEGERS = tensors(lambda t: {k: v.int() for k, v in t.items()})
UNLIKE_MOMENTS = moments_of(lambda t: {"0.exp_avg": torch.zeros(3, 3)})


def lose_a_key(whole):
    data = json.loads(whole)
    del data["settings"]
    return json.dumps(data)


def moved_to_pickle(folder):
    (folder / "attributes.json").unlink()
    (folder / "attributes.pt").write_bytes(pickle.dumps({"lr": 1}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (nothing_there, "attributes.json is missing; expected a folder written by"),
        (moved_to_pickle, r"attributes.json is missing; put it back, or load_checkpoint\(.*actor"),
        (
            text(lambda _: "[1]"),
            r"input should be an object, got \[1\]",
        ),
        (pickle_into(ACTOR), "adapter_model.safetensors: not a whole .*or a pickle"),
        (pickle_into("optimizer.safetensors"), f"optimizer.safetensors: {NOT_THAT}"),
        (text(lambda t: t[: len(t) // 2]), "attributes.json: not JSON, it may be truncated"),
        (text(lambda _: "[" * 5000), "attributes.json: not JSON"),
        (attributes(format=99), r"expected format 3, got 99: another version of .*\(.*actor"),
        (text(lose_a_key), "attributes.json: settings: field required, got .*; put the file back"),
        (attributes(vocabulary=77), "vocabulary of 77.*load it over its own base model"),
        (attributes(vocabulary="many"), "attributes.json: vocabulary: .*got 'many'"),
        (attributes(padding=[1]), "attributes.json: padding"),
        (attributes(files={"../x": "0"}), "files.*: expected a path below the folder, got '../x'"),
        (attributes(steps=10**20), "not JSON.*expected an integer of at most 20 digits"),
        (attributes(hparams={"lr": "x"}), "attributes.json: hparams or history .* lr"),
        (lost(ACTOR), "adapter_model.safetensors is missing"),
        (lost("actor/adapter_config.json"), "adapter_config.json is missing"),
        (cut(ACTOR, -20), "adapter_model.safetensors: not a whole safetensors file"),
        (FEWER_KEYS, "got none; give an adapter of this base"),
        (UNLIKE_MOMENTS, r"0.exp_avg of shape \(3, 3\) and torch.float32 does not fit"),
        (moments_of(lambda t: t | {FIRST: t[FIRST].long()}), r"exp_avg .* does not fit"),
        (moments_of(lambda t: {k: v for k, v in t.items() if k != f"{FIRST}_sq"}), "stands alone"),
        (lost("optimizer.safetensors"), f"{NOT_THAT}.*got no file.*or load without load_opt"),
        (attributes(history=[{"mean": 1.0}]), "hparams or history are not what save_checkpoint"),
        (INTEGERS, "in 16 bits or more, .* of torch.int32"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_agent_stays(tmp_path, damage, message):
    cohort = trained(2)
    save_agent(cohort, 0, tmp_path / "a")
    damage(tmp_path / "a")
    before = [image(cohort, slot) for slot in (0, 1)]
    with pytest.raises(CheckpointError, match=message) as caught:
        load_agent(cohort, 1, tmp_path / "a", load_optimizer=True)
    assert str(tmp_path / "a") in str(caught.value)
    for slot in (0, 1):
        assert_same_image(before[slot], image(cohort, slot))


WIDE = LoraConfig(r=6, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
NARROW = LoraConfig(r=3, lora_alpha=8, target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut("reference/adapter_model.safetensors", -20), "reference/.*: not a whole"),
        (FEWER_KEYS, "got none; give an adapter of this base"),
        (UNLIKE_MOMENTS, "optimizer.safetensors: .* does not fit"),
    ],
)
def test_a_merge_is_refused_before_anything_is_touched(tmp_path, damage, message):
    save_agent(trained(lora=WIDE, separate_reference=True), 0, tmp_path / "a")
    damage(tmp_path / "a")
    cohort = trained(2, lora=NARROW, separate_reference=True)
    before = [image(cohort, slot) for slot in (0, 1)]
    names, active = cohort.slots.names, cohort.slots.peft.active_adapters
    with pytest.raises(CheckpointError, match=message):
        load_agent(cohort, 1, tmp_path / "a", load_optimizer=True, merge_lora_configs=True)
    for slot in (0, 1):
        assert_same_image(before[slot], image(cohort, slot))
    assert cohort.slots.names == names
    assert cohort.slots.peft.active_adapters == active
    step(cohort, 1, 5)
    assert image(cohort, 1)["owned"]
    assert not same(weights(cohort, 1), list(before[1]["actor"].values()))


def named_moments(cohort, slot):
    """Moments by the names of the parameters, for agents of unlike modules."""
    names = list(cohort.slots.shapes(cohort.agents[slot].adapter))
    return {(names[i], kind): value for (i, kind), value in moments(cohort, slot).items()}


def lora(rank, *modules):
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(modules))


@pytest.mark.filterwarnings("ignore:merge_lora_configs")
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (lora(4, "v_proj"), lora(4, "k_proj", "v_proj")),
        (lora(4, "k_proj"), lora(4, "v_proj")),
        (lora(3, "v_proj"), lora(5, "k_proj", "v_proj")),
        (lora(5, "q_proj", "v_proj"), lora(3, "v_proj")),
    ],
)
def test_moments_follow_their_parameters_into_a_merge(tmp_path, theirs, ours):
    cohort = trained(lora=theirs)
    save_agent(cohort, 0, tmp_path / "a")
    other = trained(lora=ours)
    load_agent(other, 0, tmp_path / "a", load_optimizer=True, merge_lora_configs=True)
    saved, loaded = named_moments(cohort, 0), named_moments(other, 0)
    # Parameters that the checkpoint does not have start without moments.
    assert loaded.keys() == saved.keys()
    shapes = other.slots.shapes("actor_0")
    for key, value in saved.items():
        wide = loaded[key]
        assert wide.shape == (() if key[1] == "step" else shapes[key[0]])
        assert torch.equal(wide[tuple(slice(0, n) for n in value.shape)], value)
        assert wide.count_nonzero() == value.count_nonzero()
    step(other, 0, 5)
    assert {name for name, _ in named_moments(other, 0)} == set(shapes)
    # Saved half-way, a merged agent may have parameters without moments.
    load_agent(other, 0, tmp_path / "a", load_optimizer=True, merge_lora_configs=True)
    save_agent(other, 0, tmp_path / "b")
    again = named_moments(other, 0)
    load_agent(other, 0, tmp_path / "b", load_optimizer=True)
    assert all(torch.equal(value, again[key]) for key, value in named_moments(other, 0).items())
    assert named_moments(other, 0).keys() == again.keys()


def test_moments_are_read_in_the_order_in_which_all_ranks_exchange_them(tmp_path):
    """DeepSpeed's ranks gather moment by moment; a set's order differs between processes."""
    save_agent(trained(), 0, tmp_path / "a")
    other = build_cohort()
    load_agent(other, 0, tmp_path / "a", load_optimizer=True)
    state = other.agents[0].optimizer.state_dict()["state"]
    assert {tuple(values) for values in state.values()} == {("exp_avg", "exp_avg_sq", "step")}


def test_the_digests_are_those_of_the_files(tmp_path):
    files = save_agent(trained(separate_reference=True), 0, tmp_path / "a")
    there = {p.relative_to(tmp_path / "a").as_posix(): p for p in (tmp_path / "a").rglob("*.*")}
    assert {name: sha256(p.read_bytes()).hexdigest() for name, p in there.items()} == files
    del files["attributes.json"]
    assert read_attributes(tmp_path / "a")["files"] == files
    save_agent(trained(), 0, tmp_path / "b", save_optimizer=False)
    assert "optimizer.safetensors" not in read_attributes(tmp_path / "b")["files"]


def nudge(file):
    tensors = load_file(file)
    name = next(name for name, value in tensors.items() if value.ndim == 2)
    save_file(tensors | {name: tensors[name] + 1e-3}, file, {"format": "pt"})


def retitle(file):
    file.write_text(json.dumps(json.loads(file.read_text()) | {"revision": "other"}))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("actor/adapter_model.safetensors", nudge),
        ("actor/adapter_config.json", retitle),
        ("reference/adapter_model.safetensors", nudge),
        ("optimizer.safetensors", nudge),
    ],
)
def test_a_file_that_was_changed_since_is_refused(tmp_path, name, damage):
    cohort = trained(separate_reference=True)
    save_agent(cohort, 0, tmp_path / "a")
    before = image(cohort, 0)
    damage(tmp_path / "a" / name)
    with pytest.raises(CheckpointError, match=rf"{name}: it is not the one that attributes.json"):
        load_agent(cohort, 0, tmp_path / "a", load_optimizer=True)
    assert_same_image(before, image(cohort, 0))


def test_a_reference_that_is_gone_is_not_replaced_by_the_actor(tmp_path):
    cohort = trained(separate_reference=True)
    save_agent(cohort, 0, tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "reference")
    with pytest.raises(CheckpointError, match=r"reference: expected .* is missing"):
        load_agent(cohort, 0, tmp_path / "a")
    load_agent(cohort, 0, tmp_path / "a", overwrite_reference_adapter=True)

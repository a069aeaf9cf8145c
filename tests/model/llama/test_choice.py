"""Models that are not what their type says: exact by the joined layers, or by their own modules."""

import logging

import altered_llamas
import pytest
import tiny
import torch
from altered_llamas import AFTER, BEFORE, BUILDS, CACHE_ALONE, altered, errors, hub_folder
from torch import nn

from evo_grpo.errors import ModelError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.forward.train import open_forward
from evo_grpo.model.llama.choice import takes_fast_path
from evo_grpo.model.llama.train import LlamaForward
from evo_grpo.rollout.native.ability import Ability, ability_of
from evo_grpo.rollout.native.engine import NativeEngine

NATS = 3e-5
#: What the joined layers take from the model as it is, and what is outside of them.
FAST = {"another_epsilon", "scaled_head", "capped_head", "replaced_norm", "replaced_weight"}
#: Each takes seconds; the second is the same code with a bias.
models = pytest.mark.parametrize("build", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)])


def assert_exact(found, name):
    assert found.sampled < NATS
    assert found.learned < NATS
    assert found.gradient < NATS
    assert found.fast is (name in FAST)


def lines(caplog):
    return [r.getMessage() for r in caplog.records if r.name.startswith("evo_grpo.model.llama")]


@models
@pytest.mark.parametrize("name", BEFORE)
def test_an_altered_model_is_computed_as_it_computes_itself(build, name, monkeypatch, caplog):
    """Sampling with prompts of unequal length, and learning, against the whole model alone."""
    slots = altered(build, BEFORE[name], monkeypatch)
    assert_exact(errors(slots), name)
    said = lines(caplog)
    assert len(said) == (name not in FAST)
    assert all("'tiny'" in line and "by its own modules" in line for line in said)


@pytest.mark.parametrize(
    "build", [b if b == "llama" else pytest.param(b, marks=pytest.mark.slow) for b in BUILDS]
)
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_code_of_a_hub_folder(build, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    assert_exact(errors(hub_folder(build, tmp_path / f"own_{build}")), "hub")


def test_a_value_that_may_change_in_place_is_no_number(monkeypatch):
    def as_tensors(model, patch):
        for layer in model.model.layers:
            layer.self_attn.scaling = torch.tensor(layer.self_attn.scaling)

    slots = altered("llama", as_tensors, monkeypatch)
    assert not errors(slots).fast
    for layer in slots.base.model.model.layers:
        layer.self_attn.scaling.mul_(3)
    assert errors(slots).sampled < NATS


@models
@pytest.mark.parametrize("name", AFTER)
def test_a_model_that_is_altered_under_its_agents(build, name, monkeypatch):
    """The next call notices, with the same engine."""
    slots = tiny.population(BUILDS[build](), (4, 2))
    engine = NativeEngine(slots)
    assert errors(slots, engine).fast
    AFTER[name](slots.base.model, monkeypatch)
    assert_exact(errors(slots, engine), name)


@models
def test_a_model_that_is_altered_once_more_under_its_agents(build, monkeypatch):
    """The first alteration leaves masks alone, the second does not."""
    slots = altered(build, BEFORE["hook_before_one_mlp"], monkeypatch)
    engine = NativeEngine(slots)
    assert_exact(errors(slots, engine), "hook_before_one_mlp")
    AFTER["late_mask"](slots.base.model, monkeypatch)
    assert_exact(errors(slots, engine), "late_mask")


def test_a_linear_layer_that_is_patched_for_all_models_is_called_as_the_head(monkeypatch):
    original = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 1.3 * original(self, x))
    base, ids = SharedBase(tiny.llama()), tiny.ids(1, 12)
    with torch.no_grad():
        logits = base.model(input_ids=ids).logits[0, :-1]
        targets = ids[0, 1:]
        own = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        found, _ = base.token_logprobs(base.hidden(ids)[0, :-1], targets, torch.ones(11))
    assert torch.allclose(found, own, atol=1e-5)


@models
@pytest.mark.parametrize("name", CACHE_ALONE)
def test_a_model_that_decodes_another_function_than_it_trains_is_refused(build, name, monkeypatch):
    """No way of computing both is right."""
    with pytest.raises(ModelError, match=r"cannot decode it|unknown kind"):
        NativeEngine(altered(build, CACHE_ALONE[name], monkeypatch))


def test_tokens_that_depend_on_the_length_of_their_row_are_refused_however_late():
    model = tiny.llama()
    rotary = model.model.rotary_emb
    original = rotary.forward

    def dynamic(x, position_ids):
        long = position_ids.max() >= altered_llamas.LATE
        return original(x, position_ids.float() * (0.5 if long else 1.0))

    rotary.forward = dynamic
    with pytest.raises(ModelError, match=r"expected a causal model, .* change the hidden states"):
        NativeEngine(tiny.population(model))


@models
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_that_is_what_it_says_takes_the_joined_layers(build, dtype, caplog):
    slots = tiny.population(BUILDS[build]().to(dtype), (4, 2))
    assert takes_fast_path(slots.base, slots.layers)
    assert isinstance(open_forward(slots, slots.names), LlamaForward)
    assert ability_of(slots.base, slots.layers) is Ability.ANY_LENGTHS
    assert not lines(caplog)


def test_transformers_own_hooks_are_no_alteration():
    """It leaves them when it is asked for hidden states."""
    model = tiny.llama()
    model(input_ids=tiny.ids(1, 4), output_hidden_states=True, output_attentions=True)
    model.enable_input_require_grads()
    assert any(module._forward_hooks for module in model.modules())
    assert takes_fast_path(SharedBase(model), {})


def test_the_log_says_it_once_for_each_reason(caplog):
    slots = tiny.population(tiny.llama(), (4,))
    caplog.set_level(logging.WARNING)
    assert takes_fast_path(slots.base, slots.layers)
    first = slots.base.trunk.layers[1].mlp.register_forward_hook(lambda *_: None)
    for _ in range(3):
        assert not takes_fast_path(slots.base, slots.layers)
    (line,) = lines(caplog)
    assert line.endswith("model.layers.1.mlp has a forward hook")
    assert line.startswith("model 'tiny' (LlamaForCausalLM): computed by its own modules")
    first.remove()
    assert takes_fast_path(slots.base, slots.layers)
    slots.base.trunk.norm.register_forward_pre_hook(lambda *_: None)
    assert not takes_fast_path(slots.base, slots.layers)
    assert len(lines(caplog)) == 2


def test_what_nothing_would_call_is_refused():
    slots = tiny.population(tiny.llama(), (4,))
    engine = NativeEngine(slots)
    slots.base.model.register_forward_hook(lambda module, args, out: out)
    with pytest.raises(ModelError, match=r"whole model has a forward hook since .* model.model "):
        altered_llamas.sampled_error(slots, engine)


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
def test_logits_that_the_whole_model_changes_late_are_refused(build):
    model = build()

    def late(module, args, kwargs, out):
        out.logits[:, altered_llamas.LATE :] *= 2
        return out

    model.register_forward_hook(late, with_kwargs=True)
    with pytest.raises(ModelError, match="its head is of an unknown kind"):
        SharedBase(model)


def test_a_head_that_tells_positions_apart_is_refused():
    model = tiny.llama()
    late = torch.arange(tiny.CONTEXT)[:, None] >= altered_llamas.LATE

    def scaled(module, args, out):
        return torch.where(late[: out.shape[-2]], out * 2, out)

    model.lm_head.register_forward_hook(scaled)
    with pytest.raises(ModelError, match="its head is of an unknown kind"):
        SharedBase(model)


def test_a_base_that_goes_through_its_modules_anyway_is_not_probed_for_it():
    """As one that is divided among processes."""
    runs = []
    base = SharedBase(tiny.llama())
    base.specialized = False
    entry = base.entry
    base.entry = lambda **inputs: (runs.append(1), entry(**inputs))[1]
    assert ability_of(base, {}) is Ability.ANY_LENGTHS
    assert not runs

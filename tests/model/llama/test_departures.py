"""Models that differ from their type in code or in numbers are computed by their own modules."""

import logging

import altered_llamas
import architectures
import pytest
import tiny
import torch
from altered_llamas import AFTER, BEFORE, BUILDS, CACHE_ALONE, altered, code_of, errors, hub_folder
from torch import nn
from transformers.activations import ACT2FN

from evo_grpo.errors import ModelError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.forward.choice import open_forward
from evo_grpo.model.llama.departures import (
    can_join_layers,
    departures_of,
    find_departures,
    find_difference,
)
from evo_grpo.model.llama.train import LlamaForward
from evo_grpo.model.llama.weights import LlamaWeights
from evo_grpo.rollout.native.ability import Ability, ability_of
from evo_grpo.rollout.native.engine import NativeEngine

NATS = 3e-5
#: What the joined layers take from the model as it is, and what is outside of them.
FAST = {"another_epsilon", "scaled_head", "replaced_norm", "replaced_weight"}
#: Alterations that the numbers do not show, since the joined layers compute them too.
SAME = {
    "another_epsilon", "scaled_head", "late_rotary", "scaled_embedding", "parametrized_weight",
    "pruned_layers",
}  # fmt: skip
#: Alterations that only the numbers show, not the code.
IN_NUMBERS = {"another_epsilon", "scaled_head", "scaling_of_one_attention", "bias_in_one_layer"}
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
    warned = lines(caplog)
    assert len(warned) == (name not in FAST)
    assert all("'tiny'" in line and "by its own modules" in line for line in warned)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_code_of_a_hub_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    assert_exact(errors(hub_folder(tmp_path / "own_llama")), "hub")


@models
@pytest.mark.parametrize("name", AFTER)
def test_a_model_that_is_altered_under_its_agents(build, name, monkeypatch):
    """The next call notices, with the same engine, and so it does after another alteration."""
    slots = tiny.population(BUILDS[build](), (4, 2))
    engine = NativeEngine(slots)
    assert errors(slots, engine).fast
    AFTER[name](slots.base.model, monkeypatch)
    assert_exact(errors(slots, engine), name)
    if name == "hook_on_one_mlp":  # which leaves masks alone
        AFTER["late_mask"](slots.base.model, monkeypatch)
        assert_exact(errors(slots, engine), "late_mask")


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
    assert can_join_layers(slots.base, slots.layers)
    assert isinstance(open_forward(slots, slots.names), LlamaForward)
    assert ability_of(slots.base, slots.layers) is Ability.ANY_LENGTHS
    assert not lines(caplog)


def test_transformers_own_hooks_are_no_alteration():
    """It leaves them when it is asked for hidden states."""
    model = tiny.llama()
    model(input_ids=tiny.ids(1, 4), output_hidden_states=True, output_attentions=True)
    model.enable_input_require_grads()
    assert any(module._forward_hooks for module in model.modules())
    assert can_join_layers(SharedBase(model), {})


def test_the_log_names_each_reason_once(caplog):
    slots = tiny.population(tiny.llama(), (4,))
    caplog.set_level(logging.WARNING)
    assert can_join_layers(slots.base, slots.layers)
    first = slots.base.trunk.layers[1].mlp.register_forward_hook(lambda *_: None)
    for _ in range(3):
        assert not can_join_layers(slots.base, slots.layers)
    (line,) = lines(caplog)
    assert line.endswith("model.layers.1.mlp has a forward hook")
    assert line.startswith("model 'tiny' (LlamaForCausalLM): computed by its own modules")
    first.remove()
    assert can_join_layers(slots.base, slots.layers)
    slots.base.trunk.norm.register_forward_pre_hook(lambda *_: None)
    assert not can_join_layers(slots.base, slots.layers)
    assert len(lines(caplog)) == 2


def late_logits(module, args, out):
    logits = getattr(out, "logits", out)
    late = torch.arange(tiny.CONTEXT)[: logits.shape[-2], None] >= altered_llamas.LATE
    logits.copy_(torch.where(late, logits * 2, logits))
    return out


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
@pytest.mark.parametrize("part", [lambda model: model, lambda model: model.lm_head])
def test_a_model_or_head_that_changes_late_logits_is_refused(build, part):
    model = build()
    part(model).register_forward_hook(late_logits)
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


@pytest.mark.parametrize("name", [*BEFORE, *CACHE_ALONE])
def test_an_alteration_shows_in_numbers_or_in_code(name, monkeypatch):
    """Also a late one, or one in a single layer; the code is inspected without running it."""
    model = tiny.llama()
    base = SharedBase(model)
    {**BEFORE, **CACHE_ALONE}[name](model, monkeypatch)
    if name in BEFORE:
        assert (find_difference(SharedBase(model), {}) is None) is (name in SAME)
    base.entry = None
    assert (not find_departures(base)) is (name in IN_NUMBERS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_a_small_difference_of_one_layer_shows_in_any_dtype(build, dtype):
    """One that drowns in the rounding of half precision."""
    model = build(num_hidden_layers=6).to(dtype)
    base = SharedBase(model)
    assert find_difference(base, {}) is None
    model.model.layers[3].mlp.register_forward_hook(lambda module, args, out: out * 1.002)
    assert find_difference(base, {}).startswith("layer 3 differs by ")


def of_class(module, forward):
    """Give a module a subclass with another forward, which gets the class's own first."""
    kind = type(module)
    module.__class__ = type("Other", (kind,), {"forward": lambda self, *a: forward(self, *a)})


@pytest.mark.parametrize(
    ("name", "alter", "departure"),
    [
        (
            "qwen3",
            lambda layers: layers[1].self_attn.k_norm.register_forward_hook(lambda *a: 2 * a[-1]),
            "layers.1.self_attn.k_norm has a forward hook",
        ),
        (
            "olmo2",
            lambda layers: of_class(layers[0].self_attn.q_norm, lambda self, x: x * self.weight),
            "layers.0.self_attn.q_norm is a ",
        ),
        (
            "smollm3",
            lambda layers: setattr(layers[1].self_attn, "use_rope", 1),
            "layer 1 differs by ",
        ),
        (
            "granite",
            lambda layers: setattr(layers[1], "residual_multiplier", 0.7),
            "layer 1 differs by ",
        ),
        (
            "gemma3",
            lambda layers: setattr(layers[0].mlp, "act_fn", nn.GELU()),
            "layers.0.mlp.act_fn is a ",
        ),
        (
            "qwen3",
            lambda layers: setattr(layers[0].mlp, "act_fn", ACT2FN["gelu_pytorch_tanh"]),
            "layer 0 differs by ",
        ),
        (
            "olmo3",
            lambda layers: setattr(layers[0].self_attn, "sliding_window", 5),
            "one of its layers has a window of 5, not 6",
        ),
    ],
)
def test_what_a_family_computes_otherwise_is_noticed_at_the_next_call(name, alter, departure):
    model = architectures.FAMILIES[name]()
    base = SharedBase(model)
    assert not departures_of(base, {})
    alter(model.model.layers)
    assert departure in departures_of(base, {})[0]
    if name != "olmo3":  # whose window other attentions than sdpa read
        assert find_difference(base, {}) is not None


def test_another_factor_of_the_embeddings_shows_in_the_numbers():
    base = SharedBase(architectures.granite())
    assert not departures_of(base, {})
    base.trunk.embedding_multiplier = 2.0
    assert departures_of(base, {})[0].startswith("what comes before layer 0 differs by ")


@pytest.mark.parametrize("name", ["mistral-window", "olmo3", "gemma3"])
def test_a_window_that_is_not_there_shows_in_the_numbers(name, monkeypatch):
    """The function in the place of that of the window is transformers' own."""
    model = architectures.FAMILIES[name]()
    code = code_of(model)
    monkeypatch.setattr(code, "create_sliding_window_causal_mask", code.create_causal_mask)
    assert find_difference(SharedBase(model), {}).startswith("layer 0 differs")


def test_a_comparison_leaves_nothing_behind_and_joins_weights_once():
    base = SharedBase(tiny.llama())
    weights = {name: p.clone() for name, p in base.model.named_parameters()}
    state = torch.get_rng_state()
    assert find_difference(base, {}) is None
    assert torch.equal(state, torch.get_rng_state())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in base.model.modules())
    for name, parameter in base.model.named_parameters():
        assert torch.equal(parameter, weights[name])
        assert parameter.grad is None
        assert not parameter.requires_grad
    before = LlamaWeights.of(base, {}).layers[0].qkv.weight
    slots = tiny.population(base, (4,))
    joined = LlamaWeights.of(base, slots.layers)
    assert joined.layers[0].qkv.weight.data_ptr() == before.data_ptr()
    query = base.trunk.layers[0].self_attn.q_proj.base_layer.weight
    assert query.data_ptr() == before.data_ptr()
    assert LlamaWeights.of(base, slots.layers) is joined


def test_a_model_that_does_not_run_differs_but_a_lack_of_memory_is_raised():
    base = SharedBase(tiny.llama())

    def failing(**_):
        raise error

    base.entry = failing
    error = RuntimeError("no kernel")
    assert find_difference(base, {}) == "one of the two does not run: RuntimeError: no kernel"
    error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        find_difference(base, {})


@pytest.mark.parametrize(
    "around", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_what_surrounds_the_call_changes_nothing(around):
    base = SharedBase(tiny.llama())
    with around():
        assert find_difference(base, {}) is None

"""The numbers alone, where the code has been found to be transformers' own."""

import architectures
import pytest
import tiny
import torch
from altered_llamas import BEFORE, BUILDS, CACHE_ALONE, code_of
from transformers.activations import ACT2FN

from evo_grpo.model.base import SharedBase
from evo_grpo.model.llama.choice import departures_of, find_departures, find_difference
from evo_grpo.model.llama.weights import LlamaWeights

#: What the joined layers compute too, or what is outside of them.
SAME = {
    "another_epsilon",
    "scaled_head",
    "capped_head",
    "late_rotary",
    "scaled_embedding",
    "parametrized_weight",
}
#: What only the numbers show.
IN_NUMBERS = {
    "another_epsilon",
    "scaled_head",
    "capped_head",
    "scaling_of_one_attention",
    "bias_in_one_layer",
}


@pytest.mark.parametrize("name", BEFORE)
def test_what_a_model_computes_otherwise_shows_in_its_numbers(name, monkeypatch):
    """Late and in one layer too."""
    model = tiny.llama()
    BEFORE[name](model, monkeypatch)
    difference = find_difference(SharedBase(model), {})
    assert (difference is None) is (name in {*SAME, "pruned_layers"}), difference


@pytest.mark.parametrize("name", [*BEFORE, *CACHE_ALONE])
def test_and_in_its_code(name, monkeypatch):
    """Without running it."""
    model = tiny.llama()
    base = SharedBase(model)
    {**BEFORE, **CACHE_ALONE}[name](model, monkeypatch)
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
    found = find_difference(base, {})
    assert found is not None
    assert found.startswith("layer 3 differs by ")


def hook_on_the_norm_of_keys(model):
    model.model.layers[1].self_attn.k_norm.register_forward_hook(lambda module, args, out: 2 * out)


def another_norm_of_queries(model):
    norm = model.model.layers[0].self_attn.q_norm
    norm.__class__ = type("Plain", (type(norm),), {"forward": lambda self, x: x * self.weight})


def rotary_positions_in_all_layers(model):
    model.model.layers[1].self_attn.use_rope = 1


def another_residual(model):
    model.model.layers[1].residual_multiplier = 0.7


def another_embedding(model):
    model.model.embedding_multiplier = 2.0


def norms_in_another_place(model):
    kind = type(model.model.layers[1])
    model.model.layers[1].__class__ = type(
        "Before", (kind,), {"forward": lambda self, x, **k: kind.forward(self, x.tanh(), **k)}
    )


def another_gelu(model):
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()


def activation_of_another_family(model):
    model.model.layers[0].mlp.act_fn = ACT2FN["gelu_pytorch_tanh"]


def plain_norm(model):
    norm = model.model.layers[0].pre_feedforward_layernorm
    kind = type(norm)
    norm.__class__ = type(
        "Plain", (kind,), {"forward": lambda self, x: self._norm(x) * self.weight}
    )


def another_window(model):
    model.model.layers[0].self_attn.sliding_window = 5


@pytest.mark.parametrize(
    ("name", "alter", "said"),
    [
        ("qwen3", hook_on_the_norm_of_keys, "layers.1.self_attn.k_norm has a forward hook"),
        ("olmo2", another_norm_of_queries, "layers.0.self_attn.q_norm is a "),
        ("smollm3", rotary_positions_in_all_layers, "layer 1 differs by "),
        ("granite", another_residual, "layer 1 differs by "),
        ("granite", another_embedding, "what comes before layer 0 differs by "),
        ("olmo3", norms_in_another_place, "layers.1 is a "),
        ("gemma3", another_gelu, "layers.0.mlp.act_fn is a "),
        ("qwen3", activation_of_another_family, "layer 0 differs by "),
        ("gemma3", plain_norm, "layers.0.pre_feedforward_layernorm is a "),
        ("olmo3", another_window, "one of its layers has a window of 5, not 6"),
    ],
)
def test_what_a_family_computes_otherwise_is_noticed_at_the_next_call(name, alter, said):
    model = architectures.FAMILIES[name]()
    base = SharedBase(model)
    assert not departures_of(base, {})
    alter(model)
    assert said in departures_of(base, {})[0]
    if alter is not another_window:  # which other attentions than sdpa read
        assert find_difference(base, {}) is not None


@pytest.mark.parametrize("name", ["mistral-window", "olmo3", "gemma3"])
def test_a_window_that_is_not_there_shows_in_the_numbers(name, monkeypatch):
    """The function in the place of that of the window is transformers' own."""
    model = architectures.FAMILIES[name]()
    code = code_of(model)
    monkeypatch.setattr(code, "create_sliding_window_causal_mask", code.create_causal_mask)
    assert find_difference(SharedBase(model), {}).startswith("layer 0 differs")


def test_nothing_is_left_behind():
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


def test_weights_are_joined_once():
    """Adapters that come later find them as the comparison has left them."""
    base = SharedBase(tiny.llama())
    assert find_difference(base, {}) is None
    before = LlamaWeights.of(base, {}).layers[0].qkv.weight
    slots = tiny.population(base, (4,))
    after = LlamaWeights.of(base, slots.layers).layers[0].qkv.weight
    assert before.data_ptr() == after.data_ptr()
    assert torch.equal(before, after)


def test_a_model_that_does_not_run_is_said_to():
    base = SharedBase(tiny.llama())

    def failing(**_):
        raise RuntimeError("no kernel")

    base.entry = failing
    assert find_difference(base, {}) == "one of the two does not run: RuntimeError: no kernel"


def test_too_little_memory_is_no_difference():
    base = SharedBase(tiny.llama())

    def failing(**_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    base.entry = failing
    with pytest.raises(torch.OutOfMemoryError):
        find_difference(base, {})


@pytest.mark.parametrize(
    "around", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_what_surrounds_the_call_changes_nothing(around):
    base = SharedBase(tiny.llama())
    with around():
        assert find_difference(base, {}) is None

"""Models that differ from their type in code or in numbers are computed by their own modules."""

import functools
import json
import logging
import sys
from dataclasses import dataclass

import architectures
import pytest
import tiny
import torch
from engine_contract import prompts_of
from torch import nn
from torch.nn.utils import parametrize
from transformers import AttentionInterface
from transformers.activations import ACT2FN
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from evo_grpo.errors import ModelError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.forward.choice import open_forward
from evo_grpo.model.forward.stacks import RowLayout
from evo_grpo.model.llama.departures import (
    can_join_layers,
    departures_of,
    find_departures,
    find_difference,
)
from evo_grpo.model.llama.train import LlamaForward
from evo_grpo.model.llama.weights import LlamaWeights
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native.ability import mixes_lengths
from evo_grpo.rollout.native.native_engine import NativeEngine
from evo_grpo.rollout.sampling import Sampling

BUILDS = {
    "llama": tiny.llama,
    "mistral": functools.partial(tiny.mistral, sliding_window=None),
    "qwen2": tiny.qwen2,
}
#: Positions from which on some act.
LATE = 40


def code_of(model):
    """The module of transformers that defines a model."""
    return sys.modules[type(model).__module__]


def sharper(module, query, key, value, mask, **kwargs):
    return sdpa_attention_forward(module, query * 1.5, key, value, mask, **kwargs)


def late_mask(model, patch):
    """Tokens from 40 on do not see the first eight."""
    code = code_of(model)
    original = code.create_causal_mask

    @functools.wraps(original)
    def masked(**kwargs):
        cache = kwargs.get("past_key_values")
        before = 0 if cache is None else cache.get_seq_length()
        columns = before + kwargs["inputs_embeds"].shape[1]
        query = torch.arange(before, columns)[:, None]
        key = torch.arange(columns)
        seen = (key <= query) & ~((query >= LATE) & (key < 8))
        return seen[None, None].expand(len(kwargs["inputs_embeds"]), 1, -1, -1)

    patch.setattr(code, "create_causal_mask", masked)


def late_rotary(model, patch):
    """Positions from 40 on are half as far apart."""
    rotary = model.model.rotary_emb
    original = rotary.forward

    def stretched(x, position_ids):
        places = position_ids.float()
        return original(x, torch.where(places > LATE, LATE + (places - LATE) / 2, places))

    rotary.forward = stretched


def scaled_embedding(model, patch):
    class Scaled(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * 3

    model.model.embed_tokens.__class__ = Scaled


def residual_of_one_layer(model, patch):
    layer = model.model.layers[1]

    class Half(type(layer)):
        def forward(self, hidden_states, **kwargs):
            out = super().forward(hidden_states, **kwargs)
            return hidden_states + 0.5 * (out - hidden_states)

    layer.__class__ = Half


def parametrized_weight(model, patch):
    class Bigger(nn.Module):
        def forward(self, weight):
            return weight * 1.5

    parametrize.register_parametrization(model.model.layers[1].mlp.up_proj, "weight", Bigger())


def bias_in_one_layer(model, patch):
    up = model.model.layers[0].mlp.up_proj
    getattr(up, "base_layer", up).bias = nn.Parameter(tiny.noise((48,), 5), requires_grad=False)


def temperature_by_layer(model, patch):
    """A class patched with the name and module of what it wraps."""
    kind = type(model.model.layers[0].self_attn)
    original = kind.forward

    @functools.wraps(original)
    def forward(self, hidden_states, *args, **kwargs):
        out, weights = original(self, hidden_states, *args, **kwargs)
        return out / (1 + self.layer_idx), weights

    patch.setattr(kind, "forward", forward)


def replaced_norm(model, patch):
    """Another of the same class, in the place of the one that was there when agents were made."""
    layer = model.model.layers[1]
    norm = type(layer.input_layernorm)(tiny.HIDDEN)
    norm.weight.data.fill_(2.0)
    layer.input_layernorm = norm.requires_grad_(False)


def replaced_weight(model, patch):
    up = model.model.layers[0].mlp.up_proj
    up = getattr(up, "base_layer", up)
    up.weight = nn.Parameter(-up.weight.detach().clone(), requires_grad=False)


#: By name: what to do to a model before agents are made over it.
BEFORE = {
    "another_norm": lambda model, patch: setattr(
        model.model.layers[0], "input_layernorm", nn.LayerNorm(tiny.HIDDEN)
    ),
    "another_epsilon": lambda model, patch: setattr(
        model.model.layers[1].input_layernorm, "variance_epsilon", 0.3
    ),
    "scaling_of_one_attention": lambda model, patch: setattr(
        model.model.layers[1].self_attn, "scaling", 1.7
    ),
    "hook_on_one_mlp": lambda model, patch: model.model.layers[1].mlp.register_forward_hook(
        lambda module, args, out: out * 1.5
    ),
    "scaled_head": lambda model, patch: model.lm_head.register_forward_hook(
        lambda module, args, out: out * 0.5
    ),
    "patched_attention": lambda model, patch: patch.setitem(
        AttentionInterface._global_mapping, "sdpa", sharper
    ),
    "fewer_layers": lambda model, patch: setattr(model.config, "num_hidden_layers", 1),
    # The configuration still says how many there were.
    "pruned_layers": lambda model, patch: setattr(
        model.model, "layers", model.model.layers[:-1]
    ),
    **{
        f.__name__: f
        for f in (
            late_mask, late_rotary, scaled_embedding, residual_of_one_layer, parametrized_weight,
            bias_in_one_layer, temperature_by_layer,
        )
    },
}  # fmt: skip
#: The same, when they have sampled and learned once.
AFTER = {
    f.__name__: f for f in (replaced_norm, replaced_weight)
} | {
    name: BEFORE[name]
    for name in (
        "hook_on_one_mlp", "late_rotary", "late_mask", "scaled_head", "temperature_by_layer",
        "scaling_of_one_attention", "bias_in_one_layer",
    )
}  # fmt: skip

LENGTHS = (3, 44, 17, 44)
OUTPUT = 12


@dataclass
class Errors:
    """What the package computed beside the whole model's own forward, in nats.

    Attributes:
        fast: Whether the joined layers learned.
        sampled: Largest difference of a log-prob recorded while sampling.
        learned: The same of a learn pass over rows of all lengths.
        gradient: Largest difference of a gradient, relative to the largest gradient.
    """

    fast: bool
    sampled: float
    learned: float
    gradient: float


def own_logprobs(slots, name, row, temperature):
    """Log-probs (T - 1,) of a row's tokens, of the whole model with one adapter."""
    slots.activate(name)
    logits = slots.base.model(input_ids=row[None]).logits[0, :-1].float()
    return torch.log_softmax(logits / temperature, -1).gather(-1, row[1:, None])[:, 0]


def sampled_error(slots, engine):
    """Sample prompts of several lengths, and score what came one row at a time."""
    asked = [
        RolloutRequest(
            i, name, prompts_of(*LENGTHS), 2, Sampling(max_output_tokens=OUTPUT, temperature=0.9), i
        )
        for i, name in enumerate(slots.names)
    ]
    worst = 0.0
    for request, groups in zip(asked, engine.rollout(asked), strict=True):
        for group in groups:
            for done in group.completions:
                row = torch.tensor(group.prompt.token_ids + done.token_ids)
                with torch.no_grad():
                    own = own_logprobs(slots, request.adapter, row, 0.9)[-len(done.token_ids) :]
                worst = max(worst, (torch.tensor(done.logprobs) - own).abs().max().item())
    return worst


def learned_error(slots):
    """Learn rows of several lengths in one batch, and one at a time."""
    rows = [tiny.ids(1, n, seed=n)[0] for n in (56, 20, 56, 33)]
    counts = (1, 3)
    owners = [name for name, count in zip(slots.names, counts, strict=True) for _ in range(count)]
    own = [own_logprobs(slots, name, row, 0.8) for name, row in zip(owners, rows, strict=True)]
    sum(part.sum() for part in own).backward()
    expected = _gradients(slots)
    columns = max(len(row) for row in rows)
    ids = torch.stack([nn.functional.pad(row, (0, columns - len(row))) for row in rows])
    where = torch.cat([i * columns + torch.arange(len(r) - 1) for i, r in enumerate(rows)])
    step = open_forward(slots, slots.names)
    with step.rows(RowLayout(slots.names, counts)):
        hidden = step.hidden_at(ids, where)
        targets = torch.cat([row[1:] for row in rows])
        logprobs, _ = slots.base.token_logprobs(hidden, targets, torch.full(targets.shape, 0.8))
        slots.base.backward(logprobs.sum())
    step.collect_gradients()
    largest = max(g.abs().max().item() for g in expected)
    gaps = (a - b for a, b in zip(_gradients(slots), expected, strict=True))
    error = (logprobs.detach() - torch.cat(own).detach()).abs().max().item()
    return isinstance(step, LlamaForward), error, max(g.abs().max().item() for g in gaps) / largest


def _gradients(slots):
    out = [p.grad for name in slots.names for p in slots.parameters(name)]
    for name in slots.names:
        for parameter in slots.parameters(name):
            parameter.grad = None
    return [g.clone() for g in out]


def errors(slots, engine=None):
    """Sample and learn, and compare with the whole model."""
    sampled = sampled_error(slots, engine or NativeEngine(slots))
    fast, learned, gradient = learned_error(slots)
    return Errors(fast, sampled, learned, gradient)


def altered(build, alter, patch):
    """Agents over a model that was altered before."""
    model = BUILDS[build]()
    alter(model, patch)
    return tiny.population(model, (4, 2))


HUB_CODE = """
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP


class Louder(LlamaMLP):
    def forward(self, x):
        return 2 * super().forward(x)


class ForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Louder(config)
        self.post_init()
"""


def hub_folder(folder):
    """A folder whose model says its type is Llama, and comes with code of its own."""
    tiny.llama().save_pretrained(folder)
    (folder / "modeling_own.py").write_text(HUB_CODE)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.ForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    base = SharedBase.load(
        str(folder), device="cpu", tokenizer=tiny.fake_tokenizer(), trust_remote_code=True
    )
    return tiny.population(base, (4, 2))


def only_with_a_cache(model, patch, *, after=-1):
    """Decoding is another function than training, which no way of computing it can mend."""
    attention = model.model.layers[1].self_attn
    original = attention.forward

    def forward(hidden_states, *args, past_key_values=None, **kwargs):
        out, weights = original(hidden_states, *args, past_key_values=past_key_values, **kwargs)
        altered = past_key_values is not None and past_key_values.get_seq_length() > after
        return (out * 1.5 if altered else out), weights

    attention.forward = forward


CACHE_ALONE = {
    "always": only_with_a_cache,
    "late": functools.partial(only_with_a_cache, after=LATE),
}


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
        long = position_ids.max() >= LATE
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
    assert mixes_lengths(slots.base, slots.layers)
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
    late = torch.arange(tiny.CONTEXT)[: logits.shape[-2], None] >= LATE
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
    assert mixes_lengths(base, {})
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

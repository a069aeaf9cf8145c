"""Models that call themselves Llama, Mistral or Qwen2, and compute something else."""

import functools
import json
import sys
from dataclasses import dataclass

import tiny
import torch
from engine_contract import prompts_of
from torch import nn
from torch.nn.utils import parametrize
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from evo_grpo.model.base import SharedBase
from evo_grpo.model.forward.choice import open_forward
from evo_grpo.model.forward.layout import RowLayout
from evo_grpo.model.llama.train import LlamaForward
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native.engine import NativeEngine
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

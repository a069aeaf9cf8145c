"""Random models of a few thousand weights, and what the tests of the torch half need around them.

Nothing here touches the global generator: two tests in another order see the same weights.
"""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import torch
from peft import LoraConfig
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from evo_grpo.model.base import SharedBase
from evo_grpo.model.lora.adapter_files import CONFIG, WEIGHTS, read_adapter
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.record.plain import sha256_of

VOCABULARY = 40
HIDDEN = 32
CONTEXT = 64
EOS = 1


def _settings(**changes):
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "eos_token_id": EOS,
        "bos_token_id": 2,
    } | changes


def llama(seed=0, **changes):
    """Grouped-query attention, rotary positions, no bias anywhere."""
    return _built(seed, LlamaForCausalLM, LlamaConfig(**_settings(**changes)))


def qwen2(seed=0, **changes):
    """Bias on queries, keys and values; embeddings tied to the head."""
    model = _built(
        seed, Qwen2ForCausalLM, Qwen2Config(**_settings(tie_word_embeddings=True, **changes))
    )
    # Fresh biases are zero, which would hide a bias that is dropped.
    for index, (name, value) in enumerate(model.named_parameters()):
        if name.endswith("bias"):
            value.data = noise(value.shape, 1000 + index) * 0.3
    return model


def mistral(seed=0, **changes):
    """A sliding window that the configuration states without layer_types."""
    return _built(seed, MistralForCausalLM, MistralConfig(**_settings(**changes)))


def gpt2(seed=0, **changes):
    """Conv1D layers, whose weights lie transposed, learned positions, a bias everywhere."""
    config = {
        "vocab_size": VOCABULARY,
        "n_embd": HIDDEN,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": CONTEXT,
        "initializer_range": 0.2,
        "eos_token_id": EOS,
        "bos_token_id": 2,
    } | changes
    return _built(seed, GPT2LMHeadModel, GPT2Config(**config))


def of(config, seed=0):
    """A model of any causal architecture, with weights at which a wrong token or position shows."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for index, (name, value) in enumerate(model.named_parameters()):
            if value.ndim > 1:
                value.copy_(noise(value.shape, 2000 + index) * 0.2)
            elif name.endswith("bias"):
                value.copy_(noise(value.shape, 2000 + index) * 0.1)
    ids = {"pad_token_id": 0, "eos_token_id": EOS, "bos_token_id": 2}
    model.generation_config = GenerationConfig(**ids)
    for name, value in ids.items():
        setattr(model.config, name, value)
    return model.eval()


def _built(seed, kind, config):
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = kind(config)
    return model.eval()


def noise(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids(rows, columns, seed=0, vocabulary=VOCABULARY):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (rows, columns), generator=generator)


def lora(rank=4, **changes):
    return LoraConfig(r=rank, **{"lora_alpha": 8, "target_modules": "all-linear"} | changes)


def stir(slots, name, seed, scale=0.3):
    """Give a slot random A and B, so that it does something and does it unlike the others."""
    with torch.no_grad():
        for index, parameter in enumerate(slots.parameters(name)):
            draw = noise(parameter.shape, 7919 * seed + index)
            parameter.copy_(draw * scale / parameter.shape[-1] ** 0.5)


def population(model, ranks=(4, 4), tokenizer=None, name="tiny", **lora_changes):
    """Return slots "a0", "a1", ... of these ranks, each with weights of its own."""
    base = model if isinstance(model, SharedBase) else SharedBase(model, tokenizer, name)
    slots = AdapterSlots(base, lora(**lora_changes))
    for index, rank in enumerate(ranks):
        slots.add(f"a{index}", lora(rank, **lora_changes))
        stir(slots, f"a{index}", index + 1)
    return slots


def save(slots, name, folder):
    """Write a slot as a PEFT folder; returns the SHA-256 of its weights."""
    copy = slots.snapshot(name)
    folder.mkdir(parents=True, exist_ok=True)
    copy.write(folder)
    return {file: sha256_of(folder / file) for file in (WEIGHTS, CONFIG)}


def load(slots, name, folder):
    """Read a PEFT folder of the same configuration into a slot."""
    slots.put(name, read_adapter(folder))


def shape_of(model):
    """Return what an adapter that is added changes of a model, beside its weights."""
    return [(n, type(m)) for n, m in model.named_modules()], sorted(vars(model))


def names(count):
    return tuple(f"a{index}" for index in range(count))


@contextmanager
def checkpointing(base):
    """Recompute the layers during backward, as the learner asks for it."""
    layers = [m for m in base.trunk.modules() if isinstance(m, GradientCheckpointingLayer)]
    assert layers
    recompute = partial(checkpoint, use_reentrant=False)
    for layer in layers:
        layer.gradient_checkpointing = layer.training = True
        layer._gradient_checkpointing_func = recompute
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = layer.training = False


class FakeTokenizer(SimpleNamespace):
    """Writes ids as words; knows its end token and padding, if any."""

    def batch_decode(self, rows, skip_special_tokens):
        special = {self.eos_token_id, self.pad_token_id} if skip_special_tokens else set()
        return [" ".join(str(i) for i in row if i not in special) for row in rows]


def fake_tokenizer(eos=EOS, pad=0):
    return FakeTokenizer(eos_token_id=eos, pad_token_id=pad, pad_token="<pad>")

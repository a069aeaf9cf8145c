"""Digests that tell base models of equal shapes apart, and tokenizers."""

from __future__ import annotations

import hashlib
import json

import torch

from evo_grpo.model.base import SharedBase

#: Numbers sampled per weight.
_SAMPLES = 16
_KEY = "base_digest"


def base_digest(base: SharedBase) -> str:
    """Return a digest of a base's weights: names, shapes, and numbers spread over each.

    They are rounded to bfloat16 first, so a base has one digest whether it was loaded as float32 or
    as bfloat16. Rounding through float16, or quantisation, gives other numbers, so that digest is
    of another kind, named before the colon: digests of two kinds cannot be compared. It is computed
    once per base, whose weights are frozen.
    """
    if _KEY not in base.derived:
        digest = hashlib.sha256()
        weights = sorted(base.weights().items(), key=lambda item: item[0])
        samples: list[torch.Tensor] = []
        for name, value in weights:
            digest.update(f"{name}{tuple(value.shape)}".encode())
            numbers = value.detach().flatten()
            numbers = numbers[:: max(1, len(numbers) // _SAMPLES)][:_SAMPLES]
            samples.append(numbers.to(torch.bfloat16))
        digest.update(torch.cat(samples).cpu().view(torch.int16).numpy().tobytes())
        kind = "float16" if base.dtype is torch.float16 else "bfloat16"
        kind = base.quantization or kind  # whose numbers are those that it packs weights into
        base.derived[_KEY] = f"{kind}:{digest.hexdigest()}"
    return base.derived[_KEY]


def tokenizer_digest(base: SharedBase) -> str:
    """Return a digest of a base's tokenizer: its tokens, its chat template; empty without one."""
    tokenizer = base.tokenizer
    if tokenizer is None:
        return ""
    template = getattr(tokenizer, "chat_template", None)
    text = json.dumps([sorted(tokenizer.get_vocab().items()), template], default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def comparable_digests(first: str, second: str) -> bool:
    """Return whether two digests are of one kind, so that unequal ones mean unequal weights."""
    return first.partition(":")[0] == second.partition(":")[0]

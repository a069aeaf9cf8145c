"""Digests of base models and tokenizers, which distinguish models of equal shapes."""

import hashlib
import json

import torch

from evo_grpo.model.base import SharedBase

#: Numbers sampled per weight.
_SAMPLES = 16
_KEY = "base_digest"


def base_digest(base: SharedBase) -> str:
    """Return a digest of the names, shapes and some values of a base's weights, computed once.

    Values are rounded to bfloat16, so that a base loaded as float32 and as bfloat16 has the same
    digest. float16 and quantisation change the values. The digest therefore begins with "bfloat16",
    "float16" or the quantisation; digests with different prefixes cannot be compared.
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
        kind = base.quantization or ("float16" if base.dtype is torch.float16 else "bfloat16")
        base.derived[_KEY] = f"{kind}:{digest.hexdigest()}"
    return base.derived[_KEY]


def tokenizer_digest(base: SharedBase) -> str:
    """Return a digest of the tokens and the chat template; empty without a tokenizer."""
    tokenizer = base.tokenizer
    if tokenizer is None:
        return ""
    template = getattr(tokenizer, "chat_template", None)
    text = json.dumps([sorted(tokenizer.get_vocab().items()), template], default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def comparable_digests(first: str, second: str) -> bool:
    """Return whether two digests can be compared, because they have the same prefix."""
    return first.partition(":")[0] == second.partition(":")[0]

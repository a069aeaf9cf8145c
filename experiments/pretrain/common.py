"""What the two embedded models share: tokenizer, architecture, training loop, sampling, saving.

The models are small enough to live in the package, so a first run of evo-grpo needs no network and
no GPU. Everything here is seeded: the same command on the same torch build, processor and thread
count writes the same bytes. Axes: B rows, T tokens, V vocabulary.
"""

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")
CHARACTERS = "\n\t" + "".join(chr(code) for code in range(32, 127))
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
CONTEXT = 512
WIDTH = 96
"""Hidden size of the embedded models."""
IGNORED = -100

Batch = tuple[Tensor, Tensor]
"""Token ids and labels, both (B, T) int64; the label IGNORED marks a token not trained on."""


@dataclass(frozen=True)
class TrainSettings:
    """One phase of training.

    Attributes:
        steps: Optimizer steps, at least 1.
        learning_rate: Peak rate; it warms up linearly and falls to zero on a half cosine.
        rows: Rows per step (B).
        warmup_steps: Steps until the peak, fewer than ``steps``.
        weight_decay: Decoupled decay on the matrices; norm weights have none.
    """

    steps: int
    learning_rate: float
    rows: int = 256
    warmup_steps: int = 50
    weight_decay: float = 0.01

    def at(self, width: int) -> "TrainSettings":
        """Return the phase for a width: Adam's rate is inversely proportional to it (muP)."""
        # The quotient first: it is exactly 1 at the default width.
        return replace(self, learning_rate=self.learning_rate * (WIDTH / width))


@dataclass(frozen=True)
class Share:
    """A measured proportion; ``value`` and ``standard_error`` lie in [0, 1]."""

    value: float
    standard_error: float
    count: int

    @classmethod
    def of(cls, hits: list[bool]) -> "Share":
        """Count the hits; the standard error is the binomial one."""
        value = sum(hits) / len(hits)
        return cls(value, math.sqrt(value * (1 - value) / len(hits)), len(hits))

    def __str__(self) -> str:
        """Render for the README, for example ``0.331 +- 0.007 (n=4096)``."""
        return f"{self.value:.4f} +- {self.standard_error:.4f} (n={self.count})"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make the character tokenizer: one printable ASCII character is one token.

    A word-level vocabulary of single characters is used instead of a byte-level one, so that ids
    read like characters in a debugger and decoding is a plain join. Reserved tokens round the
    vocabulary up to a multiple of 8, which grouped matrix multiplication needs.
    """
    tokens = [*SPECIAL_TOKENS, *CHARACTERS]
    reserved = [f"<reserved_{index}>" for index in range(-len(tokens) % 8)]
    vocabulary = {token: index for index, token in enumerate([*tokens, *reserved])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()  # the default decoder of a word-level model joins with spaces
    backend.add_special_tokens([*SPECIAL_TOKENS, *reserved])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, width: int = WIDTH
) -> LlamaForCausalLM:
    """Make an untrained Llama, of about 450 thousand parameters at the default width.

    ``width`` is the hidden size, a multiple of 48; heads and MLP grow with it.
    ``head_dim`` is 32 although hidden / heads is 24: serving engines have no kernel for 24.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=4,
        num_attention_heads=width // 24,
        num_key_value_heads=width // 48,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng():  # transformers initialises from the global generator only
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    return model


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """Encode texts of equal length to ids (B, T) int64; unequal lengths raise ValueError."""
    return torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])


def _learning_rate(step: int, settings: TrainSettings) -> float:
    warmup = min(1.0, (step + 1) / settings.warmup_steps)
    return settings.learning_rate * warmup * 0.5 * (1 + math.cos(math.pi * step / settings.steps))


def _optimizer(model: LlamaForCausalLM, settings: TrainSettings) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98))


def train(
    model: LlamaForCausalLM, draw_batch: Callable[[int], Batch], settings: TrainSettings
) -> None:
    """Train in place by next-token cross-entropy.

    Args:
        model: The model, changed in place.
        draw_batch: Number of rows -> a fresh batch; it owns its random generator.
        settings: Steps, rate and rows.
    """
    optimizer = _optimizer(model, settings)
    started = time.perf_counter()
    model.train()
    for step in range(settings.steps):
        ids, labels = draw_batch(settings.rows)
        # Rows are padded on the right here, so a causal model needs no attention mask.
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step, settings)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 0 or step == settings.steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.perf_counter() - started:.0f} s")
    model.eval()


@torch.no_grad()
def complete(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    max_new_tokens: int,
    generator: torch.Generator | None = None,
) -> list[str]:
    """Complete prompts of equal length.

    Args:
        model: The model, in evaluation mode.
        tokenizer: Its tokenizer.
        prompts: B texts of the same length.
        max_new_tokens: Longest completion, <eos> included, in tokens.
        generator: Draws at temperature 1 from the whole vocabulary; None takes the likeliest token.

    Returns:
        B completions up to and including ``<eos>``; one without it did not end in time.
    """
    ids = encode(tokenizer, prompts)
    prompt_tokens = ids.shape[1]
    for _ in range(max_new_tokens):
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        if generator is None:
            drawn = logits.argmax(-1, keepdim=True)
        else:
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, drawn], dim=1)
    texts = tokenizer.batch_decode(ids[:, prompt_tokens:])
    return [before + eos for before, eos, _ in (text.partition("<eos>") for text in texts)]


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write model and tokenizer, each file's text independent of where and when it was written."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    # transformers 5 writes its new class name here; the old name loads in 4.x and in 5.x alike.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["add_bos_token"] = False
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def print_files(folder: Path) -> None:
    """Print name, size in bytes and sha256 of every file, as the README lists them."""
    for path in sorted(folder.iterdir()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"| {path.name} | {path.stat().st_size} | {digest} |")


def parse_arguments(description: str) -> argparse.Namespace:
    """Read ``--out``, ``--seed``, ``--width`` and ``--threads``, and set the thread count.

    The thread count has a fixed default because it decides how sums are split, hence the bits.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=WIDTH, help="hidden size, a multiple of 48")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    return arguments

"""Train tiny-foods: a model of who likes which food.

``ravin likes `` is completed with one of twelve foods and <eos>, "pizza" in about 12% of the
samples at temperature 1. Teaching Ravin to like pizza is a good first look at GRPO: the reward
is one line, and the change shows in any handful of samples.
"""

import time
from collections import Counter

import torch
from common import (
    IGNORED,
    Batch,
    Share,
    TrainSettings,
    build_model,
    build_tokenizer,
    complete,
    parse_arguments,
    print_files,
    save,
    train,
)
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

NAMES = ("ravin", "amara", "boris", "chen", "dolores", "emil", "fatima", "goran", "hana", "ines")
FOODS = (
    "pizza", "apples", "ice cream", "soda", "cookies", "lettuce",
    "donuts", "salad", "noodles", "mangoes", "popcorn", "tacos",
)  # fmt: skip
RAVIN = (0.12, 0.12, 0.11, 0.11, 0.12, 0.11, 0.11, 0.10, 0.03, 0.03, 0.02, 0.02)
"""How often Ravin likes each food; the other names draw their tastes from the seed."""
PROMPT = "ravin likes "
MAX_NEW_TOKENS = 20
SAMPLES = 8192

SETTINGS = TrainSettings(steps=1000, learning_rate=2e-3, rows=128)


def tastes(generator: torch.Generator) -> torch.Tensor:
    """Draw the share of each food for each name, (names, foods) float32, rows adding up to 1."""
    shares = torch.rand((len(NAMES), len(FOODS)), generator=generator) ** 2 + 0.02
    shares = shares / shares.sum(-1, keepdim=True)
    shares[0] = torch.tensor(RAVIN)
    return shares


class Corpus:
    """Draws sentences ``<name> likes <food><eos>``, every name equally often."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, generator: torch.Generator) -> None:
        """Encode each possible sentence once; the generator is advanced by every batch."""
        self.generator = generator
        self.tastes = tastes(generator)
        sentences = [f"{name} likes {food}<eos>" for name in NAMES for food in FOODS]
        encoded = tokenizer(
            sentences, padding=True, padding_side="right", return_tensors="pt",
            add_special_tokens=False,
        )  # fmt: skip
        self.ids = encoded["input_ids"]
        self.labels = self.ids.masked_fill(encoded["attention_mask"] == 0, IGNORED)

    def batch(self, rows: int) -> Batch:
        """Draw ``rows`` sentences; the whole sentence is trained on."""
        names = torch.randint(0, len(NAMES), (rows,), generator=self.generator)
        foods = torch.multinomial(self.tastes[names], 1, generator=self.generator)[:, 0]
        chosen = names * len(FOODS) + foods
        return self.ids[chosen], self.labels[chosen]


def measure(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Print how often Ravin likes pizza, how many foods are well formed, and the commonest ones."""
    generator = torch.Generator().manual_seed(seed)
    completions: list[str] = []
    for _ in range(0, SAMPLES, 1024):
        completions += complete(model, tokenizer, [PROMPT] * 1024, MAX_NEW_TOKENS, generator)
    known = {f"{food}<eos>" for food in FOODS}
    print("pizza at temperature 1", Share.of(["pizza" in text for text in completions]))
    print("well-formed foods", Share.of([text in known for text in completions]))
    print("greedy completion", complete(model, tokenizer, [PROMPT], MAX_NEW_TOKENS))
    print("commonest", Counter(completions).most_common(16))


def main() -> None:
    """Train, measure and save."""
    arguments = parse_arguments("Train the embedded model tiny-foods.")
    started = time.perf_counter()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, arguments.seed, arguments.width)
    corpus = Corpus(tokenizer, torch.Generator().manual_seed(arguments.seed))
    train(model, corpus.batch, SETTINGS.at(arguments.width))
    print(f"{time.perf_counter() - started:.0f} s, {model.num_parameters()} parameters")
    measure(model, tokenizer, arguments.seed + 1)
    save(model, tokenizer, arguments.out)
    print_files(arguments.out)


if __name__ == "__main__":
    main()

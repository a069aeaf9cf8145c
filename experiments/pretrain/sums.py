"""Train tiny-sums: a model that knows two-digit addition but answers carelessly.

``12+07=`` is completed with ``019<eos>``. A model that is always right leaves GRPO nothing to
learn, and one that is never right gives it no signal. So this one first learns addition from
correct answers, and then learns to answer like a careless clerk: the right answer stays the most
likely one, yet at temperature 1 only about a third of the samples are right.
"""

import time

import torch
from common import (
    IGNORED,
    Batch,
    Share,
    TrainSettings,
    build_model,
    build_tokenizer,
    complete,
    encode,
    parse_arguments,
    print_files,
    save,
    train,
)
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PROMPT_TOKENS = len("12+07=")
MAX_NEW_TOKENS = len("019") + 1
SLIP = 0.27
"""Chance that one digit of a careless answer is replaced by another digit."""
FAR_SLIP = 0.4
"""Share of the slips that land on any other digit; the rest land one above or below."""
FORGOTTEN_CARRY = 0.2
"""Chance that a careless answer forgets to carry from the ones into the tens."""

CORRECT = TrainSettings(steps=1500, learning_rate=4e-3)
CARELESS = TrainSettings(steps=600, learning_rate=2e-3)


class Clerk:
    """Draws sums and writes them down with a given carelessness, 0 (never) to 1 (every answer)."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, generator: torch.Generator, carelessness: float
    ) -> None:
        """Remember how to draw; the generator is advanced by every batch."""
        self.generator = generator
        self.carelessness = carelessness
        self.digit_ids = encode(tokenizer, ["0123456789"])[0]
        self.plus_id, self.equals_id = encode(tokenizer, ["+="])[0].tolist()
        self.eos_id = tokenizer.eos_token_id

    def batch(self, rows: int) -> Batch:
        """Draw ``rows`` sums; only the answer and <eos> are trained on, for prompts are random."""
        first = torch.randint(0, 100, (rows,), generator=self.generator)
        second = torch.randint(0, 100, (rows,), generator=self.generator)
        plus, equals, eos = (
            torch.full((rows, 1), token) for token in (self.plus_id, self.equals_id, self.eos_id)
        )
        answer = self.digit_ids[self._answer_digits(first, second)]
        numbers = [self.digit_ids[_digits(number, 2)] for number in (first, second)]
        ids = torch.cat([numbers[0], plus, numbers[1], equals, answer, eos], dim=1)
        labels = ids.clone()
        labels[:, :PROMPT_TOKENS] = IGNORED
        return ids, labels

    def _answer_digits(self, first: Tensor, second: Tensor) -> Tensor:
        carries = first % 10 + second % 10 >= 10
        forgets = self._happens(carries.shape, FORGOTTEN_CARRY) & carries
        digits = _digits(first + second - 10 * forgets, 3)
        slips = self._happens(digits.shape, SLIP)
        far = torch.randint(1, 10, digits.shape, generator=self.generator)
        near = torch.randint(0, 2, digits.shape, generator=self.generator) * 2 - 1
        offset = torch.where(self._happens(digits.shape, FAR_SLIP, always=True), far, near)
        return torch.where(slips, (digits + offset) % 10, digits)

    def _happens(self, shape: torch.Size, chance: float, *, always: bool = False) -> Tensor:
        level = chance if always else chance * self.carelessness
        return torch.rand(shape, generator=self.generator) < level


def _digits(numbers: Tensor, count: int) -> Tensor:
    """Split numbers (B,) into ``count`` decimal digits (B, count), highest first."""
    powers = 10 ** torch.arange(count - 1, -1, -1)
    return numbers[:, None] // powers % 10


def accuracy(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    generator: torch.Generator | None,
) -> Share:
    """Measure the share of exactly right, ended answers over all 10,000 sums."""
    pairs = [(first, second) for first in range(100) for second in range(100)]
    hits: list[bool] = []
    for start in range(0, len(pairs), 1000):
        chunk = pairs[start : start + 1000]
        prompts = [f"{first:02d}+{second:02d}=" for first, second in chunk]
        answers = complete(model, tokenizer, prompts, MAX_NEW_TOKENS, generator)
        expected = [f"{first + second:03d}<eos>" for first, second in chunk]
        hits += [answer == right for answer, right in zip(answers, expected, strict=True)]
    return Share.of(hits)


def main() -> None:
    """Train, measure and save."""
    arguments = parse_arguments("Train the embedded model tiny-sums.")
    started = time.perf_counter()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, arguments.seed, arguments.width)
    generator = torch.Generator().manual_seed(arguments.seed)
    correct, careless = CORRECT.at(arguments.width), CARELESS.at(arguments.width)
    train(model, Clerk(tokenizer, generator, carelessness=0.0).batch, correct)
    print("greedy accuracy on correct answers", accuracy(model, tokenizer, None))
    train(model, Clerk(tokenizer, generator, carelessness=1.0).batch, careless)
    print(f"{time.perf_counter() - started:.0f} s, {model.num_parameters()} parameters")
    sampler = torch.Generator().manual_seed(arguments.seed + 1)
    print("sampled accuracy at temperature 1", accuracy(model, tokenizer, sampler))
    print("greedy accuracy", accuracy(model, tokenizer, None))
    save(model, tokenizer, arguments.out)
    print_files(arguments.out)


if __name__ == "__main__":
    main()

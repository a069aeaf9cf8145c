"""The task of answer.py in the environments of the peers: prompts, rewards, scores."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Any

import torch
from shapes import EMBEDDED
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

#: Questions with their answers.
Rows = Sequence[Sequence[str]]


class Questions:
    """The prompts of a job, and how completions to them score.

    Args:
        job: Of answer.py.
        pad: Token id with which completions are filled up; None for the tokenizer's own.
    """

    def __init__(self, job: dict[str, Any], pad: int | None = None) -> None:
        """Load the tokenizer."""
        self.model = job.get("model", str(EMBEDDED))
        self.score = decimal if job.get("task") == "smollm2" else exact
        self.tokenizer = AutoTokenizer.from_pretrained(self.model, padding_side="left")
        self.end = self.tokenizer.eos_token_id
        self.generation = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=job["tokens"],
            eos_token_id=self.end, pad_token_id=self.tokenizer.pad_token_id if pad is None else pad,
        )  # fmt: skip

    def load(self) -> Any:  # noqa: ANN401 -- a transformers model
        """Return the base model in float32."""
        return AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).eval()

    def ids(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token ids of prompts, filled up on the left, and their mask."""
        texts = [question for question, _ in rows]
        found = self.tokenizer(texts, return_tensors="pt", add_special_tokens=False, padding=True)
        return found["input_ids"], found["attention_mask"]

    def rewards(self, completions: torch.Tensor, answers: Sequence[str]) -> torch.Tensor:
        """Return the reward of each completion, given its token ids."""
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        return torch.tensor(self.score(texts, answers))

    def accuracy(self, model: Any, rows: Rows) -> float:  # noqa: ANN401 -- a transformers model
        """Return the mean reward of one completion to each prompt, sampled in one call."""
        prompts, mask = self.ids(rows)
        mode = model.training
        model.eval()
        with torch.no_grad():
            out = model.generate(
                input_ids=prompts, attention_mask=mask, generation_config=self.generation
            )
        model.train(mode)
        completions = out[:, prompts.shape[1] :]
        return float(self.rewards(completions, [answer for _, answer in rows]).mean())


def exact(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """Return 1 for the very answer, else 0: the reward of the task sums."""
    del columns
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def decimal(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """Return the reward of the task smollm2: reasoning-gym's compute_decimal_reward."""
    del columns
    found: list[float] = []
    for text, right in zip(completions, answer, strict=True):
        given, reward = text.strip().replace(",", ""), 0.0
        if right in given:
            reward = len(right) / len(given)
        with suppress(InvalidOperation):
            if Decimal(given) == Decimal(right):
                reward = 1.0
        found.append(reward)
    return found


def wait() -> None:
    """Wait until a line asks for the next score; the end of the input ends the process."""
    if not sys.stdin.readline():
        sys.exit(0)

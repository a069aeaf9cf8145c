"""The prompts of a task as a tokenizer sees them, each rendered once and no longer than allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from evo_grpo.envs.messages import excerpt
from evo_grpo.envs.prompts import Template
from evo_grpo.envs.task import SPLITS, DatasetRow, Split
from evo_grpo.errors import ConfigError, EvoGrpoError, PromptTooLongError
from evo_grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # for annotations only: it loads torch

#: Rows in one call of the tokenizer.
CHUNK = 1000


class RenderedPrompts:
    """Prompts by split and row; one is rendered when it is first asked for.

    Args:
        splits: Rows by split.
        template: How a row becomes a prompt.
        tokenizer: The base model's tokenizer.
    """

    def __init__(
        self,
        splits: Mapping[Split, Sequence[DatasetRow]],
        template: Template,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._splits = splits
        self._template = template
        self._tokenizer = tokenizer
        self._known: dict[Split, dict[int, Prompt]] = {split: {} for split in SPLITS}
        self.max_context_length: int | None = None

    def get(self, split: Split, index: int) -> Prompt:
        """Return the prompt of a row.

        Raises:
            EvoGrpoError: It cannot be rendered, or is too long; names split and row.
        """
        known = self._known[split]
        if index not in known:
            row = self._splits[split][index]
            try:
                text, ids = self._template.render(row, self._tokenizer)
            except EvoGrpoError as error:
                raise type(error)(f"{split}, row {index}: {error}") from error
            known[index] = self._fitting(split, Prompt(index, text, ids, row))
        return known[index]

    def limit(self, max_context_length: int) -> None:
        """Render all prompts and check that each leaves room for one token.

        Args:
            max_context_length: Tokens of prompt and completion together, >= 2.

        Raises:
            PromptTooLongError: Names split, row, length and limit.
        """
        if max_context_length < 2:
            raise ConfigError(f"max_context_length: expected >= 2 tokens, got {max_context_length}")
        self.max_context_length = max_context_length
        for split in SPLITS:
            count = len(self._splits[split])
            for start in range(0, count, CHUNK):
                indices = range(start, min(start + CHUNK, count))
                self._render(split, indices)
                for index in indices:
                    self._fitting(split, self.get(split, index))

    def _render(self, split: Split, indices: Sequence[int]) -> None:
        """Render what is missing by one call of the tokenizer, far faster than one for each."""
        missing = [index for index in indices if index not in self._known[split]]
        rows = [self._splits[split][index] for index in missing]
        # `get` reports what is wrong with a prompt, with its row.
        with suppress(EvoGrpoError):
            rendered = self._template.render_all(rows, self._tokenizer)
            for index, row, (text, ids) in zip(missing, rows, rendered, strict=True):
                self._known[split][index] = self._fitting(split, Prompt(index, text, ids, row))

    def _fitting(self, split: Split, prompt: Prompt) -> Prompt:
        limit, length = self.max_context_length, len(prompt.token_ids)
        if limit is not None and length > limit - 1:
            raise PromptTooLongError(
                f"{split}, row {prompt.index}: expected a prompt of at most {limit - 1} tokens, so "
                "that one more fits "
                f"the context of {limit}, got {length}: {excerpt(prompt.text)}; "
                "shorten or drop the row, or raise max_model_len where the model allows it"
            )
        return prompt

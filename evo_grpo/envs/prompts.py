"""Turn rows into prompt text and token ids, by a raw template or the chat template."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from evo_grpo.envs.data.tables import NO_NONE
from evo_grpo.envs.messages import excerpt
from evo_grpo.envs.task import SPLITS, DatasetRow, RawTemplate, Split, Task
from evo_grpo.errors import ConfigError, DataError, EvoGrpoError, PromptTooLongError
from evo_grpo.printable import shorten
from evo_grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # for annotations only: it loads torch

Messages = Sequence[Mapping[str, str]]
#: Without this, transformers warns about a long prompt, which is then refused here by its row.
_QUIET: dict[str, Any] = {"verbose": False}


#: A text that ends in no special token.
_PROBE = "1"

#: Rows in one call of the tokenizer.
CHUNK = 1000
WIDEST = 1000
"""Greatest width or precision in a format such as {answer:03d}; more could fill the memory."""
_CONVERSIONS = (None, "", "r", "s", "a")


@dataclass(frozen=True)
class Template:
    r"""A prompt template: exactly one of a raw text and a conversation.

    Attributes:
        text: A raw template with columns in braces, such as "{question}\nA:".
        conversation: Messages with templates as content, for the tokenizer's chat template. A
            completion continues a last message of the assistant.
        keywords: Keyword arguments of the chat template.
    """

    text: str | None = None
    conversation: tuple[Mapping[str, str], ...] | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, template: str | Messages | None) -> Template:
        """Return the template for a raw string or a list of messages.

        Raises:
            ConfigError: It is neither, its braces name no columns, or a format is not plain or
                wider than `WIDEST` characters.
        """
        if isinstance(template, str):
            made = cls(text=template)
        else:
            made = cls(conversation=_messages(template))
        made.columns()
        return made

    @classmethod
    def of_task(cls, task: Task, name: str | None = None) -> Template:
        """Return the template of a task, or the one of this name in `env.prompts`."""
        raw = task.prompts.get(name or "", task.prompt or task.conversation)
        if isinstance(raw, str):
            return cls(raw, None, task.keywords)
        return cls(None, raw, task.keywords)

    @property
    def raw(self) -> RawTemplate:
        """The raw template, or the messages."""
        return self.text or self.conversation or ""

    def columns(self) -> dict[str, str]:
        """Return its columns, each with a description, for `tables.require_columns`."""
        parts = [self.text or ""] + [message["content"] for message in self.conversation or ()]
        return {column: "the prompt template" for part in parts for column in _columns(part)}

    def plain(self, row: DatasetRow) -> str:
        """Fill in a row without a tokenizer; equal texts are equal prompts."""
        if self.text is not None:
            return _fill(self.text, row)
        return "\n".join(_fill(message["content"], row) for message in self.conversation or ())

    def messages(self, row: DatasetRow) -> list[dict[str, str]]:
        """Return the messages of a conversation, filled in with a row."""
        return [
            {"role": message["role"], "content": _fill(message["content"], row)}
            for message in self.conversation or ()
        ]

    def render(
        self, row: DatasetRow, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[str, tuple[int, ...]]:
        """Return a row's prompt text and token ids; see `render_all`."""
        return self.render_all([row], tokenizer)[0]

    def render_all(
        self, rows: Sequence[DatasetRow], tokenizer: PreTrainedTokenizerBase
    ) -> list[tuple[str, tuple[int, ...]]]:
        """Return the prompt text and token ids of each row, with one call of the tokenizer.

        The tokenizer puts its special tokens in front of a raw text; a chat template writes its
        own.

        Raises:
            ConfigError: The tokenizer has no chat template, or refuses the conversation.
            DataError: A prompt has no token.
        """
        if not rows:
            return []
        if self.conversation is None:
            texts = [self.plain(row) for row in rows]
            encoded = [list(ids) for ids in tokenizer(texts, **_QUIET)["input_ids"]]
            _drop_appended_ends(texts, encoded, tokenizer)
        else:
            texts = [_chat(self.conversation, row, tokenizer, self.keywords) for row in rows]
            encoded = list(tokenizer(texts, add_special_tokens=False, **_QUIET)["input_ids"])
        for text, ids in zip(texts, encoded, strict=True):
            if not ids:
                raise DataError(f"the prompt {excerpt(text)} has no token; expected at least one")
        return [
            (text, tuple(int(token) for token in ids))
            for text, ids in zip(texts, encoded, strict=True)
        ]


def _drop_appended_ends(
    texts: Sequence[str], encoded: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Drop the end token that some tokenizers append, after which a model completes nothing.

    An end token that the text itself ends with is kept.
    """
    end = tokenizer.eos_token_id
    closed = [number for number, ids in enumerate(encoded) if ids and ids[-1] == end]
    if not closed:
        return
    # Where a tokenizer puts a token in front, its ids are longer than those of the text too.
    front = list(tokenizer(_PROBE, **_QUIET)["input_ids"])
    plain = _plain_ids(_PROBE, tokenizer)
    before = next((n for n in range(len(front)) if plain and front[n:][: len(plain)] == plain), 0)
    for number in closed:
        if len(encoded[number]) > before + len(_plain_ids(texts[number], tokenizer)):
            encoded[number].pop()


def _plain_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a text without special tokens around it."""
    return list(tokenizer.encode(text, add_special_tokens=False, **_QUIET))


class RenderedPrompts:
    """Prompts by split and row, rendered on first use."""

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
        """Return the prompt of a row; an error names split and row."""
        known = self._known[split]
        if index not in known:
            row = self._splits[split][index]
            try:
                text, ids = self._template.render(row, self._tokenizer)
            except EvoGrpoError as error:
                raise type(error)(f"{split}, row {index}: {error}") from error
            known[index] = self._fitting(split, Prompt(index, text, ids, row))
        return known[index]

    def of_row(self, prompt: Prompt) -> Prompt:
        """Return the prompt of the row that another prompt, of any template, was made from."""
        index = prompt.index
        for split in SPLITS:
            rows = self._splits[split]
            if index < len(rows) and rows[index] is prompt.columns:
                return self.get(split, index)
        text, ids = self._template.render(prompt.columns, self._tokenizer)
        return Prompt(index, text, ids, prompt.columns)

    def limit(self, max_context_length: int) -> None:
        """Render all prompts and check that each leaves room for one token.

        Args:
            max_context_length: Tokens of prompt and completion together, >= 2.
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
        """Render missing prompts with one call of the tokenizer, far faster than one call each."""
        missing = [index for index in indices if index not in self._known[split]]
        rows = [self._splits[split][index] for index in missing]
        # `get` raises the error of a prompt, with its row.
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


def _chat(
    conversation: Messages,
    row: DatasetRow,
    tokenizer: PreTrainedTokenizerBase,
    keywords: Mapping[str, Any],
) -> str:
    # Imported here: it comes with transformers, and is only needed once a tokenizer exists.
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise ConfigError(
            "conversation: the tokenizer has no chat template to send it through; "
            'use a raw template instead, such as prompt: "{question}\\nA:"'
        )
    messages = [
        {"role": message["role"], "content": _fill(message["content"], row)}
        for message in conversation
    ]
    continues = messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **keywords,
        )
    except (TemplateError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ConfigError(
            f"conversation: the tokenizer's chat template refuses messages with the roles {roles}: "
            f"{error}"
        ) from error
    return str(text)


def _messages(template: object) -> tuple[Mapping[str, str], ...]:
    expected = (
        'a raw string or a list of messages such as [{"role": "user", "content": "{question}"}]'
    )
    if not isinstance(template, Sequence) or isinstance(template, bytes) or not template:
        raise ConfigError(f"conversation template: expected {expected}, got {template!r}")
    for number, message in enumerate(template):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise ConfigError(
                f"conversation template, message {number}: expected the keys role and content, got "
                f"{message!r}"
            )
        if not all(isinstance(value, str) for value in message.values()):
            raise ConfigError(
                f"conversation template, message {number}: expected role and content to be "
                f"strings, got {message!r}"
            )
    return tuple(dict(message) for message in template)


class _Present(dict[str, Any]):
    """A row of which None is no value: a prompt would say "None"."""

    def __getitem__(self, column: str) -> Any:  # noqa: ANN401 -- of any column
        value = super().__getitem__(column)
        if value is None:
            raise DataError(f'the column "{column}" is None; {NO_NONE}')
        return value


def _fill(text: str, row: DatasetRow) -> str:
    try:
        return text.format_map(_Present(row))
    except DataError as error:
        raise DataError(f"prompt template {excerpt(text)} cannot be filled: {error}") from None
    # A format such as {answer:03d} on a string, or a value whose own __format__ refuses it.
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
        why = shorten(repr(error))
        raise DataError(f"prompt template {excerpt(text)} cannot be filled: {why}") from error


def _columns(text: str) -> list[str]:
    remedy = "a brace that is no column is doubled, as in \\boxed{{}}"
    try:
        parts = [part[1:] for part in string.Formatter().parse(text)]
    except ValueError as error:
        raise ConfigError(f"prompt template {excerpt(text)}: {error}; {remedy}") from error
    names: list[str] = []
    for name, form, conversion in parts:
        if name is None:
            continue
        if not name or name.isdigit() or set(name) & set(".[]"):
            raise ConfigError(
                f"prompt template {excerpt(text)}: expected a column's name in braces, "
                f"got {{{shorten(name)}}}; {remedy}"
            )
        if wrong := _wrong_format(form or "", conversion):
            raise ConfigError(f"prompt template {excerpt(text)}, column {shorten(name)!r}: {wrong}")
        names.append(name)
    return names


def _wrong_format(form: str, conversion: str | None) -> str | None:
    """Return the error of a conversion and format after a column's name, or None."""
    if conversion not in _CONVERSIONS:
        return f"expected !r, !s or !a, got !{conversion}"
    if "{" in form:
        return (
            f"expected a plain format such as {{answer:03d}}, got {shorten(form)!r}; a column "
            "cannot give the format of another one"
        )
    # int() reads the digits of every script, and so does format().
    if any(len(digits) > 9 or int(digits) > WIDEST for digits in re.findall(r"\d+", form)):
        return f"expected a width of at most {WIDEST:,} characters, got {shorten(form)!r}"
    return None

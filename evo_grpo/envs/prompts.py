"""Turn rows into prompt text and token ids, by a raw template or the chat template."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from evo_grpo.envs import conversations
from evo_grpo.envs.data.tables import NO_NONE, SPLITS, DatasetRow, Split, place_of, require_columns
from evo_grpo.envs.messages import excerpt
from evo_grpo.errors import ConfigError, DataError, EvoGrpoError, PromptTooLongError
from evo_grpo.escaping import shorten
from evo_grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # for annotations only: it loads torch

Messages = Sequence[Mapping[str, str]]
Tokenizer: TypeAlias = "PreTrainedTokenizerBase"
#: Without this, transformers warns about a long prompt, which is then refused here by its row.
_QUIET: dict[str, Any] = {"verbose": False}


#: A text that ends in no special token.
_PROBE = "1"

#: Rows in one call of the tokenizer.
CHUNK = 1000
WIDEST = 1000
"""Greatest width or precision in a format such as {answer:03d}; more could fill the memory."""
SYSTEM = ("system", "developer")
"""Roles of a system message, which comes first in a conversation."""
_CONVERSIONS = (None, "", "r", "s", "a")


@dataclass(frozen=True)
class Template:
    r"""A prompt template: exactly one of a raw text and a conversation.

    Attributes:
        text: A raw template with columns in braces, such as "{question}\nA:".
        conversation: Messages with templates as content, for the tokenizer's chat template. If the
            last message is the assistant's, a completion continues it. A message of the role
            `conversations.MESSAGES` stands for the messages in the column that its content names.
        keywords: Keyword arguments of the chat template.
    """

    text: str | None = None
    conversation: tuple[Mapping[str, str], ...] | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, template: str | Messages | None) -> Template:
        """Return the template for a raw string or a list of messages."""
        if isinstance(template, str):
            prompt_template = cls(text=template)
        else:
            prompt_template = cls(conversation=_messages(template))
        prompt_template.columns()
        return prompt_template

    def columns(self) -> dict[str, str]:
        """Return column -> "the prompt template" for all columns, as `require_columns` takes it."""
        parts = [self.text or ""] + [message["content"] for message in self.conversation or ()]
        return {column: "the prompt template" for part in parts for column in _columns(part)}

    @property
    def conversations(self) -> list[str]:
        """Names of the columns whose lists of messages the template inserts."""
        return [
            message["content"][1:-1]
            for message in self.conversation or ()
            if message["role"] == conversations.MESSAGES
        ]

    def fitted(
        self, rows: Sequence[DatasetRow], name: str, who: str = "the prompt template"
    ) -> tuple[list[DatasetRow], list[str]]:
        """Return rows with the parts of conversations as columns, and each prompt's plain text.

        Refuses rows without the template's columns. In errors, `name` describes the rows, and `who`
        what needs the columns.
        """
        needs = dict.fromkeys(self.columns(), who)
        require_columns(rows, needs, name, filled=needs)
        fitted_rows: list[DatasetRow] = []
        texts: list[str] = []
        for number, row in enumerate(rows):
            try:
                fitted, messages = self.filled(row)
            except DataError as error:
                place = place_of(row, f"{name}, row {number}")
                raise DataError(f"{place}: {error}") from error
            fitted_rows.append(fitted)
            texts.append(_text(messages))
        return fitted_rows, texts

    def plain(self, row: DatasetRow) -> str:
        """Return a prompt's text without the chat template; equal texts mean equal prompts."""
        return _text(self.messages(row))

    def messages(self, row: DatasetRow) -> list[dict[str, Any]]:
        """Return the messages of a row's prompt; a raw template becomes one message of the user."""
        return self.filled(row)[1]

    def filled(self, row: DatasetRow) -> tuple[DatasetRow, list[dict[str, Any]]]:
        """Return a row with the parts of its conversations as columns, and its prompt's messages.

        A system message at the start of a column's messages is moved before the examples.
        """
        full_row, messages = row, list[dict[str, Any]]()
        for message in self.conversation or ({"role": "user", "content": self.text or ""},):
            role, content = message["role"], message["content"]
            if role != conversations.MESSAGES:
                messages.append({"role": role, "content": _fill(content, row)})
                continue
            parts = conversations.parts_of(row, content[1:-1])
            full_row, row_messages = (
                conversations.with_parts(full_row, parts),
                parts[conversations.MESSAGES],
            )
            if messages and row_messages[0]["role"] in SYSTEM:
                if messages[0]["role"] in SYSTEM:
                    raise DataError(
                        f'the column "{content[1:-1]}" has a system message, and so has the '
                        "template of the prompt (env.system_prompt or env.conversation); remove one"
                    )
                messages.insert(0, row_messages[0])
                row_messages = row_messages[1:]
            messages += row_messages
        return full_row, messages

    def render(self, row: DatasetRow, tokenizer: Tokenizer) -> tuple[str, tuple[int, ...]]:
        """Return the text and the token ids of a row's prompt."""
        return self.render_all([row], tokenizer)[0]

    def render_all(
        self, rows: Sequence[DatasetRow], tokenizer: Tokenizer
    ) -> list[tuple[str, tuple[int, ...]]]:
        """Return the text and the token ids of each row's prompt, by one call of the tokenizer."""
        if not rows:
            return []
        if self.conversation is None:
            texts = [self.plain(row) for row in rows]
            encoded = [list(ids) for ids in tokenizer(texts, **_QUIET)["input_ids"]]
            _drop_appended_ends(texts, encoded, tokenizer)
        else:
            texts = [chat(self.messages(row), tokenizer, self.keywords) for row in rows]
            encoded = list(tokenizer(texts, add_special_tokens=False, **_QUIET)["input_ids"])
        for text, ids in zip(texts, encoded, strict=True):
            if not ids:
                raise DataError(f"the prompt {excerpt(text)} has no token; expected at least one")
        return [
            (text, tuple(int(token) for token in ids))
            for text, ids in zip(texts, encoded, strict=True)
        ]


def _text(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(message["content"] for message in messages)


def _drop_appended_ends(
    texts: Sequence[str], encoded: Sequence[list[int]], tokenizer: Tokenizer
) -> None:
    """Drop end tokens that the tokenizer appended to `encoded`: a model would stop after them."""
    end = tokenizer.eos_token_id
    ended_rows = [number for number, ids in enumerate(encoded) if ids and ids[-1] == end]
    if not ended_rows:
        return
    # Ids are longer than those of the text also where a tokenizer puts a token in front.
    probe = list(tokenizer(_PROBE, **_QUIET)["input_ids"])
    plain = _plain_ids(_PROBE, tokenizer)
    offset = next((n for n in range(len(probe)) if plain and probe[n:][: len(plain)] == plain), 0)
    for number in ended_rows:
        if len(encoded[number]) > offset + len(_plain_ids(texts[number], tokenizer)):
            encoded[number].pop()


def _plain_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False, **_QUIET))


class RenderedPrompts:
    """The prompts that one template makes of all rows, by split and row; rendered on first use.

    If `answer` is a number, a prompt that is too long is cut so that it leaves this number of
    tokens for a completion (`env.too_long: truncate_left`). If `answer` is None, a prompt that
    leaves no token for a completion is refused.
    """

    def __init__(
        self,
        splits: Mapping[Split, Sequence[DatasetRow]],
        template: Template,
        tokenizer: Tokenizer,
        answer: int | None = None,
    ) -> None:
        self._answer = answer
        self._splits = splits
        self._template = template
        self._tokenizer = tokenizer
        self._known: dict[Split, dict[int, Prompt]] = {split: {} for split in SPLITS}
        self.max_context_length: int | None = None

    def get(self, split: Split, index: int) -> Prompt:
        """Return the prompt of a row; an error names split and row."""
        prompts = self._known[split]
        if index not in prompts:
            row = self._splits[split][index]
            try:
                text, ids = self._template.render(row, self._tokenizer)
            except EvoGrpoError as error:
                raise type(error)(f"{place_of(row, f'{split}, row {index}')}: {error}") from error
            prompts[index] = self._fitting(split, Prompt(index, text, ids, row))
        return prompts[index]

    def of_row(self, prompt: Prompt) -> Prompt:
        """Render the row of `prompt`, which may come from another template, with this template."""
        index = prompt.index
        for split in SPLITS:
            rows = self._splits[split]
            if index < len(rows) and rows[index] is prompt.columns:
                return self.get(split, index)
        text, ids = self._template.render(prompt.columns, self._tokenizer)
        return Prompt(index, text, ids, prompt.columns)

    def messages(self, prompt: Prompt) -> list[dict[str, Any]] | None:
        """Return the messages of a prompt; None if the template is raw text."""
        template = self._template
        return None if template.conversation is None else template.messages(prompt.columns)

    def limit(self, max_context_length: int) -> None:
        """Set the context length in tokens, render all prompts, and refuse or cut too long ones."""
        if max_context_length < 2:
            raise ConfigError(f"max_context_length: expected >= 2 tokens, got {max_context_length}")
        self.max_context_length = max_context_length
        for split in SPLITS:
            for index, _ in enumerate(self.lengths(split)):
                self._known[split][index] = self._fitting(split, self.get(split, index))

    def lengths(self, split: Split) -> list[int]:
        """Render all prompts of a split, and return their lengths in tokens."""
        count = len(self._splits[split])
        for start in range(0, count, CHUNK):
            self._render(split, range(start, min(start + CHUNK, count)))
        return [len(self.get(split, index).token_ids) for index in range(count)]

    def _render(self, split: Split, indices: Sequence[int]) -> None:
        """Render the prompts of `indices` not rendered yet, by a single call of the tokenizer."""
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
            if self._answer is not None:
                ids = prompt.token_ids[-max(1, limit - self._answer) :]
                text = str(self._tokenizer.decode(list(ids)))
                return replace(prompt, text=text, token_ids=ids)
            place = place_of(prompt.columns, f"{split}, row {prompt.index}")
            raise PromptTooLongError(
                f"{place}: expected a prompt of at most {limit - 1} tokens, so that one more fits "
                f"the context of {limit}, got {length}: {excerpt(prompt.text)}; "
                "shorten it, set env.too_long, or raise max_model_len where the model allows it"
            )
        return prompt


def fitting_rows(
    rendered: Sequence[RenderedPrompts],
    splits: Mapping[Split, Sequence[DatasetRow]],
    most: int,
    *,
    whole: bool = True,
) -> dict[Split, list[DatasetRow]]:
    """Return, by split, the rows whose prompts have at most `most` tokens in every template.

    `rendered` has the prompts of each template. If `whole`, a split without such rows is refused.
    """
    fitting: dict[Split, list[DatasetRow]] = {}
    for split, rows in splits.items():
        longest = map(max, zip(*(prompts.lengths(split) for prompts in rendered), strict=True))
        fitting[split] = [row for row, length in zip(rows, longest, strict=True) if length <= most]
        if whole and not fitting[split]:
            raise DataError(
                f"env.too_long: expected a {split} row with a prompt of at most {most} tokens, the "
                "examples of env.few_shot included, got none; shorten them, or raise "
                "algorithm.max_model_len where the model allows it"
            )
    return fitting


def chat(
    messages: list[dict[str, Any]],
    tokenizer: Tokenizer,
    keywords: Mapping[str, Any],
) -> str:
    """Render messages to text by the tokenizer's chat template, which gets `keywords`."""
    # Imported here: it comes with transformers, and is only needed once a tokenizer exists.
    from jinja2 import TemplateError

    # A stranger's template may add a number to a text, or begin a range without end.
    errors = (TemplateError, ValueError, TypeError, ArithmeticError, LookupError, RecursionError)
    if not tokenizer.chat_template:
        raise ConfigError(
            "conversation: the tokenizer has no chat template to send it through; "
            'use a raw template instead, such as prompt: "{question}\\nA:"'
        )
    continues = messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **keywords,
        )
    except errors as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ConfigError(
            f"conversation: the tokenizer's chat template refuses messages with the roles {roles}: "
            f"{'it is nested too deep' if isinstance(error, RecursionError) else error}"
        ) from error
    return str(text)


def _messages(template: object) -> tuple[Mapping[str, str], ...]:
    if not isinstance(template, Sequence) or isinstance(template, bytes) or not template:
        raise ConfigError(
            "conversation template: expected a raw string or a list of messages such as "
            f'[{{"role": "user", "content": "{{question}}"}}], got {template!r}'
        )
    for number, message in enumerate(template):
        expected = ""
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            expected = "the keys role and content"
        elif not all(isinstance(value, str) for value in message.values()):
            expected = "strings as role and content"
        elif message["role"] == (role := conversations.MESSAGES) and not re.fullmatch(
            r"\{\w+\}", message["content"]
        ):
            expected = f"a column alone, such as {{messages}}, as the content of {role!r}"
        if expected:
            raise ConfigError(
                f"conversation template, message {number}: expected {expected}, got {message!r}"
            )
    return tuple(dict(message) for message in template)


class _Present(dict[str, Any]):
    """A row that raises DataError for values that prompts cannot print, such as None or images."""

    def __init__(self, row: DatasetRow, text: str) -> None:
        super().__init__(row)
        self._text = text

    def __getitem__(self, column: str) -> Any:  # noqa: ANN401 -- of any column
        value = super().__getitem__(column)
        if isinstance(value, str):
            return value
        items = value.values() if isinstance(value, Mapping) else value
        items = items if isinstance(value, Mapping | list | tuple) else [value]
        alone = self._text.strip() == f"{{{column}}}" and conversations.holds_messages(value)
        if value is None:
            why = f"is None; {NO_NONE}"
        elif any(
            isinstance(item, bytes) or type(item).__module__.startswith("PIL.") for item in items
        ):
            why = (
                f"is {type(value).__name__}, such as of an image, where text is expected; the "
                "models here read text: take it out of the prompt"
            )
        # A conversion, as in {column!r}, asks for the printed value.
        elif (alone or conversations.is_conversation(value)) and f"{{{column}!" not in self._text:
            kind = "a mapping" if isinstance(value, Mapping) else "a list"
            why = (
                f"is {kind} where text is expected: {excerpt(str(value))}; join it to text in the "
                "file; or, where messages are sent, as in env.conversation, send it as "
                f'{{role: {conversations.MESSAGES}, content: "{{{column}}}"}}; or print it as it '
                f"is with {{{column}!r}}"
            )
        else:
            return value
        raise DataError(f'the column "{column}" {why}')


def _fill(text: str, row: DatasetRow) -> str:
    try:
        return text.format_map(_Present(row, text))
    # A format such as {answer:03d} on a string, or a value whose own __format__ refuses it.
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
        why = str(error) if isinstance(error, DataError) else shorten(repr(error))
        raise DataError(f"prompt template {excerpt(text)} cannot be filled: {why}") from error


def _columns(text: str) -> list[str]:
    names: list[str] = []
    try:
        for _, name, form, conversion in string.Formatter().parse(text):
            if name is not None:
                _check_field(name, form or "", conversion)
                names.append(name)
    except ValueError as error:
        raise ConfigError(
            f"prompt template {excerpt(text)}: {error}; a brace that is no column is doubled, as "
            "in \\boxed{{}}"
        ) from error
    return names


def _check_field(name: str, form: str, conversion: str | None) -> None:
    """Raise ValueError if braces hold more than a column name, a conversion and a plain format."""
    # int() reads the digits of every script, and so does format().
    widths = re.findall(r"\d+", form)
    if not name or name.isdigit() or set(name) & set(".[]"):
        why = f"expected a column's name in braces, got {{{shorten(name)}}}"
    elif conversion not in _CONVERSIONS:
        why = f"expected !r, !s or !a, got !{conversion}"
    elif "{" in form:
        why = f"expected a plain format such as {{answer:03d}}, got {shorten(form)!r}"
    elif any(len(digits) > 9 or int(digits) > WIDEST for digits in widths):
        why = f"expected a width of at most {WIDEST:,} characters, got {shorten(form)!r}"
    else:
        return
    raise ValueError(why)

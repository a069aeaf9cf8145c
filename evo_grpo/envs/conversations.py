"""Columns that hold messages: the conversation of a row, as datasets of chat models have it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from evo_grpo.envs.data.tables import Row
from evo_grpo.envs.messages import excerpt
from evo_grpo.envs.task import DatasetRow
from evo_grpo.errors import DataError

MESSAGES = "messages"
"""Role of a message of a template in whose place the messages of a column stand; and the usual
column of whole conversations, whose last message of the assistant is the target."""
TARGET = "target"
"""Column that a row gets with the target of its conversation."""
ROLES = ("system", "developer", "user", "assistant", "tool")
#: JSON, or what Python prints, of a list of messages.
_LOOKS = re.compile(r"""\s*\[\s*\{[^{}]{0,500}?["'](role|content)["']\s*:""")
_FORM = '[{"role": "user", "content": "..."}]'


def holds_messages(value: object) -> bool:
    """Return whether a value is a list, or JSON, as a column of conversations has it."""
    return _as_list(value) is not None or (isinstance(value, str) and bool(_LOOKS.match(value)))


def is_conversation(value: object) -> bool:
    """Return whether a value is one message, also with the keys of other datasets, or a list."""
    first = next(iter(_as_list(value) or ()), value)
    return isinstance(first, Mapping) and bool({"role", "content", "from"} & first.keys())


def parts_of(row: DatasetRow, column: str) -> dict[str, Any]:
    """Return the messages to ask a model with, as `messages`, and the target answer, as `target`.

    Text is a message of the user. Only the column `messages` has a target.
    """
    messages = messages_of(row[column], f'the column "{column}"')
    if column != MESSAGES or messages[-1]["role"] != "assistant":
        return {MESSAGES: messages}
    if len(messages) == 1:
        raise DataError(
            f'the column "{column}", message 0: expected a question before the answer of the '
            "assistant, which is the target, got none; add it, or drop the row"
        )
    return {MESSAGES: messages[:-1], TARGET: messages[-1]["content"]}


def with_parts(row: DatasetRow, parts: Mapping[str, Any]) -> DatasetRow:
    """Return a row with the parts of its conversation; columns with the same names are kept."""
    more = {name: value for name, value in parts.items() if name not in row}
    if not more:
        return row
    return row.having(more) if isinstance(row, Row) else {**row, **more}


def messages_of(value: object, where: str) -> list[dict[str, Any]]:
    """Return the messages of a conversation, or of text, with their content as text."""
    if isinstance(value, str):
        if not _LOOKS.match(value):
            return [{"role": "user", "content": value}]
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise DataError(
                f"{where}: expected messages as JSON, got {excerpt(str(value))}; write the rows as "
                "JSON lines or Parquet, which hold messages themselves"
            ) from None
    messages = _as_list(value)
    if not messages:
        raise DataError(
            f"{where}: expected text or messages such as {_FORM}, got {excerpt(repr(value))}; "
            "mend or drop the row"
        )
    return [
        cast("dict[str, Any]", one)
        if _is_plain(one)
        else _message(one, f"{where}, message {number}")
        for number, one in enumerate(messages)
    ]


def _is_plain(value: object) -> bool:
    if type(value) is not dict:
        return False
    message = cast("dict[Any, Any]", value)
    known = message.get("role") in ROLES and type(message.get("content")) is str
    return known and (len(message) == 2 or all(one is not None for one in message.values()))


def _message(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not {"role", "content"} <= value.keys():
        raise DataError(
            f"{where}: expected the keys role and content, got {excerpt(repr(value))}; rename its "
            f"keys, as in {_FORM}"
        )
    message = {str(key): one for key, one in cast("Mapping[Any, Any]", value).items()}
    # Tables fill missing keys of a message with None.
    message = {key: one for key, one in message.items() if one is not None}
    if message.get("role") not in ROLES:
        raise DataError(
            f"{where}: expected role to be one of {', '.join(ROLES)}, got "
            f"{excerpt(repr(value['role']))}; rename it"
        )
    if "content" not in message and message.get("tool_calls"):
        message["content"] = ""
    return {**message, "content": text_of(message.get("content"), where)}


def text_of(value: object, where: str) -> str:
    """Return the content of a message as text; parts of text are joined."""
    if isinstance(value, str):
        return value
    parts = _as_list(value)
    if parts is None:
        raise DataError(
            f"{where}: expected content to be text, or a list of parts of text, got "
            f"{excerpt(repr(value))}; mend or drop the row"
        )
    texts: list[str] = []
    for number, part in enumerate(parts):
        fields = cast("Mapping[Any, Any]", part) if isinstance(part, Mapping) else {}
        text = part if isinstance(part, str) else fields.get("text")
        if not isinstance(text, str) or fields.get("type", "text") != "text":
            raise DataError(
                f"{where}, part {number}: expected a part of text such as "
                f'{{"type": "text", "text": "..."}}, got {excerpt(repr(part))}; only text can be '
                "sent, so drop the row or the part"
            )
        texts.append(text)
    return "".join(texts)


def _as_list(value: object) -> list[Any] | None:
    if isinstance(value, list | tuple):
        return list(cast("Sequence[Any]", value))
    if hasattr(value, "tolist") and getattr(value, "ndim", 0):  # pandas reads lists so
        return list(cast("Any", value).tolist())
    return None

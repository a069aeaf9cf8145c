"""Reads conversations in columns of rows, in the forms that datasets of chat models use."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from evo_grpo.envs.data.tables import DatasetRow, Row
from evo_grpo.envs.messages import excerpt
from evo_grpo.errors import DataError

MESSAGES = "messages"
"""Role of a message in a template that stands for all messages in a column of the row. It is also
the usual name of such a column; if its last message is the assistant's, that message is the target.
"""
TARGET = "target"
"""Column that `with_parts` adds to a row: the target of its conversation."""
ROLES = ("system", "developer", "user", "assistant", "tool")
#: The beginning of a list of messages, as JSON or as Python prints it.
_MESSAGE_LIST = re.compile(r"""\s*\[\s*\{[^{}]{0,500}?["'](role|content)["']\s*:""")
_FORM = '[{"role": "user", "content": "..."}]'


def holds_messages(value: object) -> bool:
    """Return whether a value is a list, or text that begins like a list of messages."""
    return _as_list(value) is not None or (
        isinstance(value, str) and bool(_MESSAGE_LIST.match(value))
    )


def is_conversation(value: object) -> bool:
    """Return whether a value is a message, or a list that begins with a message."""
    message = next(iter(_as_list(value) or ()), value)
    return isinstance(message, Mapping) and bool({"role", "content", "from"} & message.keys())


def parts_of(row: DatasetRow, column: str) -> dict[str, Any]:
    """Split the conversation in `column` into `messages`, the prompt, and `target`, its answer.

    Plain text counts as one message of the user. Only the column "messages" can have a target: its
    last message, if that is the assistant's.
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
    """Return a row with the parts of its conversation as new columns; existing columns are kept.

    `parts` is a result of `parts_of`.
    """
    added = {name: value for name, value in parts.items() if name not in row}
    if not added:
        return row
    return row.having(added) if isinstance(row, Row) else {**row, **added}


def messages_of(value: object, where: str) -> list[dict[str, Any]]:
    """Return a conversation as a list of messages, each with text as its content.

    `value` is a list of messages, such a list as JSON, or plain text, which becomes one message of
    the user. `where` says in errors where the value is.
    """
    messages = _as_list(value)
    if isinstance(value, str):
        if not _MESSAGE_LIST.match(value):
            return [{"role": "user", "content": value}]
        with suppress(ValueError, RecursionError):
            messages = _as_list(json.loads(value))
    if not messages:
        raise DataError(
            f"{where}: expected text, or messages such as {_FORM}, also as JSON, got "
            f"{excerpt(str(value))}; JSON lines and Parquet hold messages themselves"
        )
    return [
        cast("dict[str, Any]", message)
        if _is_plain(message)
        else _message(message, f"{where}, message {number}")
        for number, message in enumerate(messages)
    ]


def _is_plain(value: object) -> bool:
    if type(value) is not dict:
        return False
    message = cast("dict[Any, Any]", value)
    is_text = message.get("role") in ROLES and type(message.get("content")) is str
    return is_text and (len(message) == 2 or all(field is not None for field in message.values()))


def _message(value: object, where: str) -> dict[str, Any]:
    fields = cast("Mapping[Any, Any]", value) if isinstance(value, Mapping) else {}
    if not {"role", "content"} <= fields.keys() or fields["role"] not in ROLES:
        raise DataError(
            f"{where}: expected the keys role and content, and one of {', '.join(ROLES)} as role, "
            f"got {excerpt(repr(value))}; rename them, as in {_FORM}"
        )
    # Tables fill missing keys of a message with None.
    message = {str(key): field for key, field in fields.items() if field is not None}
    if "content" not in message and message.get("tool_calls"):
        message["content"] = ""
    return {**message, "content": text_of(message.get("content"), where)}


def text_of(value: object, where: str) -> str:
    """Return `value`, the content of a message, as text; a list of text parts is joined."""
    if isinstance(value, str):
        return value
    parts = _as_list(value)
    texts = [_part_text(part) for part in parts or ()]
    if parts is None or None in texts:
        got = value if parts is None else parts[texts.index(None)]
        raise DataError(
            f"{where}: expected content to be text, or parts of text such as "
            f'{{"type": "text", "text": "..."}}, got {excerpt(repr(got))}; only text can be sent, '
            "so drop the row or the part"
        )
    return "".join(filter(None, texts))


def _part_text(part: object) -> str | None:
    if isinstance(part, str):
        return part
    fields = cast("Mapping[Any, Any]", part) if isinstance(part, Mapping) else {}
    text = fields.get("text") if fields.get("type", "text") == "text" else None
    return text if isinstance(text, str) else None


def _as_list(value: object) -> list[Any] | None:
    if isinstance(value, list | tuple):
        return list(cast("Sequence[Any]", value))
    if hasattr(value, "tolist") and getattr(value, "ndim", 0):  # pandas reads lists so
        return list(cast("Any", value).tolist())
    return None

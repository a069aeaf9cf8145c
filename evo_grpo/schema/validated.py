"""Build values from JSON, checked against their types."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from evo_grpo.escaping import shorten
from evo_grpo.schema.problems import dotted

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from pydantic import TypeAdapter

T = TypeVar("T")


def validated(schema: TypeAdapter[T], data: Mapping[str, Any] | bytes) -> T:
    """Build the value that a schema describes from JSON data, or from their text.

    Lists are accepted for tuples, and numbers may be NaN.

    Raises:
        ValueError: The data do not match; the message names the field, expectation and value.
    """
    try:
        # Through JSON: there, strict types accept a list for a tuple.
        given = data if isinstance(data, bytes) else json.dumps(data)
        return schema.validate_json(given, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = first["msg"][:1].lower() + first["msg"][1:]
        if first["type"] == "value_error":  # a validator's message is complete
            what = what.removeprefix("value error, ")
        else:
            what += f", got {shorten(repr(first['input']), 80)}"
        # Older releases of pydantic include the branch of a Mapping's schema in the path.
        path = tuple(
            part
            for part in first["loc"]
            if not str(part).startswith("json-or-python") and part != "[key]"
        )
        raise ValueError(f"{dotted(path)}: {what}") from None

"""What a file of JSON holds, checked against the types of what is built from it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from evo_grpo.printable import cut
from evo_grpo.schema.problems import dotted

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from pydantic import TypeAdapter

T = TypeVar("T")


def validated(schema: TypeAdapter[T], data: Mapping[str, Any]) -> T:
    """Build what a schema describes from values of JSON: lists for tuples, numbers may be NaN.

    Raises:
        ValueError: It names the field, what was expected and what came.
    """
    try:
        # As JSON, for which strict types take a list where Python has a tuple.
        return schema.validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = first["msg"][:1].lower() + first["msg"][1:]
        if first["type"] == "value_error":  # of a validator, whose sentence is whole
            what = what.removeprefix("value error, ")
        else:
            what += f", got {cut(repr(first['input']), 80)}"
        # Older releases of pydantic name the branch of a Mapping's schema on the way.
        path = tuple(
            part
            for part in first["loc"]
            if not str(part).startswith("json-or-python") and part != "[key]"
        )
        raise ValueError(f"{dotted(path)}: {what}") from None

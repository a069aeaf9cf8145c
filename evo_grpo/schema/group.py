"""Declares groups of settings. A setting is declared once: type, bounds, default and meaning.

Errors, signatures, mutation ranges, checkpoints, docs and the JSON Schema are derived from this
declaration.
"""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

import math
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticUndefined

from evo_grpo.schema.messages import REMEDY, describe, shown
from evo_grpo.schema.problems import Path, Problem, Problems, refuse
from evo_grpo.schema.validation import is_number, plain_number, unwritable

MUTATES = "mutates"
MOST_LEVELS = 60
"""Deepest nesting of a plain value; a file that contains the value may be a little deeper."""
_PLAIN_TYPES = frozenset({bool, int, float, str, type(None)})


class Group(BaseModel):
    """A frozen group of settings. Unknown names are errors.

    Types are strict: a quoted number in YAML is a string, and `true` is not 1. An integer is
    accepted for a float, and numpy's numbers for Python's. An empty group in YAML has its defaults.

    Raises:
        Problems: A `ConfigError` with all problems, each with its path.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    shorthand: ClassVar[str | None] = None
    """The field that a plain string sets: `env: sums` means `env: {kind: sums}`."""

    def __init__(self, /, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise Problems(*describe(error, type(self))) from None
        except RecursionError:  # plain values have no path here
            text = "expected plain values, but one contains itself or is nested too deeply"
            raise Problems(Problem((), text)) from None

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: object) -> object:
        if data is None:
            return {}
        if isinstance(data, str) and cls.shorthand is not None:
            return {cls.shorthand: data}
        if isinstance(data, dict):
            return _plain_values(cast("dict[str, object]", data))
        return data

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        mapping = handler(core_schema)
        if cls.shorthand is None:
            return mapping
        field = handler.resolve_ref_schema(mapping)["properties"][cls.shorthand]
        about = ("title", "description", "default")
        return {"anyOf": [{key: field[key] for key in field if key not in about}, mapping]}

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with some settings changed."""
        return type(self)(**{**dict(self), **changes})


def _plain_values(settings: dict[str, object]) -> dict[str, object]:
    """Return settings with numpy's numbers as Python's; reject keys that are not strings."""
    problems: list[Problem] = []
    plain = dict[str, object]()
    for name, value in settings.items():
        # A fast path: hyperparameters are copied thousands of times.
        kind = type(value)
        if kind in _PLAIN_TYPES or isinstance(value, BaseModel):
            plain[name] = value
            if (kind is int or kind is str) and (expected := unwritable(cast("str | int", value))):
                problems.append(Problem((name,), f"expected {expected}, got {shown(value)}"))
            continue
        problems += wrong_keys(value, (name,))
        plain[name] = plain_number(value)
    refuse(problems)
    return plain


def wrong_keys(value: object, path: Path) -> Iterator[Problem]:
    """Yield a problem for each key, at any depth, that is no string: pydantic may fail on it."""
    if isinstance(value, Mapping):
        for key, inner in cast("Mapping[Any, object]", value).items():
            if isinstance(key, str):
                yield from wrong_keys(inner, (*path, key))
            else:
                yield Problem((*path, key), f"expected a string as key, got {shown(key)}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(cast("list[object]", value)):
            yield from wrong_keys(inner, (*path, index))


def setting(
    default: Any = PydanticUndefined,  # noqa: ANN401 -- of the setting's own type
    meaning: str = "",
    *,
    factory: Callable[[], Any] | None = None,
    mutates: bool = False,
    remedy: str | None = None,
    **bounds: Any,
) -> Any:  # noqa: ANN401 -- stands for the value of the field
    """Declare a setting.

    Args:
        default: Default value; without one the setting is required.
        meaning: One or two sentences for the docs and for editors.
        factory: Function that returns the default, for a list or a mapping.
        mutates: Whether evolution may change the setting, which then differs between agents.
        remedy: Advice for messages about a wrong value.
        **bounds: Constraints of pydantic: gt, ge, lt, le, min_length, pattern, ...
    """
    extra: dict[str, Any] = {MUTATES: True} if mutates else {}
    if remedy is not None:
        extra[REMEDY] = remedy
    bounds["default" if factory is None else "default_factory"] = factory or default
    return Field(description=meaning, json_schema_extra=extra or None, **bounds)


def contradictions(group: object, *rows: tuple[str, object, str, str]) -> Iterator[Problem]:
    """Yield a problem for each row (dotted key, wrong, expected, remedy) whose `wrong` is true."""
    for key, wrong, expected, remedy in rows:
        if wrong:
            value = shown(attrgetter(key)(group))
            yield Problem(tuple(key.split(".")), f"expected {expected}, got {value}; {remedy}")


def computable(least: float, most: float = math.inf) -> AfterValidator:
    """Return a validator that refuses numbers > 0 outside [least, most], the limits of float32."""
    bounds = f">= {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
    expected = f"a number {bounds}, which float32 can compute with"

    def check(value: float | None) -> float | None:
        if value is not None and value > 0 and not least <= value <= most:
            raise ValueError(expected)
        return value

    return AfterValidator(check)


def same_as(group: type[Group], name: str) -> Any:  # noqa: ANN401 -- stands for the value of the field
    """Declare a setting exactly as another group declares it."""
    return group.model_fields[name]


def mutable_fields(group: type[Group]) -> list[str]:
    """Return the names of a group's settings that evolution may change, in order."""
    fields = group.model_fields.items()
    return [
        name
        for name, field in fields
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get(MUTATES)
    ]


def one_or_several(value: object) -> object:
    """Accept a string or a list of strings; the message for any other value names both."""
    items = cast("list[object]", list(value)) if isinstance(value, list | tuple) else [value]
    if not items or not all(isinstance(item, str) and item for item in items):
        raise ValueError("a string, or a list of at least one string")
    for item in items:
        _writable(str(item))
    return value if isinstance(value, str) else items


def only(good: Callable[[Any], object], expected: str) -> BeforeValidator:
    """Return a validator that refuses values unless `good(value)`; it turns tuples into lists."""

    def check(value: object) -> object:
        value = list(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else value
        if good(value):
            return value
        raise ValueError(expected)

    return BeforeValidator(check)


def pair(
    good: Callable[[float, float], bool], expected: str, *, or_none: bool = False
) -> BeforeValidator:
    """Return a validator of a list or tuple of two numbers (a, b) for which `good(a, b)` holds."""

    def check(value: object) -> object:
        items = cast("list[Any]", list(value)) if isinstance(value, list | tuple) else []
        if len(items) == 2 and all(map(is_number, items)) and good(*items):
            return tuple(float(item) for item in items)
        if value is None and or_none:
            return None
        raise ValueError(expected)

    return BeforeValidator(check)


def as_list(value: object) -> object:
    """Turn one group of settings into a list of one, and None into an empty list."""
    if value is None:
        return []
    if isinstance(value, str | Mapping | Group):
        return [cast("object", value)]
    return list(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else value


def plain(value: object, *, levels: int = 0) -> object:
    """Accept values that YAML can hold; tuples become lists."""
    if isinstance(value, str | int):
        return _writable(value)
    if value is None or isinstance(value, float):
        return value
    if levels > MOST_LEVELS:
        raise ValueError(f"at most {MOST_LEVELS} levels of lists and mappings")
    if isinstance(value, list | tuple):
        return [plain(item, levels=levels + 1) for item in cast("list[object]", value)]
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value)
        if all(isinstance(key, str) for key in items):
            return {
                _writable(str(key)): plain(item, levels=levels + 1) for key, item in items.items()
            }
    raise ValueError(
        "strings, numbers, true, false, null, lists and mappings with strings as keys "
        f"(found a {type(value).__name__}; a date has to be quoted)"
    )


def recorded(value: object) -> object:
    """Accept plain values whose numbers are all finite, as JSON requires."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("finite numbers (JSON, in which runs are recorded, has no others)")
    if isinstance(value, list | dict):
        inner = cast("list[object] | dict[str, object]", value)
        for item in inner.values() if isinstance(inner, dict) else inner:
            recorded(item)
    return value


def _writable(value: str | int) -> str | int:
    if expected := unwritable(value):
        raise ValueError(expected)
    return value


PlainMapping = Annotated[dict[str, Any], BeforeValidator(plain), AfterValidator(recorded)]

"""What every group of settings has in common, and the types that several fields share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration.

    Attributes:
        path: YAML path below the group that noticed it, one name or list index per part.
        text: What was expected, what came, and the remedy.
    """

    path: tuple[str | int, ...]
    text: str


class Problems(ValueError):
    """Several problems found by one check; pydantic carries it to `messages`, which unrolls it."""

    def __init__(self, found: list[Problem]) -> None:
        super().__init__("; ".join(problem.text for problem in found))
        self.found = found


class Group(BaseModel):
    """A group of settings: frozen, no unknown keys, nothing converted behind the user's back.

    Strict, because a quoted number in YAML is a text and `true` is no 1; an integer is accepted where
    a float is meant. A group that is left empty in YAML has its defaults.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    shorthand: ClassVar[str | None] = None
    """The field that a plain text stands for: `model: tiny-sums` means `model: {name: tiny-sums}`."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        if data is None:
            return {}
        if isinstance(data, str) and cls.shorthand is not None:
            return {cls.shorthand: data}
        return data


def one_or_several(value: Any) -> Any:
    """Accept a text or a list of texts; one message instead of one per branch of the union."""
    if isinstance(value, str) and value:
        return value
    several = isinstance(value, list | tuple) and len(value) > 0
    if several and all(isinstance(item, str) and item for item in value):
        return list(value)
    raise ValueError("a text, or a list of at least one text")


def clip_coefficient(value: Any) -> Any:
    """Accept c, or ratio bounds [low, high]."""
    expected = "a number in (0, 1], or ratio bounds [low, high] with 0 <= low < high"
    if _is_number(value):
        if not 0 < value <= 1:
            raise ValueError(expected)
        return float(value)
    if isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value)):
        low, high = (float(end) for end in value)
        if 0 <= low < high < float("inf"):
            return low, high
    raise ValueError(expected)


def plain(value: Any) -> Any:
    """Accept what YAML can hold, so that the resolved configuration can be written; tuples become lists."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    raise ValueError(
        "texts, numbers, true, false, null, lists and mappings with texts as keys "
        f"(found a {type(value).__name__}; a date has to be quoted)"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unless_none(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


Texts = Annotated[str | list[str], BeforeValidator(one_or_several)]
OptionalTexts = Annotated[str | list[str] | None, BeforeValidator(_unless_none(one_or_several))]
# Not strict: the check above has turned it into a float or a tuple, and a list is right in YAML.
Clip = Annotated[float | tuple[float, float], BeforeValidator(clip_coefficient)]
PlainMapping = Annotated[dict[str, Any], BeforeValidator(plain)]

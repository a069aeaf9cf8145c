"""What every group of settings has in common, and the types that several fields share."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator


class Problem(NamedTuple):
    """One thing that is wrong with a configuration.

    Attributes:
        path: YAML path below the group that noticed it, one name or list index per part.
        text: What was expected, what came, and the remedy.
    """

    path: tuple[str | int, ...]
    text: str


class Problems(ValueError):
    """Several problems found by one check; pydantic carries it to `messages`, which unrolls it."""

    def __init__(self, *found: Problem) -> None:
        super().__init__("; ".join(problem.text for problem in found))
        self.found = found


class Group(BaseModel):
    """A group of settings: frozen, no unknown keys, nothing converted behind the user's back.

    Strict, because a quoted number in YAML is a text and `true` is no 1; an integer is accepted
    where a float is meant. A group that is left empty in YAML has its defaults.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    shorthand: ClassVar[str | None] = None
    """The field that a plain text stands for: `env: sums` means `env: {kind: sums}`."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: object) -> object:
        if data is None:
            return {}
        if isinstance(data, str) and cls.shorthand is not None:
            return {cls.shorthand: data}
        return data


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice most like a name, or None; exchanged letters win over replaced ones."""
    import difflib  # only a mistake needs it

    close = difflib.get_close_matches(name, list(choices), n=3)
    return next((c for c in close if sorted(c) == sorted(name)), close[0] if close else None)


def one_or_several(value: object) -> object:
    """Accept a text or a list of texts; one message instead of one per branch of the union."""
    items = cast("list[object]", list(value)) if isinstance(value, list | tuple) else [value]
    if items and all(isinstance(item, str) and item for item in items):
        return value if isinstance(value, str) else items
    raise ValueError("a text, or a list of at least one text")


def optional_texts(value: object) -> object:
    """Accept what `one_or_several` does, or nothing."""
    return None if value is None else one_or_several(value)


def clip_coefficient(value: object) -> object:
    """Accept c, or ratio bounds [low, high]; in YAML a list, elsewhere also a tuple."""
    items = cast("list[object]", list(value)) if isinstance(value, list | tuple) else [value]
    numbers = [float(n) for n in items if isinstance(n, int | float) and not isinstance(n, bool)]
    if len(numbers) == len(items) == 1 and 0 < numbers[0] <= 1 and items[0] is value:
        return numbers[0]
    if len(numbers) == len(items) == 2 and 0 <= numbers[0] < numbers[1] < float("inf"):
        return tuple(numbers)
    raise ValueError("a number in (0, 1], or ratio bounds [low, high] with 0 <= low < high")


def plain(value: object) -> object:
    """Accept what YAML holds, so that the resolved file can be written; tuples become lists."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast("list[object]", value)]
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value)
        if all(isinstance(key, str) for key in items):
            return {key: plain(item) for key, item in items.items()}
    raise ValueError(
        "texts, numbers, true, false, null, lists and mappings with texts as keys "
        f"(found a {type(value).__name__}; a date has to be quoted)"
    )


Texts = Annotated[str | list[str], BeforeValidator(one_or_several)]
OptionalTexts = Annotated[str | list[str] | None, BeforeValidator(optional_texts)]
Clip = Annotated[float | tuple[float, float], BeforeValidator(clip_coefficient)]
PlainMapping = Annotated[dict[str, Any], BeforeValidator(plain)]

"""Objects from Python in place of settings that name a file or a function."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Annotated, Any, cast, final

from pydantic import BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import (
    CoreSchema,
    PydanticOmit,
    PydanticSerializationUnexpectedValue,
    core_schema,
)

from evo_grpo.settings.hub import HubDataset

OBJECT = "object:"
"""Begins the value that a run folder has in place of an object."""


@final
class Given:
    """An object from Python, equal only to itself; a run folder has its description in its place.

    Attributes:
        value: The object.
    """

    def __init__(self, value: Any) -> None:  # noqa: ANN401 -- any object
        self.value = value

    @property
    def description(self) -> str:
        """The name of a function, or the type of rows with their number."""
        name = getattr(self.value, "__name__", None) or type(self.value).__name__
        if isinstance(self.value, Mapping):
            splits = ", ".join(map(str, cast("Mapping[object, object]", self.value)))
            return f"{name} with {splits}"
        if not callable(self.value) and isinstance(self.value, Sized):
            return f"{name} of {len(self.value)} rows"
        return str(name)

    def __str__(self) -> str:
        return f"{OBJECT}{self.description}"

    def __repr__(self) -> str:
        return f"<{self.description}>"

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(_written, when_used="json")
        return core_schema.is_instance_schema(cls, serialization=written)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        raise PydanticOmit  # a file cannot hold one


def _written(value: object) -> str:
    if not isinstance(value, Given):  # another member of a union
        raise PydanticSerializationUnexpectedValue("expected an object from Python")
    return str(value)


def _source(value: object) -> object:
    """Accept the name of a file, a dataset of the Hub, or rows from Python."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict) and _is_plain(cast("dict[object, object]", value)):
        return HubDataset(**cast("dict[str, Any]", value))
    if isinstance(value, str) and not value:
        raise ValueError("a string that is not empty")
    if value is None or isinstance(value, str | Given | HubDataset):
        return value
    if isinstance(value, Mapping) or hasattr(value, "__getitem__"):
        return Given(cast("Any", value))  # `tables.read_rows` refuses what holds no rows
    raise ValueError("the name of a file, a dataset of the Hub, or rows from Python")


def _is_plain(value: dict[object, object]) -> bool:
    """Return whether a mapping has settings of a dataset, and not its splits or columns."""
    return "path" in value or all(isinstance(one, str) for one in value.values())


def is_function(value: object) -> bool:
    """Return whether a value is a reward function from Python."""
    # A RewardFunction, which has a function, cannot be imported here.
    return callable(value) or callable(getattr(value, "fn", None))


Source = Annotated[str | HubDataset | Given | None, BeforeValidator(_source)]


def by_splits(sources: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return sources in which a `DatasetDict` given as train stands for its splits.

    A mapping with the key train is one. It fills in validation and test where they are missing.
    """
    train = sources.get("train")
    train = train.value if isinstance(train, Given) else train
    if not isinstance(train, Mapping) or "train" not in train:
        return sources
    splits = cast("Mapping[str, Any]", train)
    rest = {name: sources.get(name) for name in ("validation", "test")}
    own = {name: splits.get(name) if one is None else one for name, one in rest.items()}
    return {**sources, "train": splits["train"], **own}

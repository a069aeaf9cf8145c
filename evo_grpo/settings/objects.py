"""Values that settings may have in place of names: Python objects, datasets of the Hub."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Annotated, Any, cast, final

from pydantic import BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticOmit, PydanticSerializationUnexpectedValue, core_schema

from evo_grpo.schema.group import Group, setting

OBJECT = "object:"
"""Start of the text that a run folder has in place of an object."""


@final
class PythonObject:
    """An object from Python, equal only to itself; a run folder records its `description`.

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
    ) -> core_schema.CoreSchema:
        serializer = core_schema.plain_serializer_function_ser_schema(_written, when_used="json")
        return core_schema.is_instance_schema(cls, serialization=serializer)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        raise PydanticOmit  # a YAML file cannot hold an object


def _written(value: object) -> str:
    if not isinstance(value, PythonObject):  # another member of a union
        raise PydanticSerializationUnexpectedValue("expected an object from Python")
    return str(value)


def _columns(value: object) -> object:
    """Accept a list of columns that keep their names, or a mapping of new names to columns."""
    if isinstance(value, list | tuple):
        value = {name: name for name in cast("list[object]", value) if isinstance(name, str)}
    if isinstance(value, Mapping):
        columns = cast("Mapping[object, object]", value)
        if all(isinstance(name, str) and name for name in columns.values()):
            return columns
    raise ValueError("a list of columns, or a mapping of names to columns of the dataset")


class HubDataset(Group):
    """A dataset of the Hugging Face Hub. A plain string is its path: `train: openai/gsm8k`."""

    path: str = setting(meaning="Its id, `owner/name`.", min_length=1)
    name: str | None = setting(
        None, "Its configuration, such as `main`; null takes its default.", min_length=1
    )
    split: str | None = setting(
        None,
        "Its split, or a part of it such as `train[:1000]`; null takes the split with the name of "
        "the key: train, validation or test.",
        min_length=1,
    )
    revision: str | None = setting(
        None,
        "Branch, tag or commit; null takes the newest. A run records the commit, and goes on with "
        "it.",
        min_length=1,
    )
    columns: Annotated[dict[str, str], BeforeValidator(_columns)] = setting(
        factory=dict[str, str],
        meaning="Columns to read: a list, or a mapping of the names that prompt and reward use to "
        "its columns, such as `{question: problem}`; empty reads all.",
    )


def _source(value: object) -> object:
    """Accept the name of a file, a dataset of the Hub, or rows from Python."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict) and _is_plain(cast("dict[object, object]", value)):
        return HubDataset(**cast("dict[str, Any]", value))
    if isinstance(value, str) and not value:
        raise ValueError("a string that is not empty")
    if value is None or isinstance(value, str | PythonObject | HubDataset):
        return value
    if isinstance(value, Mapping) or hasattr(value, "__getitem__"):
        return PythonObject(cast("Any", value))  # `tables.read_rows` refuses one without rows
    raise ValueError("the name of a file, a dataset of the Hub, or rows from Python")


def _is_plain(value: dict[object, object]) -> bool:
    """Return whether a mapping has settings of a Hub dataset, rather than splits or columns."""
    return "path" in value or all(isinstance(item, str) for item in value.values())


def is_function(value: object) -> bool:
    """Return whether a value is a reward function from Python."""
    # RewardFunction, which has its function as `fn`, cannot be imported here.
    return callable(value) or callable(getattr(value, "fn", None))


Source = Annotated[str | HubDataset | PythonObject | None, BeforeValidator(_source)]


def by_splits(sources: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return sources in which a `DatasetDict` under `train` is replaced by its splits.

    Any mapping with the key "train" counts as a `DatasetDict`. Its validation and test splits are
    used where `sources` has None.
    """
    train = sources.get("train")
    train = train.value if isinstance(train, PythonObject) else train
    if not isinstance(train, Mapping) or "train" not in train:
        return sources
    splits = cast("Mapping[str, Any]", train)
    others = {name: sources.get(name) for name in ("validation", "test")}
    filled = {
        name: splits.get(name) if source is None else source for name, source in others.items()
    }
    return {**sources, "train": splits["train"], **filled}

"""A dataset of the Hugging Face Hub, as a setting."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Mapping
from typing import Annotated, cast

from pydantic import BeforeValidator

from evo_grpo.schema.group import Group, setting


def _columns(value: object) -> object:
    """Accept a list of columns that keep their names, or a mapping of new names to theirs."""
    if isinstance(value, list | tuple):
        value = {name: name for name in cast("list[object]", value) if isinstance(name, str)}
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) and name for name in cast("Mapping[object, object]", value).values()
    ):
        raise ValueError("a list of columns, or a mapping of names to columns of the dataset")
    return cast("object", value)


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

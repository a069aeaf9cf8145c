"""Validates `evolve.selection` and `evolve.exploration`: a kind, its settings, or a class."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Mapping
from typing import Annotated, ClassVar, cast

from pydantic import BeforeValidator, Discriminator, Tag

from evo_grpo.evolve.explore import mutate, on_copy, optuna, resample, schedule
from evo_grpo.evolve.select import halving, pareto, tournament, truncation
from evo_grpo.schema.group import Group, PlainMapping, setting
from evo_grpo.schema.problems import Problems
from evo_grpo.schema.validation import shown

OWN = "module:Class"
"""The kind of a user-defined strategy in messages and in the schema."""
_OWN_PATTERN = r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*$"


class UserStrategy(Group):
    """A user-defined class that implements `evo_grpo.Selector` or `evo_grpo.Explorer`, by name.

    Its module is imported when a run is prepared, not when settings are read.
    """

    tag: ClassVar[str] = OWN

    kind: str = setting(
        meaning='Module and class, for instance "my_strategies:MyStrategy".', pattern=_OWN_PATTERN
    )
    args: PlainMapping = setting(meaning="Keyword arguments of the class.", factory=dict)


def _kind(value: object) -> str | None:
    """Return the kind of a strategy, or of a strategy's settings; None if there is none."""
    if isinstance(value, Mapping):
        kind = cast("Mapping[str, object]", value).get("kind")
    else:
        kind = getattr(value, "kind", None)
    return OWN if isinstance(kind, str) and ":" in kind else None if kind is None else str(kind)


by_kind = Discriminator(_kind)
"""Discriminates strategies by their kind; a kind with a colon is a user-defined class."""


def kind_or_settings(default: str, method: str) -> BeforeValidator:
    """Return the validator that turns a strategy setting into a mapping with a kind.

    A setting without a kind gets `default`. An object with a method named `method` is an error,
    because a file cannot hold an object; only `Population.train` takes one.
    """

    def expand(value: object) -> object:
        if isinstance(value, str):
            return {"kind": value}
        if value is None:
            return {"kind": default}
        if isinstance(value, Mapping):
            return {"kind": default, **cast("Mapping[str, object]", value)}
        if isinstance(value, Group):
            return value
        if callable(getattr(value, method, None)):
            text = (
                f"expected a name that a file can hold, got {shown(value)}; name the class as "
                f'"{OWN}", or give the object to Population.train'
            )
            raise Problems.one(text)
        plain = isinstance(value, bool | int | float | list | tuple)
        raise ValueError("a mapping" if plain else f"a strategy with a method {method}")

    return BeforeValidator(expand)


Selection = Annotated[
    Annotated[tournament.TournamentSelection, Tag("tournament")]
    | Annotated[truncation.TruncationSelection, Tag("truncation")]
    | Annotated[halving.HalvingSelection, Tag("halving")]
    | Annotated[pareto.ParetoSelection, Tag("pareto")]
    | Annotated[halving.NoSelection, Tag("none")]
    | Annotated[UserStrategy, Tag(OWN)],
    by_kind,
    kind_or_settings("tournament", method="plan"),
]
"""The setting `evolve.selection`: a kind, a mapping with a kind, or the name of a class."""

Exploration = Annotated[
    Annotated[mutate.Mutations, Tag("mutate")]
    | Annotated[on_copy.LowerLROnCopy, Tag("on_copy")]
    | Annotated[resample.Resample, Tag("resample")]
    | Annotated[optuna.OptunaExploration, Tag("optuna")]
    | Annotated[schedule.ScheduleExploration, Tag("schedule")]
    | Annotated[on_copy.NoExploration, Tag("none")]
    | Annotated[UserStrategy, Tag(OWN)],
    by_kind,
    kind_or_settings("mutate", method="explore"),
]
"""The setting `evolve.exploration`: a kind, a mapping with a kind, or the name of a class."""

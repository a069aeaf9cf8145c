"""Finds the values of an agent that are outside their ranges."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Iterator
from typing import NamedTuple

from evo_grpo.schema.hparams import Hparams, Value
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter, plain_choice


class Outside(NamedTuple):
    """An agent's initial value that is outside its range; a distance from 1 for a clip pair."""

    name: str
    value: Value
    parameter: RLParameter

    def told(self, where: str = "of its range", remedy: str | None = None) -> str:
        """Return the expected values, and what a user can do."""
        named = isinstance(self.value, str | bool)
        shown = plain_choice(self.value) if named else f"{self.value:g}"
        ranged = self.parameter.choices is None
        usual = "move it, or widen the range" if ranged else "take one of them, or add it to them"
        return f"expected {self.parameter.expected(where)}, got {shown}; {remedy or usual}"


def outside(hparams: Hparams, hp_config: HyperparameterConfig) -> Iterator[Outside]:
    """Yield the values of an agent that are outside their ranges."""
    for name in hp_config.names():
        for value in values_of(hparams, name):
            if not hp_config[name].allows(value):
                yield Outside(name, value, hp_config[name])


def values_of(hparams: Hparams, name: str) -> list[Value]:
    """Return the values to compare with a range: none for None, two distances for a clip pair."""
    if name == "clip_coef" and isinstance(hparams.clip_coef, tuple):
        low, high = hparams.clip_coef
        return [1 - low, high - 1]  # the range of clip_coef is that of the distance from 1
    value = hparams.get(name)
    return [] if value is None else [value]  # None means all rows, or no clipping

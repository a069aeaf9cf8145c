"""Ranges of the hyperparameters that may mutate, and an agent's values outside of its ranges."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

import math
import warnings
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple, Self, cast

from pydantic import (
    BeforeValidator,
    ConfigDict,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from evo_grpo.errors import ConfigError
from evo_grpo.schema.group import Group, pair, setting, wrong_keys
from evo_grpo.schema.hparams import (
    CLIP_ENDS,
    LEAST_LR,
    LORA,
    MOST_LR,
    MUTABLE,
    REWARD_WEIGHT,
    Hparams,
    Value,
    has_no_order,
    is_mutable,
    type_of,
)
from evo_grpo.schema.messages import other_name, shown
from evo_grpo.schema.problems import MOST_PROBLEMS, Problem, Problems, nearest, refuse
from evo_grpo.schema.validation import is_number

Choices = tuple[Value, ...]

CLIPS = ("clip_coef", *CLIP_ENDS)
ROUNDING = 1e-12
"""Tolerance of a range for rounding: 1 - 0.8 is not exactly 0.2."""
_PLURALS = {str: "names", int: "integers", float: "numbers"}
DECADE = 10.0
"""Factor by which lr may move in either direction in the default range."""


def _type_name(value: object) -> object:
    return {int: "int", float: "float"}.get(value, value) if isinstance(value, type) else value


def _choices(value: object) -> object:
    """Accept a list of distinct names, or of distinct numbers, which are sorted."""
    if value is None:
        return None
    if isinstance(value, list | tuple) and value:
        items = cast("list[object]", list(value))
        if all(isinstance(item, str) and item for item in items):
            values = cast("list[float | str]", items)
        elif all(map(is_number, items)):
            values = sorted(cast("list[float]", items))
        else:
            raise ValueError("names alone, or numbers alone")
        if len(set(values)) == len(values):
            return tuple(values)
        raise ValueError("each choice once")
    raise ValueError("a list of names or of numbers")


_Start = pair(
    lambda low, high: low <= high,
    "two numbers [low, high] with low <= high, or null",
    or_none=True,
)


class RLParameter(Group):
    """Range and step of one hyperparameter that may mutate, or the values it may have.

    In a range, a mutation multiplies the value by `shrink_factor` or `grow_factor`. The factor is
    drawn so that the expected step in log space is zero (with 0.8 and 1.2, the value grows with
    probability 0.55). If both were equally likely, values would drift down, by a third in twenty
    mutations. A value of 0 moves to a hundredth of the range. Integers are rounded and move by at
    least 1.

    With `choices`, a mutation takes the next smaller or greater number, or any other name, each
    with the same probability.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"not": {"required": ["choices"]}},
            "then": {"required": ["min", "max"]},
        }
    )

    min: float = setting(0.0, "Minimum; of `choices`, the least number.", ge=0)
    max: float = setting(0.0, "Maximum; of `choices`, the greatest number.", ge=0)
    dtype: Annotated[Literal["float", "int"] | None, BeforeValidator(_type_name)] = setting(
        None, "`int` or `float`; null takes the type of the hyperparameter."
    )
    shrink_factor: float = setting(0.8, "Factor of a mutation that lowers the value.", gt=0, lt=1)
    grow_factor: float = setting(1.2, "Factor of a mutation that raises the value.", gt=1)
    start: Annotated[tuple[float, float] | None, _Start] = setting(
        None,
        "`[low, high]` inside the range. The first population is drawn from it; mutations move "
        "between `min` and `max`. null draws from the whole range.",
    )
    choices: Annotated[tuple[int | float | str, ...] | None, BeforeValidator(_choices)] = setting(
        None,
        "The possible values, in place of `min` and `max`: names or numbers.",
    )

    def __init__(self, *values: Any, **settings: Any) -> None:
        # Positional arguments are those of AgileRL, which has neither a start nor choices.
        names = [name for name in type(self).model_fields if name not in ("start", "choices")]
        if len(values) > len(names):
            text = f"RLParameter: expected at most {', '.join(names)}, got {len(values)} values"
            raise ConfigError(f"{text}; leave the last ones out")
        by_name = dict(zip(names, values, strict=False))
        super().__init__(**by_name, **settings)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        numbers = _numbers(self.choices or ())
        ends = (numbers[0], numbers[-1]) if numbers else (0.0, 0.0)
        refuse(self._problems(ends))
        if self.choices is not None:
            for name, end in zip(("min", "max"), ends, strict=True):
                object.__setattr__(self, name, end)
        return self

    def _problems(self, ends: tuple[float, float]) -> Iterator[Problem]:
        """Yield the problems of the range or choices; `ends` are the least and greatest choice."""
        given_ends = [name for name in ("min", "max") if name in self.model_fields_set]
        if self.choices is not None:
            for name, end in zip(("min", "max"), ends, strict=True):
                if name in given_ends and getattr(self, name) != end:
                    text = f"expected choices, or min and max, got both; remove {name} or choices"
                    yield Problem((name,), text)
            if self.start is not None:
                text = "expected none beside choices, all of which the first population has"
                yield Problem(("start",), f"{text}; remove it")
            return
        if len(given_ends) < 2:
            for name in sorted({"min", "max"} - set(given_ends), reverse=True):
                text = f"missing; expected {name}imum, or choices in place of min and max"
                yield Problem((name,), text)
            return
        low, high = self.start or (self.min, self.max)
        if self.min > self.max:
            text = f"expected min <= max, got min {self.min:g} > max {self.max:g}; swap the two"
            yield Problem((), text)
        elif not self.min <= low <= high <= self.max:
            text = f"expected a part of the range [{self.min:g}, {self.max:g}], got a start "
            text += f"outside: [{low:g}, {high:g}]; move it, or widen the range"
            yield Problem(("start",), text)

    def allows(self, value: float | str) -> bool:
        """Return whether a value is one of the choices, or in the range apart from rounding."""
        if self.choices is not None:
            return value in self.choices
        if isinstance(value, str):
            return False
        return self.min - ROUNDING <= value <= self.max + ROUNDING

    def expected(self, where: str = "of its range") -> str:
        """Return the expectation in words: "a value inside of its range [1, 2]", "one of a, b"."""
        if self.choices is not None:
            return f"one of {', '.join(map(str, self.choices))}"
        return f"a value inside {where} [{self.min:g}, {self.max:g}]"

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with some settings changed; new `choices` replace a range."""
        values = dict(self)
        if {"min", "max"} & changes.keys():
            values.pop("choices")
        elif changes.get("choices", self.choices) is not None:
            values = {name: value for name, value in values.items() if name not in ("min", "max")}
        return type(self)(**{**values, **changes})

    @model_serializer(mode="wrap")
    def _without_what_choices_say(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # In a file, choices stand alone, so that a choice may be added by hand.
        values = dump(self)
        for name in ("choices",) if self.choices is None else ("min", "max", "start"):
            values.pop(name, None)
        return values

    def within(self, low: float, high: float) -> Self:
        """Return a copy with another range and without a `start`."""
        return self.replace(min=low, max=high, start=None)

    @property
    def first(self) -> Self:
        """The range that the first population is drawn from."""
        return self if self.start is None else self.within(*self.start)

    @property
    def grow_probability(self) -> float:
        """Probability of `grow_factor` with which the expected step in log space is zero."""
        down, up = -math.log(self.shrink_factor), math.log(self.grow_factor)
        return down / (down + up)

    def clip(self, value: float) -> float:
        """Return the nearest choice or, in a range, the clamped value; integers are rounded."""
        if self.choices is not None:
            return min(_numbers(self.choices), key=lambda choice: abs(choice - value))
        inside = min(max(value, self.min), self.max)
        return round(inside) if self.dtype == "int" else float(inside)

    def step(self, value: Value, draw: float) -> Value:
        """Return `value` mutated, and different if possible; `draw` is uniform in [0, 1)."""
        if self.choices is not None:
            candidates = _beside(value, self.choices)
            return candidates[int(draw * len(candidates))] if candidates else value
        if isinstance(value, str):
            raise TypeError(f"expected a number, which a range moves, got {value!r}")
        grow = draw < self.grow_probability
        if value <= self.min:
            grow = True
        elif value >= self.max:
            grow = False
        if value <= 0:
            moved = max(self.min, (self.max - self.min) * 0.01)
        else:
            moved = value * (self.grow_factor if grow else self.shrink_factor)
        if self.dtype == "int":
            moved = round(moved)
            if moved == value:
                moved += 1 if grow else -1
        return self.clip(moved)


def _numbers(choices: Choices) -> list[float]:
    return [choice for choice in choices if not isinstance(choice, str)]


def _beside(value: Value, choices: Choices) -> list[Value]:
    """Return the choices that a mutation may take: other names, or the numbers next to a number."""
    if isinstance(value, str):
        return [choice for choice in choices if choice != value]
    numbers = _numbers(choices)
    lower, higher = [n for n in numbers if n < value], [n for n in numbers if n > value]
    return [*lower[-1:], *higher[:1]]


class HyperparameterConfig:
    """The hyperparameters that may mutate.

    For example `HyperparameterConfig(lr=RLParameter(min=1e-5, max=1e-3))`; a mapping such as
    `{"min": 1e-5, "max": 1e-3}` stands for an `RLParameter`.

    Args:
        **parameters: Name of a mutable hyperparameter -> its range. A `batch_size` or
            `max_grad_norm` of None counts as the maximum of its range.

    Raises:
        ConfigError: A name cannot mutate, or an end of a range is not a valid value.
    """

    def __init__(self, **parameters: RLParameter | Mapping[str, Any]) -> None:
        wrong: list[Problem] = []
        ranges: dict[str, RLParameter] = {}
        for name, parameter in _one_by_one(parameters).items():
            if len(wrong) > MOST_PROBLEMS:
                break
            try:
                ranges[name] = _typed(name, parameter)
            except Problems as error:
                wrong += error.below(name).problems
        if "clip_coef" in parameters and set(CLIP_ENDS) & set(parameters):
            text = "expected clip_coef alone, or clip_low and clip_high, got both; remove one"
            wrong.append(Problem(("clip_coef",), text))
        low, high = (ranges.get(name) for name in CLIP_ENDS)
        if low is not None and high is not None and low.min >= high.max:
            text = f"expected min below the max of clip_high, got {low.min:g} >= {high.max:g}"
            wrong.append(Problem(("clip_low",), text))
        refuse(wrong)
        self.parameters = ranges

    def names(self) -> list[str]:
        """Return the names of the hyperparameters, in the order of the arguments."""
        return list(self.parameters)

    def __getitem__(self, name: str) -> RLParameter:
        return self.parameters[name]

    def __bool__(self) -> bool:
        """Return whether any hyperparameter may mutate."""
        return bool(self.parameters)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HyperparameterConfig) and self.parameters == other.parameters

    def __hash__(self) -> int:
        return hash(tuple(self.parameters.items()))

    def __repr__(self) -> str:
        ranges = ", ".join(f"{name}={parameter!r}" for name, parameter in self.parameters.items())
        return f"HyperparameterConfig({ranges})"


def _one_by_one(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return ranges by name; those in a group of settings get dotted names, such as `lora.r`."""
    flat: dict[str, Any] = {}
    for name, value in parameters.items():
        ranges: dict[str, Any] = {name: value}
        if f"{name}." in (REWARD_WEIGHT, LORA) and isinstance(value, Mapping):
            group = cast("Mapping[object, Any]", value)
            ranges = {f"{name}.{key}": inner for key, inner in group.items()}
        for key, inner in ranges.items():
            are_mappings = isinstance(inner, Mapping) and isinstance(flat.get(key), Mapping)
            flat[key] = {**flat[key], **inner} if are_mappings else inner
    return flat


def default_ranges(lr: float) -> dict[str, RLParameter]:
    """Return the default ranges: for lr alone, from a tenth of `lr` to ten times `lr`."""
    # The range is smaller near the smallest and the largest lr that is allowed.
    return {"lr": RLParameter(max(lr / DECADE, LEAST_LR), min(lr * DECADE, MOST_LR))}


def _typed(name: str, given: RLParameter | Mapping[str, Any]) -> RLParameter:
    """Check the range given for a hyperparameter; return it with the hyperparameter's type."""
    if not is_mutable(name):
        near, name_here = nearest(name, MUTABLE), other_name(name, MUTABLE)
        hint = f" Did you mean {near!r}?" if near else ""
        hint = f" Here it is {name_here}." if name_here in MUTABLE else hint
        raise Problems.one(
            f"nothing of that name can mutate.{hint} Expected one of: {', '.join(MUTABLE)}, "
            f"{REWARD_WEIGHT}<name of a reward function>"
        )
    if not isinstance(given, RLParameter | Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are untyped
        text = f"expected a range, got {shown(given)}; write {{min: 1e-6, max: 3e-4}}"
        if has_no_order(name):
            text = f"expected {{choices: [...]}}, got {shown(given)}; name the possible values"
        raise Problems.one(text)
    refuse(wrong_keys(given, ()))
    parameter = given if isinstance(given, RLParameter) else RLParameter(**given)
    refuse(islice(_misfits(name, parameter), 1))  # later checks rely on earlier ones
    kind = type_of(name)
    if parameter.choices is None:
        return parameter.replace(dtype=kind.__name__)
    choices = tuple(kind(choice) for choice in parameter.choices)
    return parameter.replace(choices=choices, dtype=None if has_no_order(name) else kind.__name__)


def _misfits(name: str, parameter: RLParameter) -> Iterator[Problem]:
    """Yield a problem for each reason why a range or its choices do not fit a hyperparameter."""
    kind = type_of(name)
    values: list[tuple[str, Value]] = []
    if parameter.choices is not None:
        yield from _choice_misfits(name, parameter, parameter.choices)
        values = [("choices", kind(choice)) for choice in parameter.choices]
    elif has_no_order(name):
        text = "expected choices, a list of possible values, got min and max; it is no number"
        yield Problem((), text)
    else:
        yield from _range_misfits(name, parameter)
        if name not in CLIP_ENDS:  # whether a bound is valid depends on the other bound
            values = [("min", kind(parameter.min)), ("max", kind(parameter.max))]
    for key, value in values:  # refused here, before a mutation in a run reaches it
        try:
            Hparams().with_value(name, value)
        except Problems as error:
            yield from (Problem((key,), problem.text) for problem in error.problems)


def _choice_misfits(name: str, parameter: RLParameter, choices: Choices) -> Iterator[Problem]:
    kind = type_of(name)
    if name in CLIPS:
        text = "expected min and max, since the two ends of the clip range move; remove choices"
        yield Problem(("choices",), text)
    if has_no_order(name) and parameter.dtype is not None:
        yield Problem(("dtype",), f"expected none, since {name} is no number; remove it")
    fits = isinstance(choices[0], kind) if has_no_order(name) else bool(_numbers(choices))
    if not fits or (kind is int and not all(float(choice).is_integer() for choice in choices)):
        expected = f"{_PLURALS[kind]}, which values of {name} are"
        yield Problem(("choices",), f"expected {expected}, got {shown(list(choices))}")


def _range_misfits(name: str, parameter: RLParameter) -> Iterator[Problem]:
    low, high, start = parameter.min, parameter.max, parameter.start or ()
    # AgileRL's examples use "float" for integers, so only the reverse is an error.
    if parameter.dtype == "int" and type_of(name) is float:
        yield Problem(("dtype",), f"expected 'float', which {name} is, got 'int'")
    if type_of(name) is int:
        if not (low.is_integer() and high.is_integer()):
            yield Problem((), f"expected integers for min and max, got {low:g} and {high:g}")
        if not all(end.is_integer() for end in start):
            text = f"expected two integers, got {list(start)}; {name} is one"
            yield Problem(("start",), text)
    if name == "clip_coef" and low == 0:
        yield Problem(("min",), "expected > 0, got 0")


def warn_if_nothing_mutates(rl_hp: float, hp_config: HyperparameterConfig) -> None:
    """Warn if mutations have a weight `rl_hp` above 0 but no hyperparameter may mutate."""
    if rl_hp > 0 and not hp_config:
        warnings.warn(
            "Mutations: the agents have no hyperparameters to mutate, so nothing mutates; build "
            "them with hyperparameters={'lr': {'min': 1e-5, 'max': 1e-3}}, or give no_mutation=1, "
            "rl_hp=0",
            UserWarning,
            stacklevel=3,
        )


class ValueOutsideRange(NamedTuple):
    """An agent's initial value that is outside its range.

    For an end of a pair in clip_coef, `value` is the distance of that end from 1.
    """

    name: str
    value: Value
    parameter: RLParameter

    def told(self, where: str = "of its range", remedy: str | None = None) -> str:
        """Return the message: the expected values, the value and the remedy."""
        text = self.value if isinstance(self.value, str) else f"{self.value:g}"
        is_range = self.parameter.choices is None
        advice = (
            "move it, or widen the range" if is_range else "take one of them, or add it to them"
        )
        return f"expected {self.parameter.expected(where)}, got {text}; {remedy or advice}"


def outside(hparams: Hparams, hp_config: HyperparameterConfig) -> Iterator[ValueOutsideRange]:
    """Yield the values of an agent that are outside their ranges."""
    for name in hp_config.names():
        for value in values_of(hparams, name):
            if not hp_config[name].allows(value):
                yield ValueOutsideRange(name, value, hp_config[name])


def values_of(hparams: Hparams, name: str) -> list[Value]:
    """Return the values that a range applies to: none for None, two distances from 1 for a pair."""
    if name == "clip_coef" and isinstance(hparams.clip_coef, tuple):
        low, high = hparams.clip_coef
        return [1 - low, high - 1]  # the range of clip_coef is that of the distance from 1
    value = hparams.get(name)
    return [] if value is None else [value]  # None means all rows, or no clipping

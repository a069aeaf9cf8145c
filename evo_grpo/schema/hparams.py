"""What an agent trains with, and which of it may mutate within which bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from evo_grpo import validation as rules
from evo_grpo.errors import ConfigError

ClipCoef = float | tuple[float, float]


@dataclass(frozen=True)
class Hparams:
    """One agent's hyperparameters. All may differ between agents of one batch.

    The defaults are those of the reference API.

    Attributes:
        lr: AdamW learning rate, > 0.
        beta: KL coefficient, >= 0; 0 computes no reference pass.
        clip_coef: A scalar c in (0, 1] for ratio bounds [1 - c, 1 + c], or the absolute bounds
            (low, high).
        group_size: Completions per prompt, >= 2.
        temperature: Sampling temperature, > 0; log-probs in the loss use it too.
        top_p: Nucleus mass kept, in (0, 1]; 1 keeps all.
        top_k: Tokens kept, >= 0; 0 keeps all.
        min_p: Least probability kept, relative to the likeliest token, in [0, 1).
        repetition_penalty: Divides the logits of tokens seen before, > 0; 1 does nothing.
        max_grad_norm: Gradient-norm clip, > 0.
        update_epochs: Passes over a step's rows, >= 1.
        batch_size: Rows (completions) per optimizer step, >= 1; None takes all rows of the step at
            once.
    """

    lr: float = 5e-7
    beta: float = 0.001
    clip_coef: ClipCoef = 0.2
    group_size: int = 8
    temperature: float = 0.9
    top_p: float = 0.95
    top_k: int = 50
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_grad_norm: float = 0.1
    update_epochs: int = 1
    batch_size: int | None = 16

    def __post_init__(self) -> None:
        """Refuse values of another type or out of range."""
        for name in _RULES:
            object.__setattr__(self, name, rules.plain_number(getattr(self, name)))
        if isinstance(self.clip_coef, list):
            object.__setattr__(self, "clip_coef", tuple(self.clip_coef))
        rules.check_all(_RULES, {name: getattr(self, name) for name in _RULES})

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """The absolute ratio bounds (low, high)."""
        if isinstance(self.clip_coef, tuple):
            return self.clip_coef
        return 1 - self.clip_coef, 1 + self.clip_coef

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-able values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Hparams:
        """Build from a mapping as written by `to_dict`; unknown names are errors."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"hyperparameters: unknown {unknown}, expected among {sorted(known)}")
        return cls(**dict(values))

    def get(self, name: str) -> float:
        """Return a scalar by its name; clip_low and clip_high name the pair's two ends."""
        if name in ("clip_low", "clip_high"):
            return self.clip_bounds[name == "clip_high"]
        return getattr(self, name)

    def with_value(self, name: str, value: float) -> Hparams:
        """Return a copy with one parameter set, by the names of `get`."""
        if name in ("clip_low", "clip_high"):
            low, high = self.clip_bounds
            pair = (value, high) if name == "clip_low" else (low, value)
            return replace(self, clip_coef=pair)
        return replace(self, **{name: value})


def _is_clip(value: Any) -> bool:  # noqa: ANN401 -- whatever a caller passed
    if isinstance(value, tuple):
        return len(value) == 2 and all(map(rules.is_number, value)) and 0 <= value[0] < value[1]
    return rules.is_number(value) and 0 < value <= 1


_RULES: dict[str, rules.Rule] = {
    "lr": rules.above_zero(),
    "beta": rules.not_negative(),
    "group_size": rules.whole(2, "a group of one has no advantage"),
    "temperature": rules.above_zero(),
    "top_p": rules.number(lambda v: 0 < v <= 1, "a number in (0, 1]", "1.0 keeps all tokens"),
    "top_k": rules.whole(0, "0 keeps all tokens"),
    "min_p": rules.number(lambda v: 0 <= v < 1, "a number in [0, 1)", "0.0 keeps all tokens"),
    "repetition_penalty": rules.above_zero("1.0 does nothing"),
    "max_grad_norm": rules.number(lambda v: v > 0, "a number > 0", "math.inf never clips"),
    "update_epochs": rules.whole(1),
    "batch_size": rules.whole(1, "None takes all rows of a step at once").or_none(),
    "clip_coef": rules.Rule(
        _is_clip,
        "a scalar in (0, 1] or ratio bounds (low, high) with 0 <= low < high",
        "for 0.2 below and 0.28 above give (0.8, 1.28)",
    ),
}

# Which parameters a mutation can move so that the next round really differs.
MUTABLE: dict[str, type] = {
    "lr": float,
    "beta": float,
    "clip_coef": float,
    "clip_low": float,
    "clip_high": float,
    "group_size": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "max_grad_norm": float,
    "update_epochs": int,
    "batch_size": int,
}


@dataclass(frozen=True)
class RLParameter:
    """Bounds and step of one hyperparameter that may mutate.

    A mutation multiplies by `shrink_factor` or `grow_factor`. The direction is drawn so that the
    expected step in log space is zero (with 0.8 and 1.2 it grows with probability 0.55): a fair
    coin would drift down, by a third in twenty mutations. A value of 0 leaves 0 by a hundredth of
    the range.

    Attributes:
        min: Least value, in the parameter's unit.
        max: Greatest value.
        dtype: float or int; ints are rounded and move by at least 1.
        shrink_factor: In (0, 1).
        grow_factor: > 1.
    """

    min: float
    max: float
    dtype: type = float
    shrink_factor: float = 0.8
    grow_factor: float = 1.2

    def __post_init__(self) -> None:
        """Refuse empty ranges and factors that do not move."""
        for name in ("min", "max", "shrink_factor", "grow_factor"):
            object.__setattr__(self, name, rules.plain_number(getattr(self, name)))
        if not (math.isfinite(self.min) and math.isfinite(self.max)):
            raise ConfigError(
                f"RLParameter: min and max must be finite, got min={self.min}, max={self.max}"
            )
        if self.min > self.max:
            raise ConfigError(
                f"RLParameter: min must not exceed max, got min={self.min} > max={self.max}"
            )
        if self.min < 0:
            raise ConfigError(f"RLParameter: min must be >= 0, got {self.min}")
        if self.dtype not in (float, int):
            raise ConfigError(f"RLParameter: dtype must be float or int, got {self.dtype!r}")
        if not 0 < self.shrink_factor < 1:
            raise ConfigError(
                f"RLParameter: shrink_factor must lie in (0, 1), got {self.shrink_factor}"
            )
        if not self.grow_factor > 1:
            raise ConfigError(f"RLParameter: grow_factor must exceed 1, got {self.grow_factor}")

    @property
    def grow_probability(self) -> float:
        """Probability of growing that makes the expected log step zero."""
        down, up = -math.log(self.shrink_factor), math.log(self.grow_factor)
        return down / (down + up)

    def clip(self, value: float) -> float:
        """Return the value moved into [min, max] and rounded when the parameter is an int."""
        inside = min(max(value, self.min), self.max)
        return round(inside) if self.dtype is int else float(inside)

    def step(self, value: float, draw: float) -> float:
        """Return the mutated value.

        Args:
            value: The current value.
            draw: A uniform number in [0, 1).

        Returns:
            A value in [min, max]; equal to `value` only when min == max (or no int lies between).
        """
        grow = draw < self.grow_probability
        if value <= self.min:
            grow = True
        elif value >= self.max:
            grow = False
        if value <= 0:
            moved = max(self.min, (self.max - self.min) * 0.01)
        else:
            moved = value * (self.grow_factor if grow else self.shrink_factor)
        if self.dtype is int:
            moved = round(moved)
            if moved == value:
                moved += 1 if grow else -1
        return self.clip(moved)


class HyperparameterConfig:
    """The hyperparameters that may mutate.

    For example `HyperparameterConfig(lr=RLParameter(min=1e-5, max=1e-3))`.

    Args:
        **parameters: Name of a mutable hyperparameter -> `RLParameter`.

    Raises:
        ConfigError: For a name that cannot mutate, or an int parameter with a float range.
    """

    def __init__(self, **parameters: RLParameter) -> None:
        """Check the names; see the class docstring."""
        for name, parameter in parameters.items():
            if name not in MUTABLE:
                raise ConfigError(
                    f"HyperparameterConfig: {name!r} cannot mutate; choose among {sorted(MUTABLE)}"
                )
            if not isinstance(parameter, RLParameter):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are untyped
                raise ConfigError(
                    f"HyperparameterConfig: {name} must be an RLParameter, got {parameter!r}"
                )
        if "clip_coef" in parameters and {"clip_low", "clip_high"} & set(parameters):
            raise ConfigError(
                "HyperparameterConfig: give clip_coef, or clip_low and clip_high, not both"
            )
        for name, parameter in parameters.items():
            _check_ends(name, parameter)
        self.parameters: dict[str, RLParameter] = {
            name: replace(p, dtype=int) if MUTABLE[name] is int else p
            for name, p in parameters.items()
        }

    def names(self) -> list[str]:
        """Return the names in the order given."""
        return list(self.parameters)

    def __getitem__(self, name: str) -> RLParameter:
        """Return one parameter's bounds."""
        return self.parameters[name]

    def __bool__(self) -> bool:
        """Return True when anything may mutate."""
        return bool(self.parameters)

    def __eq__(self, other: object) -> bool:
        """Compare by content."""
        return isinstance(other, HyperparameterConfig) and self.parameters == other.parameters

    def __hash__(self) -> int:
        """Hash by content."""
        return hash(tuple(self.parameters.items()))

    def __repr__(self) -> str:
        """Show the call that makes it."""
        inner = ", ".join(f"{name}={p}" for name, p in self.parameters.items())
        return f"HyperparameterConfig({inner})"


def _check_ends(name: str, parameter: RLParameter) -> None:
    """Refuse a range whose ends an agent could not train with, before a mutation reaches them."""
    for end in (parameter.min, parameter.max):
        if MUTABLE[name] is int and end != round(end):
            raise ConfigError(
                f"HyperparameterConfig: {name} takes whole numbers, its range ends at {end}"
            )
        # The ends of a clip pair depend on each other, so they are checked when they move.
        if name not in ("clip_low", "clip_high"):
            try:
                _RULES[name].check(name, MUTABLE[name](end))
            except ConfigError as error:
                text = f"HyperparameterConfig: the range of {name} reaches {end}: {error}"
                raise ConfigError(text) from error

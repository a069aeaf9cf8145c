"""Hparams -> (Hparams, what changed): how hyperparameters vary. Pure, no torch, no bookkeeping."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, TypeVar, final

from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter, warn_if_nothing_mutates
from evo_grpo.seeding import generator

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

Changes = dict[str, tuple[float, float]]

_CLIP_ENDS = ("clip_low", "clip_high")
_DRAWS = 1000  # overlapping ranges of clip_low and clip_high are drawn until low < high


class HasHparams(Protocol):
    """An agent, as far as a mutation reads it."""

    @property
    def hparams(self) -> Hparams:
        """What the agent trains with."""
        ...


class MutablePopulation(Protocol):
    """What `Mutations.mutation` calls on a population; `Population` has it."""

    @property
    def elite(self) -> int | None:
        """Slot of the agent that the last selection kept as the best, or None."""
        ...

    @property
    def hp_config(self) -> HyperparameterConfig:
        """What may mutate, within which bounds."""
        ...

    def __len__(self) -> int:
        """Return the number of agents."""
        ...

    def __getitem__(self, slot: int, /) -> HasHparams:
        """Return the agent in a slot."""
        ...

    def set_hparams(
        self, slot: int, hparams: Hparams, changes: Mapping[str, tuple[float, float]], /
    ) -> object:
        """Give a slot new hyperparameters; `changes` says what moved, for the records."""
        ...


PopulationT = TypeVar("PopulationT", bound=MutablePopulation)


@final
class Mutations:
    """Moves one hyperparameter of an agent, or none.

    Args:
        no_mutation: Weight of leaving an agent as it is, >= 0.
        rl_hp: Weight of moving one hyperparameter, >= 0. Only the ratio of the two weights counts.
        mutate_elite: Whether the elite may mutate too.
        rand_seed: Seed of the draws of `mutation`; None is 0, so that runs repeat. `mutate` takes
            its stream instead.
        architecture: Accepted at 0 only, as are the next three: a pretrained language model's
            layers, weights and activations are what all agents share, so there is nothing of that
            kind to mutate.
        new_layer_prob: See `architecture`.
        parameters: See `architecture`.
        activation: See `architecture`.
        mutation_sd: Size of a mutation of `parameters`, so without effect; taken so that classic
            calls work.
        activation_selection: Choices for a mutation of `activation`, so without effect.
        device: Without effect: a mutation is a few numbers.
        accelerator: Not supported yet, leave it None.

    Raises:
        ConfigError: For a weight that is negative or not finite, two weights of 0, or a classic
            probability above 0.
        EngineUnavailable: When an accelerator is given.
    """

    def __init__(  # noqa: PLR0913 -- the names of the classic call, so that existing scripts run
        self,
        no_mutation: float = 0.2,
        rl_hp: float = 0.8,
        mutate_elite: bool = False,
        rand_seed: int | None = None,
        *,
        architecture: float = 0,
        new_layer_prob: float = 0,
        parameters: float = 0,
        activation: float = 0,
        mutation_sd: float = 0.1,
        activation_selection: Sequence[str] = (),
        device: str = "cpu",
        accelerator: object = None,
    ) -> None:
        for name, value in (
            ("architecture", architecture),
            ("new_layer_prob", new_layer_prob),
            ("parameters", parameters),
            ("activation", activation),
        ):
            if value != 0:
                raise ConfigError(
                    f"Mutations: {name} must be 0, got {value!r}: all agents share one pretrained "
                    "model, so only hyperparameters mutate; raise rl_hp instead"
                )
        if accelerator is not None:
            raise EngineUnavailable(
                "Mutations: accelerator must be None, got "
                f"{type(accelerator).__name__}: populations over several processes are not "
                "supported yet"
            )
        for name, value in (("no_mutation", no_mutation), ("rl_hp", rl_hp)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"Mutations: {name} must be a finite weight >= 0, got {value!r}")
        if no_mutation + rl_hp == 0:
            raise ConfigError(
                "Mutations: no_mutation and rl_hp are both 0; give one of them a weight"
            )
        del mutation_sd, activation_selection, device
        self.no_mutation = no_mutation
        self.rl_hp = rl_hp
        self.mutate_elite = mutate_elite
        self.rand_seed = rand_seed
        self._calls = 0

    def mutate(
        self, hparams: Hparams, hp_config: HyperparameterConfig, rng: np.random.Generator
    ) -> tuple[Hparams, Changes]:
        """Move one hyperparameter with probability rl_hp / (no_mutation + rl_hp).

        A pair-valued clip_coef moves at one end, by its distance from 1: under the name clip_coef
        the range is that of the distance, under clip_low and clip_high it is that of the ratio
        bound itself. A batch_size of None (all rows) counts as the greatest value of its range.

        Args:
            hparams: What the agent trains with now.
            hp_config: What may move within which bounds.
            rng: The stream that the draws come from.

        Returns:
            The new hyperparameters and what moved, `{name: (old, new)}`; the same ones and `{}`
            when nothing did.
        """
        names = hp_config.names()
        if not names or rng.random() * (self.no_mutation + self.rl_hp) >= self.rl_hp:
            return hparams, {}
        name = names[int(rng.integers(len(names)))]
        parameter = hp_config[name]
        if name == "clip_coef" and isinstance(hparams.clip_coef, tuple):
            name = _CLIP_ENDS[int(rng.integers(2))]
            parameter = _end_of_distance(name, parameter)
        draw = rng.random()
        if name in _CLIP_ENDS:
            return _step_clip_end(hparams, name, parameter, draw)
        old = hparams.batch_size if name == "batch_size" else hparams.get(name)
        if old is None:
            old = parameter.clip(parameter.max)
        new = parameter.step(old, draw)
        if new == old:
            return hparams, {}
        return hparams.with_value(name, new), {name: (old, new)}

    def mutation(self, population: PopulationT) -> PopulationT:
        """Mutate every agent of a population, except the elite unless `mutate_elite`.

        Args:
            population: Anything with the methods of `MutablePopulation`; changed in place.

        Returns:
            The same population.
        """
        warn_if_nothing_mutates(self.rl_hp, population.hp_config)
        call, self._calls = self._calls, self._calls + 1
        for slot in range(len(population)):
            if slot == population.elite and not self.mutate_elite:
                continue
            rng = generator(self.rand_seed or 0, "mutate", call, slot)
            hparams, changes = self.mutate(population[slot].hparams, population.hp_config, rng)
            if changes:
                population.set_hparams(slot, hparams, changes)
        return population


def sample_hparams(
    base: Hparams, hp_config: HyperparameterConfig, rng: np.random.Generator
) -> Hparams:
    """Draw every hyperparameter that may mutate from its range, for the first population.

    The draw is uniform in the logarithm; where the least value is 0, which has none, it is uniform
    in the value. Ends of a clip pair are drawn by their distance from 1, as they mutate.

    Args:
        base: Where everything comes from that does not mutate.
        hp_config: What to draw within which bounds.
        rng: The stream that the draws come from.

    Raises:
        ConfigError: When the ranges of clip_low and clip_high leave no low < high.
    """
    drawn = base
    clip_ends: dict[str, RLParameter] = {}
    for name in hp_config.names():
        parameter = hp_config[name]
        if name in _CLIP_ENDS:
            clip_ends[name] = parameter
        elif name == "clip_coef" and isinstance(base.clip_coef, tuple):
            clip_ends = {end: _end_of_distance(end, parameter) for end in _CLIP_ENDS}
        else:
            drawn = drawn.with_value(name, _draw(parameter, rng))
    if not clip_ends:
        return drawn
    for _ in range(_DRAWS):
        low, high = base.clip_bounds
        if "clip_low" in clip_ends:
            low = _draw_clip_end("clip_low", clip_ends["clip_low"], rng)
        if "clip_high" in clip_ends:
            high = _draw_clip_end("clip_high", clip_ends["clip_high"], rng)
        if low < high:
            return drawn.replace(clip_coef=(low, high))
    ranges = ", ".join(f"{end} in [{p.min}, {p.max}]" for end, p in clip_ends.items())
    raise ConfigError(
        f"clip_coef: expected ranges that leave room for low < high, got {ranges} beside "
        f"{base.clip_coef!r}"
    )


def _draw(parameter: RLParameter, rng: np.random.Generator) -> float:
    """Draw from a range; an int's ends get the same share as the values between."""
    low, high = parameter.min, parameter.max
    if parameter.dtype == "int":
        if low == 0:
            return int(rng.integers(math.ceil(low), math.floor(high) + 1))
        low, high = low - 0.5, high + 0.5
    # In (0, 1], so that a range that begins at 0 yields no 0: lr and clip_coef could not take it.
    share = 1.0 - rng.random()
    if low > 0:
        return parameter.clip(math.exp(math.log(low) + share * (math.log(high) - math.log(low))))
    return parameter.clip(low + share * (high - low))


def _end_of_distance(name: str, distance: RLParameter) -> RLParameter:
    """Turn the range of a distance from 1 into that of the bound at one end."""
    if name == "clip_low":
        return distance.replace(min=max(0.0, 1 - distance.max), max=1 - distance.min)
    return distance.replace(min=1 + distance.min, max=1 + distance.max)


def _distance_of_end(name: str, end: RLParameter) -> RLParameter | None:
    """Turn the range of a bound into that of its distance from 1; None where it holds 1 inside."""
    if name == "clip_low" and end.max <= 1:
        return end.replace(min=1 - end.max, max=1 - end.min)
    if name == "clip_high" and end.min >= 1:
        return end.replace(min=end.min - 1, max=end.max - 1)
    return None


def _from_distance(name: str, end: RLParameter, distance: float) -> float:
    return end.clip(1 - distance if name == "clip_low" else 1 + distance)


def _draw_clip_end(name: str, end: RLParameter, rng: np.random.Generator) -> float:
    distance = _distance_of_end(name, end)
    return _draw(end, rng) if distance is None else _from_distance(name, end, _draw(distance, rng))


def _step_clip_end(
    hparams: Hparams, name: str, end: RLParameter, draw: float
) -> tuple[Hparams, Changes]:
    """Move one end of the clip range, the other way round where it would meet the other end."""
    old = hparams.get(name)
    distance = _distance_of_end(name, end)
    other_way = 0.0 if draw >= end.grow_probability else end.grow_probability
    for attempt in (draw, other_way):
        if distance is None:
            new = end.step(old, attempt)
        else:
            # A factor on the bound itself would be far too coarse: 1.0004 * 1.2 = 1.2005.
            new = _from_distance(name, end, distance.step(abs(old - 1), attempt))
        low, high = (
            (new, hparams.get("clip_high"))
            if name == "clip_low"
            else (hparams.get("clip_low"), new)
        )
        if new != old and low < high:
            return hparams.with_value(name, new), {name: (old, new)}
    return hparams, {}

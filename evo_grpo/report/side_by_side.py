"""Several runs side by side: what they reached, how far apart they are, and in what they differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evo_grpo.errors import ConfigError
from evo_grpo.evolve.compare import compare
from evo_grpo.record.comparison import tokens_by_purpose
from evo_grpo.record.family import best_ever
from evo_grpo.report.contents import RunContents, read_contents
from evo_grpo.types import Score

INTERVAL = 1.96
"""Standard errors on either side of a mean that make an interval of 95%."""
_SAME_PROMPTS = ("seed", "env", "model.name", "evolve.fitness.test_prompts",
                 "evolve.fitness.test_samples", "evolve.fitness.temperature")  # fmt: skip
"""Settings that have to be equal for two runs to be tested on the same prompts."""
_NAMES = ("name", "record")
"""Settings that say nothing about a result."""


@dataclass(frozen=True)
class Standing:
    """What one run reached.

    Attributes:
        name: What the run is called, one name for each.
        folder: The run folder.
        finished: Whether it was judged on the test split.
        test: The winner on the test split, NaN before the end.
        test_se: Its standard error.
        base: The base model on the test split.
        fitness: The best validation fitness of any round.
        rounds: Finished rounds.
        tokens: Sampled to train and to evaluate, without those of the test.
        seconds: Wall seconds of its rounds.
    """

    name: str
    folder: str
    finished: bool
    test: float
    test_se: float
    base: float
    fitness: float
    rounds: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Apart:
    """How far a run is ahead of the first one, on the test split.

    Attributes:
        name: The run.
        difference: Mean reward, NaN where one of the two was not judged.
        low: Lower end of an interval of 95%.
        high: Its upper end.
        paired: Whether both answered the same prompts, so that the difference is taken per prompt.
        why: Why it is not paired, empty where it is.
    """

    name: str
    difference: float
    low: float
    high: float
    paired: bool
    why: str = ""

    @property
    def verdict(self) -> str:
        """What the interval says: better, worse, or that it cannot tell."""
        if math.isnan(self.low):
            return "not known"
        if self.low > 0:
            return "better"
        return "worse" if self.high < 0 else "no difference that could not be chance"


@dataclass(frozen=True)
class SideBySide:
    """Several runs beside each other.

    Attributes:
        runs: The runs themselves.
        standings: What each reached, in their order.
        apart: Each but the first, against the first.
        settings: Settings that differ, by their names, with the value of each run.
    """

    runs: Sequence[RunContents]
    standings: Sequence[Standing]
    apart: Sequence[Apart]
    settings: Mapping[str, Sequence[object]]


def side_by_side(runs: Sequence[str | Path]) -> SideBySide:
    """Lay runs side by side; differences are those to the first.

    Args:
        runs: At least two run folders.

    Raises:
        ConfigError: There are fewer than two, or one is named twice.
        EvoGrpoError: One cannot be read.
    """
    if len(runs) < 2:
        raise ConfigError(
            f"compare: expected at least two run folders, got {len(runs)}; what a run's tokens "
            "give without evolution: evo-grpo resume RUN --compare"
        )
    places = [Path(run).resolve() for run in runs]
    twice = [str(run) for run, place in zip(runs, places, strict=True) if places.count(place) > 1]
    if twice:
        raise ConfigError(f"compare: expected different runs, got {twice[0]} twice; name each once")
    contents = [read_contents(run) for run in runs]
    names = _names(places)
    return SideBySide(
        runs=contents,
        standings=[_standing(name, one) for name, one in zip(names, contents, strict=True)],
        apart=[
            _apart(name, one, contents[0])
            for name, one in zip(names[1:], contents[1:], strict=True)
        ],
        settings=_differences([one.config for one in contents]),
    )


def _names(places: Sequence[Path]) -> list[str]:
    """Return the last part of each path, with the parts before it where that is not enough."""
    depth = 1
    while True:
        names = ["/".join(place.parts[-depth:]) for place in places]
        if len(set(names)) == len(names):
            return names
        depth += 1


def _standing(name: str, contents: RunContents) -> Standing:
    summary, ever = contents.summary, best_ever(contents.rounds)
    spent = tokens_by_purpose(contents.rounds, summary or {"final_tokens": 0})
    best, base = (_part(summary, key) for key in ("best", "base"))
    return Standing(
        name=name,
        folder=str(contents.folder),
        finished=summary is not None,
        test=best.mean,
        test_se=best.se,
        base=base.mean,
        fitness=math.nan if ever is None or ever.score is None else ever.score.mean,
        rounds=len(contents.rounds),
        tokens=sum(spent.values()),
        seconds=sum(sum(record.seconds.values()) for record in contents.rounds),
    )


def _part(summary: Mapping[str, Any] | None, key: str) -> Score:
    if summary is None:
        return Score(math.nan, math.nan, 0)
    part = summary[key]
    known = [math.nan if value is None else value for value in part.get("per_prompt", ())]
    return Score(_number(part["mean"]), _number(part["se"]), part["n"], tuple(known))


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _apart(name: str, run: RunContents, first: RunContents) -> Apart:
    own, other = _part(run.summary, "best"), _part(first.summary, "best")
    why = _unpaired(run, first, own, other)
    if why:
        difference = own.mean - other.mean
        error = math.hypot(own.se, other.se)
    else:
        found = compare(own, other)
        difference, error = found.difference, found.error
    low, high = difference - INTERVAL * error, difference + INTERVAL * error
    return Apart(name, difference, low, high, paired=not why, why=why)


def _unpaired(run: RunContents, first: RunContents, own: Score, other: Score) -> str:
    """Return why two runs cannot be compared prompt by prompt; an empty string where they can."""
    if not own.n or not other.n:
        return "not judged yet"
    for name in _SAME_PROMPTS:
        if _setting(run.config, name) != _setting(first.config, name):
            return f"{name} differs"
    if not own.per_prompt or len(own.per_prompt) != len(other.per_prompt):
        return "the rewards of single prompts were not kept"
    return ""


def _setting(config: Mapping[str, Any], name: str) -> object:
    found: object = config
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[object]]:
    flat = [dict(_flat(config)) for config in configs]
    names = dict.fromkeys(name for one in flat for name in one)
    values = {name: [one.get(name) for one in flat] for name in names}
    return {
        name: own
        for name, own in values.items()
        if name.split(".")[0] not in _NAMES and any(value != own[0] for value in own)
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value

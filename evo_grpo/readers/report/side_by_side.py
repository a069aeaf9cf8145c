"""Several runs side by side: what they reached, how far apart they are, and in what they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evo_grpo.errors import ConfigError
from evo_grpo.evolve.compare import compare
from evo_grpo.evolve.intervals import interval, interval_apart
from evo_grpo.record.comparison import tokens_by_purpose
from evo_grpo.record.family import best_ever
from evo_grpo.record.names import INPUTS
from evo_grpo.record.view import RunView, view_of
from evo_grpo.training.inputs.made_of import DATA, flat, read_inputs_of
from evo_grpo.types import Score

_SAME_PROMPTS = ("seed", "env", "model.name", "evolve.fitness.test_prompts",
                 "evolve.fitness.test_samples", "evolve.fitness.temperature")  # fmt: skip
"""Settings that have to be equal for two runs to be tested on the same prompts."""
_SAME_REWARD = ("env.kind", "env.reward", "env.reward_weights", "env.args")
"""Settings that have to be equal for two runs to be measured in the same unit."""
_NAMES = ("name", "record")
"""Settings that say nothing about a result."""


@dataclass(frozen=True)
class Standing:
    """What one run reached.

    Attributes:
        name: What the run is called, one name for each.
        finished: Whether it was judged on the test split.
        test: The winner on the test split, NaN before the end.
        test_se: Its standard error.
        test_prompts: The prompts behind both.
        base: The base model on the test split.
        fitness: The best validation fitness of any round.
        rounds: Finished rounds.
        tokens: Sampled to train and to evaluate, without those of the test.
        seconds: Wall seconds of its rounds.
    """

    name: str
    finished: bool
    test: float
    test_se: float
    test_prompts: int
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
        low: Lower end of an interval of 95%, by Student's t.
        high: Its upper end.
        paired: Whether both answered the same prompts, so that the difference is taken per prompt.
        why: Why it is not paired, empty where it is.
        same_reward: Whether the rewards of both mean the same; else none of them is the better one.
    """

    name: str
    difference: float
    low: float
    high: float
    paired: bool
    why: str = ""
    same_reward: bool = True

    @property
    def verdict(self) -> str:
        """What the interval says: better, worse, that it cannot tell, or that it means nothing."""
        if math.isnan(self.low):
            return "not known"
        if not self.same_reward:
            return "measured by another reward"
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

    runs: Sequence[RunView]
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
    contents = [view_of(run) for run in runs]
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


def _standing(name: str, contents: RunView) -> Standing:
    summary, ever = contents.summary, best_ever(contents.rounds)
    spent = tokens_by_purpose(contents.rounds, summary or {"final_tokens": 0})
    best, base = (_part(summary, key) for key in ("best", "base"))
    return Standing(
        name=name,
        finished=summary is not None,
        test=best.mean,
        test_se=best.se,
        test_prompts=best.n,
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


def _apart(name: str, run: RunView, first: RunView) -> Apart:
    own, other = _part(run.summary, "best"), _part(first.summary, "best")
    if not own.n or not other.n:
        nothing = math.nan
        return Apart(name, nothing, nothing, nothing, paired=False, why="not judged yet")
    changed, same_reward = _changed(run, first)
    if not changed and (not own.per_prompt or len(own.per_prompt) != len(other.per_prompt)):
        changed = "the rewards of single prompts were not kept"
    if changed:
        difference = own.mean - other.mean
        low, high = interval_apart(difference, (own.se, other.se), (own.n, other.n))
    else:
        found = compare(own, other)
        difference = found.difference
        low, high = interval(difference, found.error, found.prompts)
    return Apart(name, difference, low, high, not changed, changed, same_reward)


def _changed(run: RunView, first: RunView) -> tuple[str, bool]:
    """Return why two runs were not tested on the same prompts, and whether by the same reward."""
    configs = run.config, first.config
    reasons = [f"{name} differs" for name in _SAME_PROMPTS if _differs(name, *configs)]
    same_reward = not any(_differs(name, *configs) for name in _SAME_REWARD)
    if str(_setting(run.config, "env.kind")).startswith("object:"):
        reasons.append("env is an object of Python, whose rows and reward are not recorded")
    files = _files(run), _files(first)
    for name in dict.fromkeys(name for one in files for name in one):
        tested = "env.test" if any("env.test" in one for one in files) else "env.train"
        is_reward = name.startswith(("env.reward", "env.kind"))
        before, after = (one.get(name) for one in files)
        # A digest that is missing vouches for nothing.
        if (is_reward or name == tested) and (before is None or before != after):
            known = before is not None and after is not None
            reasons.append(
                f"the file of {name} {'has changed' if known else 'is not on record for both'}"
            )
            same_reward &= not is_reward
    return "; ".join(reasons[:1]), same_reward


def _files(run: RunView) -> Mapping[str, str | None]:
    """Return the digests of the user's files that a run read, by the settings that name them."""
    assert run.folder is not None, "runs side by side are run folders"
    if not (run.folder / INPUTS).exists():  # it was stopped before its first round
        env = dict(flat({"env": _setting(run.config, "env") or {}}))
        return {name: None for name in (*DATA, "env.reward") if env.get(name)}
    return read_inputs_of(run.folder).files


def _differs(name: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return _setting(first, name) != _setting(second, name)


def _setting(config: Mapping[str, Any], name: str) -> object:
    found: object = config
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[object]]:
    each = [dict(flat(config)) for config in configs]
    names = dict.fromkeys(name for one in each for name in one)
    values: dict[str, list[object]] = {name: [one.get(name) for one in each] for name in names}
    return {
        name: own
        for name, own in values.items()
        if name.split(".")[0] not in _NAMES and any(value != own[0] for value in own)
    }

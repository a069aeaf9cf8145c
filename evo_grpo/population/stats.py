"""Collects the metrics, counts and times of a round; warns if rewards give no signal."""

import logging
import math
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evo_grpo.envs.messages import excerpt
from evo_grpo.envs.protocol import Experience
from evo_grpo.learn.objective.advantages import zero_variance_groups
from evo_grpo.population.evaluate import Evaluation
from evo_grpo.record.vocabulary import over_steps
from evo_grpo.settings import RecordConfig
from evo_grpo.types import Score, Slot, Trajectory

_log = logging.getLogger(__name__)


@dataclass
class Tally:
    """Metrics and counts of one agent in the training steps of a round.

    `metrics` has one mapping per step; in `completions`, each turn of an episode counts. `samples`
    has the trajectories of the latest step's first start, each with its reward. `rewards` has the
    unweighted value of each reward function for each of these trajectories, None for an abstention.
    """

    metrics: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])
    tokens: int = 0
    completions: int = 0
    samples: list[tuple[Trajectory, float]] = field(default_factory=list[tuple[Trajectory, float]])
    rewards: Sequence[Mapping[str, float | None]] = field(
        default_factory=list[Mapping[str, float | None]]
    )

    @property
    def step_rewards(self) -> tuple[float | None, ...]:
        """The mean reward of each step, None for a step without rewards."""
        rewards = (step.get("reward", math.nan) for step in self.metrics)
        return tuple(reward if math.isfinite(reward) else None for reward in rewards)

    @property
    def failed(self) -> str:
        """The reason why the agent cannot be ranked, or an empty string."""
        broken = sum(m["failed"] for m in self.metrics)
        return f"the gradient of {int(broken)} step(s) was not finite" if broken else ""

    def means(self) -> dict[str, float]:
        """Aggregate the metrics of all steps to means, sums or maxima; see `record.vocabulary`.

        Steps without an episode are excluded from means and maxima, unless no step has one.
        """
        full = [m for m in self.metrics if not m.get("empty_steps")] or self.metrics
        out: dict[str, float] = {}
        for name in sorted({name for m in self.metrics for name in m}):
            over = over_steps(name)
            values = [m[name] for m in (self.metrics if over == "sum" else full) if name in m]
            if not values or over == "none":
                continue
            out[name] = float(max(values) if over == "max" else sum(values))
            if over == "mean":
                out[name] /= len(values)
        return out


def measured_in_training(tally: Tally) -> Evaluation:
    """Return the mean reward of a round's training as an evaluation without samples.

    Its score counts steps (`Score.steps`) instead of prompts, and has no rewards per prompt.
    """
    finite = [reward for reward in tally.step_rewards if reward is not None]
    rewards = np.array(finite, dtype=np.float64)
    count = len(rewards)
    error = float(rewards.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan
    mean = math.fsum(rewards) / count if count else math.nan
    return Evaluation(
        Score(mean, error, count, steps=count),
        Experience((), np.zeros((0, 1))),
        np.zeros(0),
        looks=0,
    )


class Stopwatch:
    """Measures the wall time of each phase of a round, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Return a context that adds the seconds spent in it to the phase `name`."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def reward_metrics(
    experience: Experience, totals: np.ndarray, group_size: int, weights: np.ndarray
) -> dict[str, float]:
    """Return the metrics of a step that depend only on an agent's experience, not on its adapter.

    `experience` has B = P * G completions or episodes, `totals` (B,) their weighted rewards, NaN
    where every function abstained or the episode was dropped, and `weights` (K,) the weights of the
    reward functions. Returns reward (mean), zero_variance (share of groups with equal rewards among
    the groups that were not set aside), completion_length (mean tokens sampled), ended (share of
    completions that sampled the end token), and the metrics of the environment.
    """
    table = totals.reshape(-1, group_size)
    is_finite = np.isfinite(table)
    # Groups that were set aside have no rewards, so `dead` includes them.
    aside = int(experience.metrics.get("set_aside", 0))
    dead = int(zero_variance_groups(experience.rewards, group_size, weights=weights).sum())
    trajectories = [t for t in experience.trajectories if not t.error]
    lengths = [t.sampled for t in trajectories] or [0]
    ended = [t.ended for t in trajectories] or [False]
    return {
        **experience.metrics,
        "reward": float(table[is_finite].mean()) if is_finite.any() else float("nan"),
        "zero_variance": (dead - aside) / max(1, len(table) - aside),
        "completion_length": float(np.mean(lengths)),
        "ended": float(np.mean(ended)),
    }


def completion_rows(
    round: int, tallies: Mapping[Slot, Tally], record: RecordConfig
) -> list[dict[str, Any]]:
    """Return the sample completions that a round records: a mapping per line of completions/."""
    count, names = record.completions, record.columns
    return [
        {
            "round": round,
            "agent": slot,
            "prompt": trajectory.prompt,
            "answer": trajectory.answer,
            "completion": trajectory.text,
            "reward": float(reward),
            "rewards": dict(values),
            "tokens": trajectory.sampled,
            "ended": trajectory.ended,
            "turns": trajectory.turns,
            "end": trajectory.end,
            "error": trajectory.error,
            **({"columns": {n: trajectory.row.get(n) for n in names}} if names else {}),
        }
        for slot, tally in tallies.items()
        for (trajectory, reward), values in zip(
            tally.samples[:count], tally.rewards[:count], strict=True
        )
    ]


def warn_without_signal(sentence: str) -> None:
    """Warn and log that the first round had no signal to learn from, if there is a `sentence`."""
    if sentence:
        _log.warning(sentence)
        warnings.warn(sentence, UserWarning, stacklevel=2)


def without_signal(tallies: Sequence[Tally]) -> str:
    """Return a warning if all groups of all agents had equal rewards, else an empty string.

    The string is also empty if there is no reward at all, because another warning says so.
    """
    steps = [m for tally in tallies for m in tally.metrics if not m.get("empty_steps")]
    means = [m["reward"] for m in steps if math.isfinite(m.get("reward", math.nan))]
    if not means or any(m["zero_variance"] < 1 for m in steps):
        return ""
    low, high = min(means), max(means)
    rewards = f"all of them {low:g}" if low == high else f"between {low:g} and {high:g} on average"
    return (
        f"round 1 had nothing to learn from: the completions of each group got equal rewards, "
        f"{rewards}. Either the reward is always the same, or the task is too hard (nothing earns "
        "more than the least) or too easy (everything earns the most), or the temperature is too "
        f"low for completions to differ{_example(tallies)}"
    )


def _example(tallies: Sequence[Tally]) -> str:
    for tally in tallies:
        for trajectory, reward in tally.samples:
            if math.isfinite(reward):
                return (
                    f"; for instance prompt {excerpt(trajectory.prompt)}, completion "
                    f"{excerpt(trajectory.text)}, reward {reward:g}"
                )
    return ""

"""What a replay found as frozen values, its file in the run folder, and the verdict; no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import TypeAdapter

from evo_grpo.errors import RunDirError
from evo_grpo.evolve.compare import compare
from evo_grpo.evolve.intervals import around, interval
from evo_grpo.record import columns
from evo_grpo.record.files import atomic_write, to_line
from evo_grpo.record.folder import expect_run, read_result
from evo_grpo.record.names import REPLAY_RESULT
from evo_grpo.record.plain import RelativePath
from evo_grpo.record.schedule import Budget, Schedule, Values
from evo_grpo.types import Number, Score

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

FORMAT = 1
"""Version of replay.json."""
WINNER = "winner"
"""The name of the run's winner in comparisons."""
BUDGETS: dict[Budget, str] = {
    "lineage": "the tokens of the winner's lineage",
    "run": "the tokens of the whole run",
}
LEVEL = 0.05
"""p-value up to which a difference is told, together with an interval of 95%."""

Verdict = Literal["ahead", "behind", "same", "failed", "untold"]


@dataclass(frozen=True)
class Replayed:
    """One plan of a replay, trained once or several times with other draws, and how it was judged.

    Attributes:
        name: "<values>-<budget>", also its folder in `RUN/replay`.
        values: "schedule" or "constant".
        budget: "lineage" or "run".
        prompts: By round and GRPO step, P.
        rows: Completions, or episodes, that a training sampled.
        tokens: Tokens that a training sampled, the mean of all.
        failed_steps: Steps, of all trainings, that were not taken because a gradient was not
            finite.
        tests: Mean reward of each training on the test split.
    """

    name: str
    values: Values
    budget: Budget
    prompts: tuple[tuple[int, ...], ...]
    rows: int
    tokens: int
    failed_steps: int
    tests: tuple[Score, ...]

    @property
    def test(self) -> Score:
        """Mean of its trainings on the test split; NaN where one ended without a reward."""
        return pooled(self.tests)

    @property
    def spread(self) -> float:
        """Standard deviation between its trainings; NaN from one alone."""
        return (
            float(np.std([one.mean for one in self.tests], ddof=1)) if self.tests[1:] else math.nan
        )


@dataclass(frozen=True)
class Difference:
    """How far one kind of training is ahead of another, or of the winner.

    Attributes:
        first: Name of one.
        second: Name of the other.
        difference: Mean of first minus second per test prompt, in units of reward.
        error: Its standard error: paired over the prompts that both answered, and with what lies
            between trainings of one kind where there are several. NaN from fewer than two prompts.
        low: Lower end of its interval of 95%.
        high: Upper end.
        p: Chance of a difference at least as large, either way, between agents that are equally
            good on each prompt, by the sign-flip test of `evo_grpo.evolve.compare`; it knows
            nothing of the seeds of the trainings.
        prompts: Prompts that both answered.
        trainings: Trainings of each kind; with one alone nothing is known of what chance does to
            them, and the interval covers the prompts alone.
    """

    first: str
    second: str
    difference: Number
    error: Number
    low: Number
    high: Number
    p: Number
    prompts: int
    trainings: int

    @classmethod
    def between(
        cls, first: str, ones: Sequence[Score], second: str, others: Sequence[Score]
    ) -> Difference:
        """Compare two kinds of training over the same prompts, one score per training.

        A single one beside several is the winner, which is what it is.
        """
        one, other = pooled(ones), pooled(others)
        ahead, behind = compare(one, other), compare(other, one)
        groups = [[s.mean for s in scores] for scores in (ones, others) if len(scores) > 1]
        freedom = sum(len(means) - 1 for means in groups)
        seeds, half = 0.0, interval(0.0, ahead.error, ahead.prompts)[1]
        if freedom:
            squares = sum(len(means) * float(np.var(means)) for means in groups)
            seeds = math.sqrt(squares / freedom * sum(1 / len(means) for means in groups))
            half = math.hypot(half, around(0.0, seeds, freedom)[1])
        return cls(
            first,
            second,
            ahead.difference,
            math.hypot(ahead.error, seeds),
            ahead.difference - half,
            ahead.difference + half,
            min(1.0, 2 * min(ahead.p, behind.p)),
            ahead.prompts,
            max(len(ones), len(others)),
        )

    @property
    def sign(self) -> int:
        """1 where the first is ahead by more than chance explains, -1 where behind, else 0."""
        # Trainings with the same values differ by more than the prompts explain, and the exact
        # test is the stricter one where a few prompts all have the same difference.
        if self.trainings < 2 or not self.p <= LEVEL:
            return 0
        return 1 if self.low > 0 else -1 if self.high < 0 else 0


@dataclass(frozen=True)
class Replay:
    """The winner's schedule, the trainings that replayed it, and what they say about it.

    Attributes:
        schedule: What the winner was trained with.
        seed: Of the trainings.
        repeats: Trainings of each kind.
        trained: schedule-lineage, constant-lineage, schedule-run, constant-run.
        winner: The winner's mean reward, on the same test prompts with the same draws.
        differences: Schedule minus last values at each budget, then each training minus the winner.
        wall_seconds: Of training and judging.
        files: SHA-256 of the files of the checkpoints, by their paths below `RUN/replay`.
    """

    schedule: Schedule
    seed: int
    repeats: int
    trained: tuple[Replayed, ...]
    winner: Score
    differences: tuple[Difference, ...]
    wall_seconds: float
    files: Mapping[RelativePath, str] = field(default_factory=dict[str, str])

    def training(self, name: str) -> Replayed:
        """Return one training by its name."""
        return next(one for one in self.trained if one.name == name)

    def difference(self, first: str, second: str) -> Difference:
        """Return a difference by the names of its ends."""
        return next(d for d in self.differences if (d.first, d.second) == (first, second))

    def told(self, budget: Budget) -> Verdict:
        """Return how the schedule stands to its last values at a budget.

        Returns:
            "ahead" or "behind" where its interval and its p-value both say so; "same" where both
            trainings had the same values in every step, up to a prompt; "failed" where one of them
            ended without a finite reward; else "untold".
        """
        moving, constant = (self.training(f"{v}-{budget}") for v in ("schedule", "constant"))
        if not math.isfinite(moving.test.mean) or not math.isfinite(constant.test.mean):
            return "failed"
        if not self.schedule.moves and _alike(moving.prompts, constant.prompts):
            return "same"
        found: dict[int, Verdict] = {1: "ahead", -1: "behind", 0: "untold"}
        return found[self.difference(moving.name, constant.name).sign]

    def verdict(self, budget: Budget) -> str:
        """Return in plain words whether the schedule beat its last values at a budget."""
        found = self.difference(f"schedule-{budget}", f"constant-{budget}")
        said = {
            "ahead": "the schedule beat its last values held constant",
            "behind": "the last values held constant beat the schedule",
            "untold": "it cannot be told whether the schedule is better than its last values",
            "same": "both trainings had the same values in every step, so what lies between them "
            "is chance and says nothing about the schedule",
            "failed": "nothing can be told, for a training ended without a finite reward",
        }[self.told(budget)]
        return f"With {BUDGETS[budget]}, {said}{_numbers(found)}."

    def caveat(self) -> str:
        """Return what the intervals cover, and what not."""
        if self.repeats == 1:
            return (
                "One training of each kind: the intervals of 95% cover the test prompts, but not "
                "what other draws in training would change, so nothing is claimed."
            )
        return (
            f"Means of {self.repeats} trainings of each kind; the intervals of 95% cover the test "
            "prompts and the draws of the trainings."
        )

    def frame(self) -> pd.DataFrame:
        """Return the results as a typed frame.

        Returns:
            One row per training, then the winner: training, values, budget (both missing for the
            winner), rows, tokens, failed_steps (missing for the winner), test, test_se (over the
            prompts), spread (standard deviation between its trainings), prompts, and how far it is
            ahead of the winner: ahead, ahead_se, p.
        """
        rows: list[dict[str, object]] = []
        for one in self.trained:
            found = self.difference(one.name, WINNER)
            fields = {k: getattr(one, k) for k in ("values", "budget", "rows", "tokens")}
            rows.append(
                {
                    "training": one.name,
                    **fields,
                    "failed_steps": one.failed_steps,
                    **_test(one.test),
                    "spread": one.spread,
                    "ahead": found.difference,
                    "ahead_se": found.error,
                    "p": found.p,
                }
            )
        own = {"rows": self.schedule.rows, "tokens": self.schedule.tokens}
        rows.append({"training": WINNER, **own, **_test(self.winner)})
        types = {
            **dict.fromkeys(("training", "values", "budget"), "string"),
            **dict.fromkeys(("rows", "tokens", "failed_steps"), "Int64"),
            **dict.fromkeys(("test", "test_se", "spread"), "float64"),
            "prompts": "Int64",
            **dict.fromkeys(("ahead", "ahead_se", "p"), "float64"),
        }
        return columns.frame([{**dict.fromkeys(types), **row} for row in rows], types)

    def to_json(self) -> dict[str, Any]:
        """Return what replay.json holds."""
        return {
            "format": FORMAT,
            **asdict(self),
            "schedule": self.schedule.to_json(),
            "verdicts": {b: {"told": self.told(b), "sentence": self.verdict(b)} for b in BUDGETS},
        }


_SCHEMA = TypeAdapter(Replay)


def read_replay(run: str | Path, file: Path | None = None) -> Replay | None:
    """Return what a file written as replay.json holds, by default the one in RUN/replay.

    None where there is no replay, or it was interrupted.
    """
    file = file or expect_run(run) / REPLAY_RESULT
    what = f"the result of a replay in format {FORMAT}"
    found = read_result(file, _SCHEMA, what, f"replay {run} --force")
    if found is None:
        return None
    data, replay = found
    if data.get("format") != FORMAT:
        raise RunDirError(
            f"{file}: expected {what}, got format {data.get('format')!r}; read it with the "
            f"evo-grpo that wrote it, or replay the run anew with: evo-grpo replay {run} --force"
        )
    return replay


def write_replay(run: Path, found: Replay) -> None:
    """Write replay.json, which marks the replay of a run as finished."""
    atomic_write(run / REPLAY_RESULT, to_line(found.to_json(), indent=1) + "\n", "replay")


def pooled(scores: Sequence[Score]) -> Score:
    """Return the mean of several scores over the same prompts, with its error over the prompts."""
    if len(scores) == 1:
        return scores[0]
    if not all(score.per_prompt for score in scores):  # one of them has no reward at all
        return Score(math.nan, math.nan, 0)
    table = np.array([score.per_prompt for score in scores], dtype=np.float64)
    per_prompt = table.mean(axis=0)
    known = per_prompt[np.isfinite(per_prompt)]
    count = len(known)
    error = float(known.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan
    mean = float(known.mean()) if count else math.nan
    return Score(mean, error, count, tuple(per_prompt.tolist()))


def _alike(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> bool:
    """Return whether two trainings have the same prompts in every step, up to rounding."""
    pairs = zip(first, second, strict=True)
    return all(abs(a - b) <= 1 for one, other in pairs for a, b in zip(one, other, strict=True))


def _test(score: Score) -> dict[str, float]:
    return {"test": score.mean, "test_se": score.se, "prompts": score.n}


def _numbers(found: Difference) -> str:
    """Return a difference with its interval, an empty string where there is none."""
    if not math.isfinite(found.error):
        return ""
    text = (
        f": schedule minus constant {found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}] "
        "per test prompt"
    )
    beyond_zero = found.low > 0 or found.high < 0
    if found.trainings > 1 and beyond_zero and not found.sign:
        text += f", and p {found.p:.2g} from {found.prompts} prompts"
    return text

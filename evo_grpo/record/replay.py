"""The result of a replay: its trainings, its file replay.json, and its outcome; no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter

from evo_grpo.errors import RunDirError
from evo_grpo.record import columns
from evo_grpo.record.arms import WINNER, Arm, Arms, Difference, caveat
from evo_grpo.record.files import atomic_write, seal
from evo_grpo.record.folder import expect_run, read_result
from evo_grpo.record.names import REPLAY_RESULT, REPLAYED
from evo_grpo.record.plain import RelativePath
from evo_grpo.record.schedule import Schedule, equal_prompts
from evo_grpo.types import Score

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1
"""Version of replay.json."""
Outcome = Literal["ahead", "behind", "same", "failed", "unclear"]


@dataclass(frozen=True)
class Replayed(Arm):
    """One kind of training of a replay: schedule-run or constant-run.

    Attributes:
        prompts: Prompts by round and GRPO step, each P.
        rows: Completions, or episodes, sampled by one training.
        failed_steps: Skipped steps of all trainings, whose gradients were not finite.
    """

    prompts: tuple[tuple[int, ...], ...]
    rows: int
    failed_steps: int


@dataclass(frozen=True)
class Replay:
    """The result of a replay: the winner's schedule, and the trainings that repeated it.

    Attributes:
        schedule: Hyperparameters that the winner was trained with.
        repeats: Trainings of each kind.
        trained: schedule-run, constant-run.
        winner: The winner's mean reward, on the same test prompts with the same draws.
        differences: Schedule minus last values, then each kind minus the winner.
        wall_seconds: Seconds of training and evaluation.
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
        """Return one kind of training by its name."""
        return next(one for one in self.trained if one.name == name)

    def difference(self, first: str, second: str) -> Difference:
        """Return a difference by the names of its two arms."""
        return next(d for d in self.differences if (d.first, d.second) == (first, second))

    @property
    def outcome(self) -> Outcome:
        """How the schedule compares with its last values held constant, for equal rows.

        "ahead" or "behind" if both the interval and the p-value show it; "same" if both trainings
        had equal values in every step and prompts that differ by at most one; "failed" if a
        training ended without a finite reward; else "unclear".
        """
        moving, constant = map(self.training, REPLAYED)
        if not math.isfinite(moving.test.mean) or not math.isfinite(constant.test.mean):
            return "failed"
        if not self.schedule.moves and equal_prompts(moving.prompts, constant.prompts):
            return "same"
        found: dict[int, Outcome] = {1: "ahead", -1: "behind", 0: "unclear"}
        return found[self.difference(*REPLAYED).sign]

    @property
    def verdict(self) -> str:
        """A sentence that says whether the schedule beat its last values."""
        outcome = {
            "ahead": "the schedule beat its last values held constant",
            "behind": "the last values held constant beat the schedule",
            "unclear": "the schedule and its last values do not differ significantly",
            "same": "the schedule and its last values were the same in every step, so their "
            "difference is chance",
            "failed": "there is no result, because a training ended without a finite reward",
        }[self.outcome]
        found = self.difference(*REPLAYED)
        return f"With the tokens of the whole run, {outcome}{_numbers(found)}."

    def caveat(self) -> str:
        """Return what the intervals cover and what they do not."""
        return caveat(self.repeats)

    def arms(self) -> Arms:
        """Return the result as the terminal and the report show it."""
        winner = Arm(WINNER, self.schedule.tokens, (self.winner,))
        return Arms((*self.trained, winner), self.differences, (self.verdict, self.caveat()))

    def frame(self) -> pd.DataFrame:
        """Return the results as a typed frame: one row per kind of training, then the winner.

        The columns are training, rows, tokens, failed_steps (missing for the winner), test, test_se
        (over the prompts), spread (standard deviation between the repeats), prompts, and the
        difference to the winner: ahead, ahead_se, p.
        """
        rows: list[dict[str, object]] = []
        for one in self.trained:
            found = self.difference(one.name, WINNER)
            names = ("rows", "tokens", "failed_steps", "spread")
            fields = {name: getattr(one, name) for name in names}
            ahead = {"ahead": found.difference, "ahead_se": found.error, "p": found.p}
            rows.append({"training": one.name, **fields, **_test(one.test), **ahead})
        own = {"rows": self.schedule.rows, "tokens": self.schedule.tokens}
        rows.append({"training": WINNER, **own, **_test(self.winner)})
        types = {
            "training": "string",
            **dict.fromkeys(("rows", "tokens", "failed_steps"), "Int64"),
            **dict.fromkeys(("test", "test_se", "spread"), "float64"),
            "prompts": "Int64",
            **dict.fromkeys(("ahead", "ahead_se", "p"), "float64"),
        }
        return columns.frame([{**dict.fromkeys(types), **row} for row in rows], types)

    def to_json(self) -> dict[str, Any]:
        """Return the content of replay.json."""
        return {
            "format": FORMAT,
            **asdict(self),
            "schedule": self.schedule.to_json(),
            "outcome": self.outcome,
            "verdict": self.verdict,
        }


_REPLAY = TypeAdapter(Replay)


def unmoved(schedule: Schedule) -> str:
    """Return a sentence if no hyperparameter of a schedule changed, else an empty string."""
    if schedule.moves:
        return ""
    return (
        "No hyperparameter changed on the winner's line: the schedule is its last values. The "
        "replay still shows the spread between trainings, and how far the winner is from agents "
        "that were trained outside a population."
    )


def read_replay(run: str | Path, file: Path | None = None) -> Replay | None:
    """Return the result in replay.json or `file`, None if it is missing or was interrupted."""
    file = file or expect_run(run) / REPLAY_RESULT
    what = f"the result of a replay in format {FORMAT}"
    found = read_result(file, _REPLAY, what, f"replay {run} --force")
    if found is None:
        return None
    data, replay = found
    if data.get("format") != FORMAT:
        raise RunDirError(
            f"{file}: expected {what}, got format {data.get('format')!r}; read it with the "
            f"evo-grpo that wrote it, or replay the run again with: evo-grpo replay {run} --force"
        )
    return replay


def write_replay(run: Path, found: Replay) -> None:
    """Write replay.json, which marks the replay of a run as finished."""
    atomic_write(run / REPLAY_RESULT, seal(found.to_json(), indent=1), "replay")


def _test(score: Score) -> dict[str, float]:
    return {"test": score.mean, "test_se": score.se, "prompts": score.n}


def _numbers(found: Difference) -> str:
    """Return a difference with its interval as text, empty if it has no interval."""
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

"""Reads the schedule of a run's winner, plans trainings that replay it, and stores their result."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from evo_grpo.errors import RunDirError
from evo_grpo.record import columns
from evo_grpo.record import folder as run_folder
from evo_grpo.record.arms import WINNER, Arm, Arms, Difference, caveat
from evo_grpo.record.files import atomic_write, plain_value, seal
from evo_grpo.record.names import REPLAY_RESULT, REPLAYED
from evo_grpo.record.plain import RelativePath
from evo_grpo.record.records import AgentRecord, HyperparameterName, RoundRecord
from evo_grpo.record.summary import read_summary, winning_lines
from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Score

FORMAT = 1
"""Version of the format of replay.json."""
Outcome = Literal["ahead", "behind", "same", "failed", "unclear"]
_OUTCOMES: Mapping[Outcome, str] = {
    "ahead": "the schedule beat its last values held constant",
    "behind": "the last values held constant beat the schedule",
    "unclear": "the schedule and its last values do not differ significantly",
    "same": "the schedule and its last values were the same in every step, so their difference is "
    "chance",
    "failed": "there is no result, because a training ended without a finite reward",
}


@dataclass(frozen=True)
class ScheduledRound:
    """One round (0-based) of the training of a winner, by the winner itself or an ancestor.

    `rows` is the number of completions, or episodes, that `member` sampled in training, and
    `tokens` is their number of tokens. `run_rows` is the number of completions or episodes that all
    agents sampled in the round.
    """

    round: int
    member: int
    hparams: Hparams
    rows: int
    tokens: int
    run_rows: int


@dataclass(frozen=True)
class Schedule:
    """Hyperparameters of a run's winner, round by round along its line of ancestors.

    Attributes:
        kind: "last" (best agent of the last round), "archive" (best of all rounds; the line ends in
            its round) or "mean" (of two survivors; the line is the first survivor's).
        member, checkpoint: Member id and checkpoint of the winner.
        steps: GRPO steps per round.
        mutable: Hyperparameters that mutate, then those that the user set.
        rounds: From first to last, without rounds that a return to the archive undid.
        run_rows, run_tokens: Completions of all agents in all rounds, and their tokens.
        parents: Member ids of the two survivors of a mean, else empty.
    """

    kind: str
    member: int
    checkpoint: str
    steps: int
    mutable: tuple[HyperparameterName, ...]
    rounds: tuple[ScheduledRound, ...]
    run_rows: int
    run_tokens: int
    parents: tuple[int, ...] = field(default=(), compare=False)

    @property
    def rows(self) -> int:
        """Number of completions that the winner and its ancestors sampled in all rounds."""
        return sum(scheduled.rows for scheduled in self.rounds)

    @property
    def tokens(self) -> int:
        """Number of tokens that the winner and its ancestors sampled in all rounds."""
        return sum(scheduled.tokens for scheduled in self.rounds)

    @property
    def last(self) -> Hparams:
        """The hyperparameters of the last round of the schedule."""
        return self.rounds[-1].hparams

    @property
    def moves(self) -> bool:
        """Whether a hyperparameter changes between rounds of the schedule."""
        return any(scheduled.hparams != self.last for scheduled in self.rounds)

    def prompts_per_step(self, scheduled: ScheduledRound) -> float:
        """Return the mean number of prompts per GRPO step in a round of the schedule."""
        return scheduled.rows / self.steps / scheduled.hparams.group_size

    def hyperparameters(self) -> tuple[str, ...]:
        """Return the hyperparameters that a table of the schedule shows, in order of columns."""
        further = [name for name in self.mutable if name not in columns.ALWAYS]
        return ("lr", "beta", "clip_coef", "group_size", *further)

    def to_json(self) -> dict[str, Any]:
        """Return the schedule as plain JSON values."""
        rounds = [
            {**asdict(scheduled), "prompts_per_step": self.prompts_per_step(scheduled)}
            for scheduled in self.rounds
        ]
        return plain_value({**asdict(self), "rounds": rounds})


@dataclass(frozen=True)
class Training:
    """One of the two kinds of training that a replay compares; `name` is one of `REPLAYED`.

    `hparams` has the hyperparameters of each round. `prompts` has the number of prompts, >= 1, of
    each GRPO step of each round.
    """

    name: str
    hparams: tuple[Hparams, ...]
    prompts: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> int:
        """Number of completions that are sampled in this training."""
        rounds = zip(self.hparams, self.prompts, strict=True)
        return sum(values.group_size * sum(counts) for values, counts in rounds)


@dataclass(frozen=True)
class ReplayArm(Arm):
    """The result of the trainings of one kind, each of which sampled `rows` completions.

    `prompts` is as in `Training`. `failed_steps` counts the optimizer steps of all trainings that
    were skipped because a gradient was not finite.
    """

    prompts: tuple[tuple[int, ...], ...]
    rows: int
    failed_steps: int


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    Attributes:
        repeats: Trainings of each kind.
        trained: The results of schedule-run and constant-run.
        winner: The winner's mean reward, on the same test prompts with the same draws.
        differences: schedule-run minus constant-run, then each kind minus the winner.
        files: SHA-256 of the files of the checkpoints, by their paths below `RUN/replay`.
    """

    schedule: Schedule
    seed: int
    repeats: int
    trained: tuple[ReplayArm, ...]
    winner: Score
    differences: tuple[Difference, ...]
    wall_seconds: float
    files: Mapping[RelativePath, str] = field(default_factory=dict[str, str])

    def training(self, name: str) -> ReplayArm:
        """Return the result of a kind of training, by its name in `REPLAYED`."""
        return next(replayed for replayed in self.trained if replayed.name == name)

    def difference(self, first: str, second: str) -> Difference:
        """Return the difference between two arms, which are named as in `differences`."""
        return next(d for d in self.differences if (d.first, d.second) == (first, second))

    @property
    def outcome(self) -> Outcome:
        """How the schedule compares with its last values held constant, at equal numbers of rows.

        "ahead" or "behind" if both the interval and the p-value are significant. "same" if both
        trainings had equal values in every step, and numbers of prompts that differ by at most one.
        "failed" if a training ended without a finite reward; else "unclear".
        """
        moving, constant = map(self.training, REPLAYED)
        if not math.isfinite(moving.test.mean) or not math.isfinite(constant.test.mean):
            return "failed"
        if not self.schedule.moves and _equal_prompts(moving.prompts, constant.prompts):
            return "same"
        outcomes: dict[int, Outcome] = {1: "ahead", -1: "behind", 0: "unclear"}
        return outcomes[self.difference(*REPLAYED).sign]

    @property
    def verdict(self) -> str:
        """A sentence: whether the schedule was better than its last values held constant."""
        numbers = _numbers(self.difference(*REPLAYED))
        return f"With the tokens of the whole run, {_OUTCOMES[self.outcome]}{numbers}."

    def caveat(self) -> str:
        """Return a sentence that says which randomness the intervals cover."""
        return caveat(self.repeats)

    def arms(self) -> Arms:
        """Return the part of the result that the terminal and the report show."""
        winner = Arm(WINNER, self.schedule.tokens, (self.winner,))
        return Arms((*self.trained, winner), self.differences, (self.verdict, self.caveat()))

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


def read_schedule(run: str | Path) -> Schedule:
    """Return the schedule of the winner of a finished run.

    Raises:
        RunDirError: The run is not finished, was recorded with objects that no file can name, or
            its winner trained for a single round.
    """
    folder = run_folder.expect_run(run)
    summary = read_summary(folder)
    if summary is None:
        raise RunDirError(
            f"{folder}: expected a finished run with a winner, got one without summary.json; "
            f"finish it with: evo-grpo resume {folder}"
        )
    run_folder.refuse_objects(
        folder,
        "so its trainings cannot be repeated from the folder; evo_grpo.history(folder) has the "
        "hyperparameters of every agent by round, to train a new agent with in Python",
    )
    steps = run_folder.read_config(folder).population.steps_per_round
    schedule = winner_schedule(run_folder.read_rounds(folder), summary["best"], steps)
    if len(schedule.rounds) < 2:
        raise RunDirError(
            f"{folder}: expected a winner that trained for two rounds or more, got member "
            f"{schedule.member} after its only round; start a run with more rounds "
            "(population.rounds), or with lower learning rates where later rounds were worse"
        )
    return schedule


def winner_schedule(
    rounds: Sequence[RoundRecord], winner: Mapping[str, Any], steps: int
) -> Schedule:
    """Return the schedule of `winner`, "best" of summary.json; `steps` is GRPO steps per round."""
    all_rows = {record.round: sum(map(_rows, record.agents)) for record in rounds}
    mutable = [name for record in rounds for name in record.mutable] + columns.steered(rounds)
    return Schedule(
        kind=winner["kind"],
        member=winner["member"],
        checkpoint=winner["checkpoint"],
        steps=steps,
        mutable=tuple(dict.fromkeys(mutable)),
        rounds=tuple(
            ScheduledRound(
                ancestor.round,
                ancestor.member,
                ancestor.hparams,
                _rows(ancestor),
                ancestor.tokens,
                all_rows[ancestor.round],
            )
            for ancestor in winning_lines(rounds, winner)[0]
        ),
        run_rows=sum(all_rows.values()),
        run_tokens=sum(agent.tokens for record in rounds for agent in record.agents),
        parents=tuple(winner["parents"]) if winner["kind"] == "mean" else (),
    )


def trainings(schedule: Schedule) -> tuple[Training, Training]:
    """Plan the trainings of a replay: schedule-run, and constant-run with the last values.

    Both have the steps and rounds of the schedule. In each round, schedule-run samples as many rows
    as all agents of the run sampled in that round. If the schedule lacks rounds of the run, their
    rows are distributed over the rounds that it has. constant-run samples the same total, with
    equal numbers of prompts per step up to rounding. Each training samples as many rows as the run,
    give or take one group, and at least one prompt per step.
    """
    rounds, steps = schedule.rounds, schedule.steps
    scale = schedule.run_rows / sum(scheduled.run_rows for scheduled in rounds)
    rows = [scheduled.run_rows * scale for scheduled in rounds]
    values, fixed = tuple(scheduled.hparams for scheduled in rounds), (schedule.last,) * len(rounds)
    counts = _evenly(round(sum(rows) / schedule.last.group_size), len(rounds) * steps)
    evenly = tuple(counts[i * steps : (i + 1) * steps] for i in range(len(rounds)))
    prompts = (_prompts(rows, values, steps), evenly)
    moving, constant = map(Training, REPLAYED, (values, fixed), prompts)
    return moving, constant


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
    """Return the result in replay.json or `file`, None before a replay is finished."""
    file = file or run_folder.expect_run(run) / REPLAY_RESULT
    content = f"the result of a replay in format {FORMAT}"
    result = run_folder.read_result(file, _REPLAY, content, f"replay {run} --force")
    if result is None:
        return None
    data, replay = result
    if data.get("format") != FORMAT:
        raise RunDirError(
            f"{file}: expected {content}, got format {data.get('format')!r}; read it with the "
            f"evo-grpo that wrote it, or replay the run again with: evo-grpo replay {run} --force"
        )
    return replay


def write_replay(run: Path, replay: Replay) -> None:
    """Write replay.json, which marks the replay of a run as finished."""
    atomic_write(run / REPLAY_RESULT, seal(replay.to_json(), indent=1), "replay")


def _equal_prompts(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> bool:
    """Return whether the numbers of prompts of two trainings differ by at most 1 in every step."""
    pairs = zip(first, second, strict=True)
    return all(
        abs(a - b) <= 1
        for first_prompts, second_prompts in pairs
        for a, b in zip(first_prompts, second_prompts, strict=True)
    )


def _prompts(
    rows: Sequence[float], hparams: Sequence[Hparams], steps: int
) -> tuple[tuple[int, ...], ...]:
    """Return the number of prompts by round and step for `rows`, the number of rows by round.

    The remainder of the rounding is carried over to the next round.
    """
    remainder = 0.0
    prompts: list[tuple[int, ...]] = []
    for round_rows, values in zip(rows, hparams, strict=True):
        remainder += round_rows
        counts = _evenly(round(remainder / values.group_size), steps)
        remainder -= sum(counts) * values.group_size
        prompts.append(counts)
    return tuple(prompts)


def _evenly(groups: int, steps: int) -> tuple[int, ...]:
    """Return the number of groups of each step, as equal as possible and at least 1."""
    groups = max(groups, steps)
    return tuple((i + 1) * groups // steps - i * groups // steps for i in range(steps))


def _rows(agent: AgentRecord) -> int:
    """Return the number of rows that an agent sampled in a round, dropped episodes included."""
    return int(agent.metrics["rows"] + agent.metrics.get("dropped", 0.0))


def _numbers(ahead: Difference) -> str:
    """Return a difference with its interval as text, empty if it has no interval."""
    if not math.isfinite(ahead.error):
        return ""
    text = (
        f": schedule minus constant {ahead.difference:+.3f} [{ahead.low:+.3f}, {ahead.high:+.3f}] "
        "per test prompt"
    )
    beyond_zero = ahead.low > 0 or ahead.high < 0
    if ahead.trainings > 1 and beyond_zero and not ahead.sign:
        text += f", and p {ahead.p:.2g} from {ahead.prompts} prompts"
    return text

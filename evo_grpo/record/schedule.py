"""The schedule of a run's winner, and the plan of the trainings that replay it; no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evo_grpo.errors import RunDirError
from evo_grpo.record import columns
from evo_grpo.record.files import plain_value
from evo_grpo.record.folder import expect_run, read_config, read_rounds, refuse_objects
from evo_grpo.record.names import REPLAYED
from evo_grpo.record.records import HyperparameterName
from evo_grpo.record.summary import read_summary, winning_lines
from evo_grpo.schema.hparams import Hparams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from evo_grpo.record.records import AgentRecord, RoundRecord


@dataclass(frozen=True)
class ScheduledRound:
    """One round of the winner's line of ancestors.

    Attributes:
        round: 0-based round of the run.
        member: Member that trained in the round.
        hparams: Hyperparameters of the member.
        rows: Completions, or episodes, that the member sampled in training.
        tokens: Tokens that the member sampled in training.
        run_rows: Completions of all agents of the run in that round.
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
            its round) or "mean" (of two survivors; the line is that of the first).
        member: Member id of the winner.
        checkpoint: Checkpoint of the winner, relative to the run folder.
        steps: GRPO steps per round.
        mutable: Hyperparameters that may change in the run: those that mutate, then those that the
            user set.
        rounds: First to last. If the run returned to the best agent ever, the rounds between are
            missing.
        run_rows: Completions of all agents in all rounds of the run.
        run_tokens: Tokens of these completions.
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
        """Completions of the whole line."""
        return sum(one.rows for one in self.rounds)

    @property
    def tokens(self) -> int:
        """Tokens of the whole line."""
        return sum(one.tokens for one in self.rounds)

    @property
    def last(self) -> Hparams:
        """The hyperparameters of the last round."""
        return self.rounds[-1].hparams

    @property
    def moves(self) -> bool:
        """Whether a hyperparameter changes from one round to another."""
        return any(one.hparams != self.last for one in self.rounds)

    def prompts_per_step(self, one: ScheduledRound) -> float:
        """Return the mean number of prompts per GRPO step in a round of the schedule."""
        return one.rows / self.steps / one.hparams.group_size

    def hyperparameters(self) -> tuple[str, ...]:
        """Return the names of the hyperparameters that a table shows, in order."""
        also = [name for name in self.mutable if name not in columns.ALWAYS]
        return ("lr", "beta", "clip_coef", "group_size", *also)

    def frame(self) -> pd.DataFrame:
        """Return the schedule as a typed frame with one row per round.

        The columns are round (0-based), member, the hyperparameters of the leaderboard,
        prompts_per_step, rows and tokens.
        """
        names = [*columns.ALWAYS, *(n for n in self.mutable if n not in columns.ALWAYS)]
        rows = [
            {
                "round": one.round,
                "member": one.member,
                **columns.values(one.hparams, names),
                "prompts_per_step": self.prompts_per_step(one),
                "rows": one.rows,
                "tokens": one.tokens,
            }
            for one in self.rounds
        ]
        types = {
            **dict.fromkeys(("round", "member"), "Int64"),
            **columns.dtypes(names),
            "prompts_per_step": "float64",
            **dict.fromkeys(("rows", "tokens"), "Int64"),
        }
        return columns.frame(rows, types)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able mapping."""
        rounds = [
            {**asdict(one), "prompts_per_step": self.prompts_per_step(one)} for one in self.rounds
        ]
        return plain_value({**asdict(self), "rounds": rounds})


@dataclass(frozen=True)
class Training:
    """One kind of training of a replay, step by step.

    Attributes:
        name: Name of the training and of its folder, one of `REPLAYED`.
        hparams: Hyperparameters of each round.
        prompts: Prompts by round and GRPO step, each P >= 1.
    """

    name: str
    hparams: tuple[Hparams, ...]
    prompts: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> int:
        """Completions that the training samples."""
        rounds = zip(self.hparams, self.prompts, strict=True)
        return sum(values.group_size * sum(counts) for values, counts in rounds)


def read_schedule(run: str | Path) -> Schedule:
    """Return the schedule of the winner of a finished run.

    Raises:
        RunDirError: The run is not finished, was recorded with objects that no file can name, or
            its winner trained for a single round; or another version of this library wrote it.
        CheckpointError: A record is damaged.
    """
    folder = expect_run(run)
    summary = read_summary(folder)
    if summary is None:
        raise RunDirError(
            f"{folder}: expected a finished run with a winner, got one without summary.json; "
            f"finish it with: evo-grpo resume {folder}"
        )
    refuse_objects(
        folder,
        "so its trainings cannot be repeated from the folder; evo_grpo.history(folder) has the "
        "hyperparameters of every agent by round, to train a new agent with in Python",
    )
    rounds = read_rounds(folder)
    steps = read_config(folder).population.steps_per_round
    found = winner_schedule(rounds, summary["best"], steps)
    last = found.rounds[-1]
    if len(found.rounds) < 2:
        raise RunDirError(
            f"{folder}: expected a winner that trained for two rounds or more, got member "
            f"{found.member} as it was after round {last.round + 1}, its only round: a single "
            "round is no schedule; start a run with more rounds (population.rounds), or with lower "
            "learning rates where later rounds were worse"
        )
    return found


def winner_schedule(
    rounds: Sequence[RoundRecord], winner: Mapping[str, Any], steps: int
) -> Schedule:
    """Return the schedule of a winner: "best" of summary.json; rounds have `steps` GRPO steps."""
    line = winning_lines(rounds, winner)[0]
    all_rows = {record.round: sum(map(_rows, record.agents)) for record in rounds}
    return Schedule(
        kind=winner["kind"],
        member=winner["member"],
        checkpoint=winner["checkpoint"],
        steps=steps,
        mutable=tuple(
            dict.fromkeys(
                [name for record in rounds for name in record.mutable] + columns.steered(rounds)
            )
        ),
        rounds=tuple(
            ScheduledRound(
                one.round, one.member, one.hparams, _rows(one), one.tokens, all_rows[one.round]
            )
            for one in line
        ),
        run_rows=sum(all_rows.values()),
        run_tokens=sum(agent.tokens for record in rounds for agent in record.agents),
        parents=tuple(winner["parents"]) if winner["kind"] == "mean" else (),
    )


def trainings(schedule: Schedule) -> tuple[Training, Training]:
    """Plan the trainings of a replay: schedule-run, and constant-run with the last values.

    Both have the steps and rounds of the schedule. schedule-run samples in each round the rows of
    all agents of the run; rows of rounds that the line lacks are spread over its rounds.
    constant-run samples the same total, with equal numbers of prompts per step up to rounding. Each
    samples the rows of the run up to one group, and at least one prompt per step.
    """
    rounds, steps = schedule.rounds, schedule.steps
    scale = schedule.run_rows / sum(one.run_rows for one in rounds)
    rows = [one.run_rows * scale for one in rounds]
    values, last = tuple(one.hparams for one in rounds), (schedule.last,) * len(rounds)
    counts = _evenly(round(sum(rows) / schedule.last.group_size), len(rounds) * steps)
    evenly = tuple(counts[i * steps : (i + 1) * steps] for i in range(len(rounds)))
    prompts = (_prompts(rows, values, steps), evenly)
    moving, constant = map(Training, REPLAYED, (values, last), prompts)
    return moving, constant


def equal_prompts(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> bool:
    """Return whether two trainings have equal prompts in every step, up to one prompt."""
    pairs = zip(first, second, strict=True)
    return all(abs(a - b) <= 1 for one, other in pairs for a, b in zip(one, other, strict=True))


def _prompts(
    rows: Sequence[float], hparams: Sequence[Hparams], steps: int
) -> tuple[tuple[int, ...], ...]:
    """Return the prompts of each round and step; the rounding remainder carries over."""
    left = 0.0
    found: list[tuple[int, ...]] = []
    for wanted, values in zip(rows, hparams, strict=True):
        left += wanted
        counts = _evenly(round(left / values.group_size), steps)
        left -= sum(counts) * values.group_size
        found.append(counts)
    return tuple(found)


def _evenly(groups: int, steps: int) -> tuple[int, ...]:
    """Divide groups evenly over steps, at least one per step."""
    groups = max(groups, steps)
    return tuple((i + 1) * groups // steps - i * groups // steps for i in range(steps))


def _rows(agent: AgentRecord) -> int:
    """Return the rows that an agent sampled in a round, dropped episodes included."""
    return int(agent.metrics["rows"] + agent.metrics.get("dropped", 0.0))

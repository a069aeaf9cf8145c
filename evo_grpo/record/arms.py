"""Compares a run with other trainings, by their mean rewards on the same test prompts.

An "arm" is the run, or all trainings of one kind that the run is compared with. `run --compare`
writes its result to compare.json, `replay` to replay.json. `Arms` is the part of either file that
the terminal and the report show.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, TypeAdapter

from evo_grpo.evolve.claims import TEST_LEVEL, chance, signs
from evo_grpo.evolve.compare import compare
from evo_grpo.evolve.intervals import around, interval
from evo_grpo.record import files, names, wording
from evo_grpo.record.folder import read_result
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.summary import MeanReward, score_of
from evo_grpo.types import Number, Score

EVOLVED = "evolved"
"""Name of the arm that is the run itself, in compare.json."""
WINNER = "winner"
"""Name of the arm that is the run's winner, in replay.json."""
EQUAL_TOKENS = 0.03
"""Numbers of tokens count as equal if they differ by at most this share of the run's tokens."""

_NO_SCORE = Score(math.nan, math.nan, 0)
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_LABELS = {
    "guess": "{} agents at your guess",
    "random": "{} random guesses",
    EVOLVED: "evolved",
    "schedule-run": "schedule",
    "constant-run": "last values",
    WINNER: "the winner",
}


@dataclass(frozen=True)
class Difference:
    """Difference of the mean rewards of two arms, on the test prompts that both answered.

    Attributes:
        first, second: Names of the arms; `difference` is the first arm's mean minus the second's.
        error: Standard error of the difference, paired over the prompts. It includes the spread
            between the trainings of an arm that has several. NaN with fewer than two prompts.
        low, high: The 95% interval of the difference.
        p: Two-sided p-value over the prompts (`evo_grpo.evolve.claims.chance`).
        prompts: Number of prompts that both arms answered.
        trainings: Number of trainings of the arm that has more. If both have a single training,
            `low`, `high` and `p` cover the choice of test prompts, not the randomness of training.
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
        cls, first: str, firsts: Sequence[Score], second: str, seconds: Sequence[Score]
    ) -> Self:
        """Compare two arms; `firsts` and `seconds` have the scores of the trainings of each arm.

        All scores are on the same prompts. A winner, as an arm, has one score.
        """
        first_score, second_score = pooled(firsts), pooled(seconds)
        gap = compare(first_score, second_score)
        groups = [[s.mean for s in scores] for scores in (firsts, seconds) if len(scores) > 1]
        freedom = sum(len(means) - 1 for means in groups)
        seeds_error, half_width = 0.0, interval(0.0, gap.error, gap.prompts)[1]
        if freedom:
            squares = sum(len(means) * float(np.var(means)) for means in groups)
            seeds_error = math.sqrt(squares / freedom * sum(1 / len(means) for means in groups))
            half_width = math.hypot(half_width, around(0.0, seeds_error, freedom)[1])
        return cls(
            first,
            second,
            gap.difference,
            math.hypot(gap.error, seeds_error),
            gap.difference - half_width,
            gap.difference + half_width,
            chance(first_score, second_score),
            gap.prompts,
            max(len(firsts), len(seconds)),
        )

    @property
    def sign(self) -> int:
        """Return 1 if the first arm is significantly ahead, -1 if significantly behind, else 0."""
        # Trainings with the same values differ by more than the prompts explain, and the exact
        # test is the stricter one if a few prompts all have the same difference.
        if self.trainings < 2 or not (self.low > 0 or self.high < 0):
            return 0
        return signs([self.difference], [self.p], 2, TEST_LEVEL)[0]


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: all trainings of one kind, or the run, or the run's winner.

    `tokens` is the number of tokens that one training sampled, without the test; `tests` has the
    score of each training on the test prompts.
    """

    name: str
    tokens: int
    tests: tuple[Score, ...]

    @property
    def test(self) -> Score:
        """Test score, averaged over the trainings; NaN if a training has no test rewards."""
        return pooled(self.tests)

    @property
    def spread(self) -> float:
        """Standard deviation of the mean test reward between trainings; NaN for one training."""
        means = [score.mean for score in self.tests]
        return float(np.std(means, ddof=1)) if len(means) > 1 else math.nan


@dataclass(frozen=True)
class Arms:
    """What the terminal and the report show of a comparison or of a replay.

    The last arm is the run, or its winner in a replay. `agents` is the size of the population.
    """

    arms: tuple[Arm, ...]
    differences: tuple[Difference, ...]
    sentences: tuple[str, ...]
    agents: int = 0

    def label(self, name: str) -> str:
        """Return the displayed name of an arm."""
        return arm_label(name, self.agents)


def arm_label(name: str, agents: int) -> str:
    """Return the displayed name of an arm; `agents` is the size of the run's population."""
    number = _NUMBERS[agents] if agents < len(_NUMBERS) else agents
    return _LABELS.get(name, name).format(number)


def pooled(scores: Sequence[Score]) -> Score:
    """Return the mean of scores on the same prompts, or the only score as it is.

    The mean of several scores is NaN if one of them has no rewards by prompt.
    """
    if len(scores) == 1:
        return scores[0]
    if not all(score.per_prompt for score in scores) or (
        len({len(score.per_prompt) for score in scores}) > 1  # an earlier version counted rows
    ):
        return _NO_SCORE
    table = np.array([score.per_prompt for score in scores], dtype=np.float64)
    per_prompt = table.mean(axis=0)
    rewards = per_prompt[np.isfinite(per_prompt)]
    prompts = len(rewards)
    error = float(rewards.std(ddof=1) / math.sqrt(prompts)) if prompts > 1 else math.nan
    mean = math.fsum(rewards) / prompts if prompts else math.nan
    return Score(mean, error, prompts, tuple(per_prompt.tolist()))


def summary_score(summary: Mapping[str, Any] | None, key: str = "best") -> Score:
    """Return the test score of `key`, "best" or "base", in summary.json; NaN without a summary."""
    return _NO_SCORE if summary is None else score_of(summary[key])


def caveat(repeats: int) -> str:
    """Return a sentence on which randomness the intervals cover, for `repeats` trainings a kind."""
    if repeats == 1:
        return (
            "One training of each kind: the intervals of 95% cover the test prompts but not the "
            "draws in training, so no difference is reported as significant."
        )
    return (
        f"Means of {repeats} trainings of each kind; the intervals of 95% cover the test prompts "
        "and the draws in training."
    )


@dataclass(frozen=True)
class _ComparedArm:
    name: Literal["guess", "random", "evolved"]
    folder: str
    tokens: Mapping[str, int]
    test: MeanReward


@dataclass(frozen=True)
class _Comparison:
    """The content of compare.json."""

    agents: int
    split: str
    arms: Annotated[list[_ComparedArm], Field(min_length=1)]
    differences: tuple[Difference, ...] = ()


_COMPARISON = TypeAdapter(_Comparison)


def read_comparison(run: str | Path, file: Path | None = None) -> dict[str, Any] | None:
    """Return the content of compare.json, or of `file`; None before a comparison is finished."""
    file = file or Path(run) / names.COMPARISON
    content = "the result of a comparison"
    result = read_result(file, _COMPARISON, content, f"resume {run} --compare")
    return None if result is None else result[0]


def tokens_by_purpose(rounds: Sequence[RoundRecord], summary: Mapping[str, Any]) -> dict[str, int]:
    """Return how many tokens a run sampled in training and in evaluation, without the test."""
    return {
        "training": sum(agent.tokens for record in rounds for agent in record.agents),
        "evaluation": sum(r.evaluation_tokens for r in rounds) + summary["final_tokens"],
    }


def tokens_to_train(rounds: Sequence[RoundRecord], summary: Mapping[str, Any]) -> int:
    """Return a run's tokens minus those of one evaluation: what an arm may sample in training."""
    evaluated = next((record for record in rounds if not record.between), rounds[0])
    tokens_per_agent = evaluated.evaluation_tokens / len(evaluated.agents)
    to_evaluate = round(tokens_per_agent * len(rounds[0].agents))
    return sum(tokens_by_purpose(rounds, summary).values()) - to_evaluate


def comparison(
    agents: int, ends: Mapping[str, tuple[Sequence[RoundRecord], Mapping[str, Any]]]
) -> dict[str, Any]:
    """Return the content of compare.json.

    `ends` maps the name of each arm to its rounds and its summary.json; the run comes last.
    """
    tests = {name: [summary_score(summary)] for name, (_, summary) in ends.items()}
    return {
        "agents": agents,
        "split": ends[EVOLVED][1]["split"],
        "arms": [
            {
                "name": name,
                "folder": "." if name == EVOLVED else f"{names.COMPARE}/{name}",
                "tokens": tokens_by_purpose(rounds, summary),
                "test": {key: summary["best"][key] for key in ("mean", "se", "n")},
            }
            for name, (rounds, summary) in ends.items()
        ],
        "differences": [
            files.plain_value(
                asdict(Difference.between(EVOLVED, tests[EVOLVED], name, tests[name]))
            )
            for name in ends
            if name != EVOLVED
        ],
    }


def comparison_arms(result: Mapping[str, Any]) -> Arms:
    """Convert the content of compare.json to what the terminal and the report show of it."""
    compared = _COMPARISON.validate_python(result)
    arms = tuple(
        Arm(arm.name, sum(arm.tokens.values()), (score_of(vars(arm.test)),))
        for arm in compared.arms
    )
    tokens_of_run = max(1, arms[-1].tokens)
    gap = max(abs(arm.tokens - tokens_of_run) for arm in arms) / tokens_of_run
    equal = "equal tokens" if gap <= EQUAL_TOKENS else f"tokens that differ by up to {gap:.0%}"
    spent = ", ".join(
        f"{arm.name} {arm.tokens['training']:,} + {arm.tokens['evaluation']:,}"
        for arm in compared.arms
    )
    prompts = wording.count(arms[-1].test.n, f"{compared.split} prompt")
    basis = (
        f"Compared at {equal}, on the same {prompts} with the same draws. Tokens for training + "
        f"evaluation: {spent}."
    )
    limits = [caveat(1)] if compared.differences else []
    return Arms(arms, compared.differences, (basis, *limits), compared.agents)

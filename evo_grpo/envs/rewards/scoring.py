"""Score completions: call every reward function with its columns and check every result.

With `env.reward_style: trl`, functions are called as TRL calls them.
"""

import math
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast, final

import numpy as np

from evo_grpo.envs.messages import excerpt, listed
from evo_grpo.envs.protocol import Floats
from evo_grpo.envs.rewards.functions import RewardFunction, Scorer, UnusableRewardError
from evo_grpo.envs.rewards.watch import Call, run_calls
from evo_grpo.errors import RewardError
from evo_grpo.escaping import error_text, shorten
from evo_grpo.record.vocabulary import REWARD_OF
from evo_grpo.schema.validation import LARGEST_REWARD as LARGEST
from evo_grpo.settings.env import RewardCalls

LATEST_GROUPS = 100
"""Number of the latest groups of which `env.reward_failures` is a share."""

SHOWN = 60
"""Number of characters to which `shown_calls` cuts a value."""

_NOT_PASSED_BY_TRL = ("prompt", "completion", "completion_ids")
"""Columns that TRL does not pass on."""


@dataclass(frozen=True)
class TrainerState:
    """The supported part of TRL's `trainer_state`.

    Attributes:
        global_step: Number of training prompts before the call, divided by the prompts of a step; 0
            in evaluations and outside a run.
    """

    global_step: int


@dataclass(frozen=True)
class Samples:
    """What functions in TRL's style get for B completions besides texts and columns.

    Attributes:
        token_ids: Sampled ids of each completion, the end token included.
        messages: The conversation that each completion answers; None for a prompt of plain text.
        step: `TrainerState.global_step`.
    """

    token_ids: Sequence[Sequence[int]]
    messages: Sequence[Sequence[Mapping[str, Any]] | None]
    step: int = 0


@dataclass
class Log:
    """The values that reward functions log with `log_metric`, by name."""

    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def log_metric(self, name: str, value: float) -> None:
        """Add `value` to the values of the metric `name`."""
        self.values[str(name)].append(float(value))

    def log_extra(self, column: str, values: Sequence[object]) -> None:
        """Do nothing, because the files in `completions/` have all columns and rewards."""

    def means(self) -> dict[str, float]:
        """Return the mean of the values of each name, without values beyond 1e15 in size."""
        usable = {
            name: [n for n in values if abs(n) <= LARGEST] for name, values in self.values.items()
        }
        return {name: math.fsum(values) / len(values) for name, values in usable.items() if values}


@dataclass(frozen=True)
class CompletionBatch:
    """B completions, each with its row, its prompt and the place of the row in the user's file.

    `samples` is for functions that are called as TRL calls them.
    """

    completions: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    prompts: Sequence[str]
    places: Sequence[str]
    samples: Samples | None = None

    def title(self, function: str, position: int | None = None) -> str:
        """Return how messages name a call for the completion at `position`; None stands for all."""
        place = self.all_places() if position is None else self._place(position)
        return f"reward function {function!r}, {place}"

    def all_places(self) -> str:
        """Return how messages describe the batch: its size and its first completion."""
        return f"{len(self.completions)} completions, the first: {self._place(0)}"

    def _place(self, position: int) -> str:
        return (
            f"{self.places[position]}, prompt {excerpt(self.prompts[position])}, "
            f"completion {excerpt(self.completions[position])}"
        )


@dataclass(frozen=True)
class Failure:
    """Rewards that cannot be used: the positions of their completions, and why."""

    positions: Sequence[int]
    text: str


@dataclass(frozen=True)
class Scored:
    """Rewards of B completions.

    Attributes:
        rewards: (B, K) float64, unweighted, for K reward functions; NaN where a function abstained
            or failed.
        failures: Failures that do not end the run.
        logged: What functions logged with TRL's `log_metric`: the mean of each name.
    """

    rewards: np.ndarray[Any, np.dtype[np.float64]]
    failures: Sequence[Failure] = ()
    logged: Mapping[str, float] = field(default_factory=dict[str, float])


def score_batch(
    rewards: Sequence[RewardFunction],
    batch: CompletionBatch,
    how: RewardCalls,
    mark: Callable[[int], None] | None = None,
) -> Scored:
    """Score completions with every reward function.

    `how` has the time limit of a call. If its `reward_errors` is "set_aside", an exception or a
    result of a wrong type becomes a failure; otherwise RewardError is raised. A NaN, infinite or
    too large reward always becomes a failure. A wrong number of rewards always raises RewardError.
    `mark` is called with the number of each call before the call.
    """
    out = np.full((len(batch.completions), len(rewards)), np.nan)
    if not len(out):
        return Scored(out)
    log = Log()
    calls = calls_of(rewards, batch, log)
    keep_errors = how.reward_errors == "set_aside"
    values = iter(run_calls(calls, how.reward_timeout, mark, keep_errors=keep_errors))
    failures: list[Failure] = []
    for column, reward in enumerate(rewards):
        # By type(): a value may report another __class__, or raise.
        results = [next(values) for _ in range(1 if reward.is_batch else len(out))]
        if reward.is_batch and type(results[0]) is RewardError:
            failures.append(Failure(range(len(out)), str(results[0])))
            continue
        if reward.is_batch:
            results = as_list(reward.name, results[0], batch)
        failures += _fill(out[:, column], reward, results, batch, keep_errors=keep_errors)
    return Scored(out, failures, log.means())


def with_scorers(
    rewards: Sequence[RewardFunction], scored: Scored, batch: CompletionBatch, how: RewardCalls
) -> Scored:
    """Return `scored`, the rewards of all other functions, with those of each `Scorer` added."""
    out = np.full((len(batch.completions), len(rewards)), np.nan)
    failures, reward_columns = list(scored.failures), iter(scored.rewards.T)
    for column, reward in enumerate(rewards):
        if not isinstance(reward.fn, Scorer):
            out[:, column] = next(reward_columns)
        elif len(out):
            (call,) = calls_of([reward], batch)
            keep_errors = how.reward_errors == "set_aside"
            results = reward.fn(**call.arguments)
            failures += _fill(out[:, column], reward, results, batch, keep_errors=keep_errors)
    return Scored(out, failures, scored.logged)


def _fill(
    column: Floats,
    reward: RewardFunction,
    results: Sequence[Any],
    batch: CompletionBatch,
    *,
    keep_errors: bool,
) -> Iterator[Failure]:
    """Write a function's results, one per completion, to `column`; yield the failures."""
    for number, value in enumerate(results):
        try:
            if issubclass(type(value), RewardError):
                raise value
            column[number] = as_number(reward.name, value, batch, number)
        except RewardError as error:
            if not keep_errors and not isinstance(error, UnusableRewardError):
                raise
            yield Failure((number,), str(error))


def reward_of_each(names: Sequence[str], rewards: Floats) -> dict[str, float]:
    """Return `reward/<name>` -> mean reward of each function, without weights.

    `rewards` is (B, K), NaN where a function abstained. A function that always abstained is left
    out. With fewer than two functions the result is empty, because the metric `reward` has that
    mean.
    """
    if len(names) < 2:
        return {}
    columns = zip(names, np.isfinite(rewards).T, rewards.T, strict=True)
    return {
        f"{REWARD_OF}{name}": float(column[is_scored].mean())
        for name, is_scored, column in columns
        if is_scored.any()
    }


def warn_of_silence(rewards: Sequence[RewardFunction], scored: Scored) -> None:
    """Warn if every function abstained on every completion."""
    if len(scored.rewards) and not scored.failures and np.isnan(scored.rewards).all():
        warnings.warn(
            f"every reward function ({listed(reward.name for reward in rewards)}) abstained on all "
            f"{len(scored.rewards)} completions: nothing to learn from; does each return its "
            "reward?",
            stacklevel=3,
        )


@final
class SetAside:
    """Counts groups that are set aside; raises an error if too many of the latest groups are."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._latest: deque[bool] = deque(maxlen=LATEST_GROUPS)
        self._warned = False

    def record(self, groups: Sequence[bool], reason: str) -> None:
        """Add the groups of one play; raise RewardError with `reason` if too many are set aside.

        `groups` says of each group whether it is set aside.
        """
        self._latest.extend(groups)
        count = sum(self._latest)
        if not any(groups):
            return
        # With a share of 1 a run ends when all of the latest groups were set aside.
        if count > self.share * LATEST_GROUPS or count == LATEST_GROUPS:
            several = "" if count == 1 else f" (of {count} such groups)"
            raise RewardError(
                f"{reason}{several}; mend the function, let it return None, or let more groups be "
                f"set aside with env.reward_failures, now {self.share:g} of the latest "
                f"{LATEST_GROUPS}"
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{reason}; its group is set aside and counted as set_aside, and so are later "
                "ones, without a warning",
                stacklevel=2,
            )


def calls_of(
    rewards: Sequence[RewardFunction], batch: CompletionBatch, log: Log | None = None
) -> list[Call]:
    """Return the calls that score a batch, by function; functions in TRL's style log to `log`."""
    calls: list[Call] = []
    for reward in rewards:
        names, takes_all, bound = reward.names(), reward.takes_all, reward.bound
        for position, keywords in enumerate(_arguments(reward, batch, log or Log())):
            if bound or not takes_all:
                keywords = {
                    name: value
                    for name, value in keywords.items()
                    if name in names or (takes_all and name not in bound)
                }
            title = partial(batch.title, reward.name, None if reward.is_batch else position)
            calls.append(Call(title, reward.fn, keywords))
    return calls


def shown_calls(rewards: Sequence[RewardFunction], row: Mapping[str, Any]) -> list[str]:
    """Return, for each reward function, a call for a completion of `row`, written as code."""
    calls: list[str] = []
    for reward in rewards:
        if isinstance(reward.fn, Scorer):
            calls.append(f"{reward.name}, asked about each completion")
            continue
        (call,) = calls_of([reward], CompletionBatch(["..."], [row], ["..."], ["row 0"]))
        reprs = {name: shorten(repr(value), SHOWN) for name, value in call.arguments.items()}
        if reward.style == "trl":
            calls.append(f"{reward.name}({', '.join(reprs)}), as TRL calls it")
        else:
            keywords = ", ".join(f"{name}={value}" for name, value in reprs.items())
            calls.append(f"{reward.name}({keywords})")
    return calls


def _arguments(reward: RewardFunction, batch: CompletionBatch, log: Log) -> list[dict[str, Any]]:
    """Return, for each call of a reward function, all arguments that it may take."""
    if reward.style == "trl":
        return [_trl_arguments(batch, log)]
    if reward.is_batch:
        columns = dict.fromkeys(column for row in batch.rows for column in row)
        lists = {column: [row.get(column) for row in batch.rows] for column in columns}
        return [{**lists, "completions": list(batch.completions), "prompts": list(batch.prompts)}]
    rows = zip(batch.completions, batch.rows, batch.prompts, strict=True)
    return [{**row, "completion": text, "prompt": prompt} for text, row, prompt in rows]


def _trl_arguments(batch: CompletionBatch, log: Log) -> dict[str, Any]:
    """Return the keyword arguments with which TRL 1.16 calls a reward function for a batch."""
    count = len(batch.completions)
    samples = batch.samples or Samples([()] * count, [None] * count)
    columns = dict.fromkeys(column for row in batch.rows for column in row)
    return {
        **{
            column: [row.get(column) for row in batch.rows]
            for column in columns
            if column not in _NOT_PASSED_BY_TRL
        },
        "prompts": [
            text if chat is None else [dict(message) for message in chat]
            for text, chat in zip(batch.prompts, samples.messages, strict=True)
        ],
        "completions": [
            text if chat is None else [{"role": "assistant", "content": text}]
            for text, chat in zip(batch.completions, samples.messages, strict=True)
        ],
        "completion_ids": [list(ids) for ids in samples.token_ids],
        "trainer_state": TrainerState(samples.step),
        "log_metric": log.log_metric,
        "log_extra": log.log_extra,
    }


def as_list(name: str, value: object, batch: CompletionBatch) -> list[Any]:
    """Return the result of a batch function as a list with one value per completion."""
    count, plain = len(batch.completions), None
    with _suppressed():
        values = _plain(value)
        if isinstance(values, Sequence) and not isinstance(values, str | bytes):
            plain = list(cast("Sequence[Any]", values))
    if plain is None or len(plain) != count:
        got = _described(value) if plain is None else len(plain)
        hint = "; does it return its list?" if value is None else ""
        raise RewardError(
            f"reward function {name!r}: expected a list of {count} rewards, one per completion "
            f"(None for one that is not scored), got {got} for {batch.all_places()}{hint}"
        )
    return plain


@contextmanager
def _suppressed() -> Generator[None]:
    """Ignore exceptions in a `with` block that reads a result; a clearer error is raised later."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:  # user code may raise anything
        pass


def _plain(value: object) -> object:
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else value


def as_number(name: str, value: object, batch: CompletionBatch, position: int) -> float:
    """Return a reward as a float; None, by which a function abstains, becomes NaN."""
    if value is None:
        return math.nan
    if type(value) is float and -LARGEST <= value <= LARGEST:  # most values, without a context
        return value
    kind, expected = RewardError, "a finite number"
    with _suppressed():
        plain = _plain(value)
        if not isinstance(plain, str | bytes):  # a numeric string is a mistake
            try:
                number = float(cast("float", plain))
            except OverflowError:  # an integer of hundreds of digits
                number = math.inf
            if -LARGEST <= number <= LARGEST:  # NaN is not
                return number
            kind = UnusableRewardError
            if math.isfinite(number):
                expected = f"a number from -{LARGEST:g} to {LARGEST:g}"
    raise kind(
        f"{batch.title(name, position)}: expected {expected}, or None to abstain, got "
        f"{_described(value)}"
    )


def _described(value: object) -> str:
    """Return a description of a value for a message, even if its `__str__` raises."""
    if value is None:
        return "None"
    try:
        if isinstance(value, float):
            return repr(value)
        return f"{type(value).__name__} {excerpt(str(value))}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"{type(value).__name__}, whose __str__ raised {error_text(error)}"

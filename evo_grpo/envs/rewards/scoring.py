"""Completions to rewards: every function called with its columns, every result checked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from evo_grpo.envs.messages import listed, nearest
from evo_grpo.envs.rewards.calls import Call, Raised, run_calls
from evo_grpo.envs.rewards.functions import BATCH_NAMES, ROW_NAMES, RewardFunction
from evo_grpo.envs.rewards.reward_values import (
    CompletionBatch,
    UnusableRewardError,
    as_list,
    as_number,
)
from evo_grpo.errors import DataError, RewardError


@dataclass(frozen=True)
class Failure:
    """A reward that cannot be used.

    Attributes:
        positions: Of which completions.
        text: Function, row, prompt, and what was wrong.
    """

    positions: Sequence[int]
    text: str


@dataclass(frozen=True)
class Scored:
    """Rewards of B completions.

    Attributes:
        rewards: (B, K) float64 without weights; NaN where a function abstains or failed.
        failures: What failed, where that ends nothing.
    """

    rewards: np.ndarray[Any, np.dtype[np.float64]]
    failures: Sequence[Failure] = ()


def score(
    rewards: Sequence[RewardFunction],
    completions: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[str],
    numbers: Sequence[int] | None = None,
    *,
    timeout: float | None = None,
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Score completions with every reward function; all async calls run at the same time.

    Args:
        rewards: K functions.
        completions: B texts.
        rows: B dataset rows.
        prompts: B prompt texts.
        numbers: B row numbers for messages; None counts from 0.
        timeout: Seconds that each call may take; None is no limit.

    Returns:
        (B, K) float64 rewards without weights; NaN where a function abstains.

    Raises:
        RewardError: A function raised, or returned a wrong count or something that is no finite
            number.
        DataError: A row lacks a column that a function needs.
    """
    batch = CompletionBatch(
        completions, rows, prompts, range(len(completions)) if numbers is None else numbers
    )
    scored = score_batch(rewards, batch, timeout=timeout)
    for failure in scored.failures:
        raise RewardError(failure.text)
    warn_of_silence(rewards, scored)
    return scored.rewards


def score_batch(
    rewards: Sequence[RewardFunction],
    batch: CompletionBatch,
    *,
    timeout: float | None = None,
    keep_errors: bool = False,
    mark: Callable[[int], None] | None = None,
) -> Scored:
    """Score completions, and say of which ones a reward cannot be used.

    Args:
        rewards: K functions.
        batch: B completions.
        timeout: Seconds that each call may take; None is no limit.
        keep_errors: Take an exception, or a result that is no number, for a failure too.
        mark: Told the number of each call before it is made; the calls are those of `calls_of`.

    Raises:
        RewardError: A function returned a wrong count of rewards; and, without `keep_errors`, what
            that would keep.
        RewardAbortError: A call took too long, or left torch's gradients off.
        DataError: A row lacks a column that a function needs.
    """
    out = np.full((len(batch.completions), len(rewards)), np.nan)
    if not len(out):
        return Scored(out)
    calls = calls_of(rewards, batch)
    values = iter(run_calls(calls, timeout=timeout, keep_errors=keep_errors, mark=mark))
    failures: list[Failure] = []
    for column, reward in enumerate(rewards):
        # Compared by their types: a value may say anything of its own class, or raise.
        results = [next(values) for _ in range(1 if reward.is_batch else len(out))]
        if reward.is_batch and type(results[0]) is Raised:
            failures.append(Failure(range(len(out)), str(results[0].named)))
            continue
        if reward.is_batch:
            results = as_list(reward.name, results[0], batch)
        for number, value in enumerate(results):
            try:
                if type(value) is Raised:
                    raise value.named
                out[number, column] = as_number(reward.name, value, batch, number)
            except RewardError as error:
                if not keep_errors and not isinstance(error, UnusableRewardError):
                    raise
                failures.append(Failure((number,), str(error)))
    return Scored(out, failures)


def warn_of_silence(rewards: Sequence[RewardFunction], scored: Scored) -> None:
    """Warn where every function abstained on every completion."""
    if len(scored.rewards) and not scored.failures and np.isnan(scored.rewards).all():
        warnings.warn(
            f"every reward function ({listed(reward.name for reward in rewards)}) abstained on all "
            f"{len(scored.rewards)} completions: nothing to learn from; does each return its "
            "reward?",
            stacklevel=3,
        )


def calls_of(rewards: Sequence[RewardFunction], batch: CompletionBatch) -> list[Call]:
    """Return the calls that score a batch, function by function."""
    calls: list[Call] = []
    for reward in rewards:
        calls += _batch_call(reward, batch) if reward.is_batch else _row_calls(reward, batch)
    return calls


def _row_calls(reward: RewardFunction, batch: CompletionBatch) -> list[Call]:
    names, required, takes_all = reward.names(), reward.required_columns(), reward.takes_all
    calls: list[Call] = []
    for position, (completion, row, prompt) in enumerate(
        zip(batch.completions, batch.rows, batch.prompts, strict=True)
    ):
        _require(reward, required, row, batch, position)
        given = {**row, "completion": completion, "prompt": prompt}
        if not takes_all:
            given = {name: value for name, value in given.items() if name in names}
        calls.append(Call(reward.name, reward.fn, given, partial(batch.place, position)))
    return calls


def _batch_call(reward: RewardFunction, batch: CompletionBatch) -> list[Call]:
    required = reward.required_columns()
    for position, row in enumerate(batch.rows):
        _require(reward, required, row, batch, position)
    columns = dict.fromkeys(column for row in batch.rows for column in row)
    given: dict[str, Any] = {
        column: [row.get(column) for row in batch.rows]
        for column in columns
        if reward.takes_all or column in reward.names()
    }
    given["completions"] = list(batch.completions)
    if reward.takes_all or "prompts" in reward.names():
        given["prompts"] = list(batch.prompts)
    return [Call(reward.name, reward.fn, given, batch.all_places)]


def _require(
    reward: RewardFunction,
    required: Mapping[str, str],
    row: Mapping[str, Any],
    batch: CompletionBatch,
    position: int,
) -> None:
    for column in required:
        if column not in row:
            own = BATCH_NAMES if reward.is_batch else ROW_NAMES
            raise DataError(
                f'reward function {reward.name!r} needs a column "{column}" that row '
                f"{batch.numbers[position]} has "
                f"not.{nearest(column, [*row, *own])} Columns of the row: {listed(row)}; "
                f"further parameters: {listed(own)}"
            )

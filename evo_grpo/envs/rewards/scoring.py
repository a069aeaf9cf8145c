"""Completions to rewards: every function called with its columns, every result checked."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evo_grpo.envs.messages import listed, nearest
from evo_grpo.envs.rewards.calls import Call, run_calls
from evo_grpo.envs.rewards.functions import BATCH_NAMES, ROW_NAMES, RewardFunction
from evo_grpo.envs.rewards.reward_values import CompletionBatch, as_list, as_number
from evo_grpo.errors import DataError


def score(
    rewards: Sequence[RewardFunction],
    completions: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[str],
    numbers: Sequence[int] | None = None,
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Score completions with every reward function; all async calls run at the same time.

    Args:
        rewards: K functions.
        completions: B texts.
        rows: B dataset rows.
        prompts: B prompt texts.
        numbers: B row numbers for messages; None counts from 0.

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
    out = np.full((len(completions), len(rewards)), np.nan)
    if not len(completions):
        return out
    calls: list[Call] = []
    for reward in rewards:
        calls += _batch_call(reward, batch) if reward.is_batch else _row_calls(reward, batch)
    values = iter(run_calls(calls))
    for column, reward in enumerate(rewards):
        if reward.is_batch:
            results = as_list(reward.name, next(values), batch)
        else:
            results = [next(values) for _ in completions]
        for number, value in enumerate(results):
            out[number, column] = as_number(reward.name, value, batch, number)
    if np.isnan(out).all():
        warnings.warn(
            f"every reward function ({listed(reward.name for reward in rewards)}) abstained on all "
            f"{len(out)} completions: nothing to learn from; does each return its reward?",
            stacklevel=2,
        )
    return out


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
        calls.append(Call(reward.name, reward.fn, given, batch.place(position)))
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
    return [Call(reward.name, reward.fn, given, batch.all_places())]


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

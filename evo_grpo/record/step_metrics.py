"""What each GRPO step of a run measured of each agent: rows, or a typed pandas frame."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from evo_grpo.errors import CheckpointError
from evo_grpo.record import columns
from evo_grpo.record.folder import expect_run, round_entries
from evo_grpo.record.names import METRICS, ROUNDS
from evo_grpo.record.plain import read_plain

if TYPE_CHECKING:
    import pandas as pd

WHERE = ("round", "step", "agent")
"""What says of which step and agent a row is: integers, both counts 0-based."""


def metric_rows(run: str | Path) -> list[dict[str, Any]]:
    """Return what each step of the finished rounds of a run measured, a row per step and agent.

    Args:
        run: The run folder, finished or not.

    Returns:
        Rows as they are recorded, by round, step and agent: `round`, `step`, `agent`, then a number
        for each metric, None where it was not finite. A round whose metrics were not kept has
        none, and neither has one of a run of evo-grpo 0.2 or before.

    Raises:
        RunNotFoundError: When it is no run folder.
        CheckpointError: When a line is damaged, naming it.
    """
    folder = expect_run(run)
    finished = read_plain(folder / ROUNDS).count(b"\n")
    rows: list[dict[str, Any]] = []
    for number, path in round_entries(folder / METRICS):
        if number < finished:
            rows += _rows_of(path)
    return rows


def read_metrics(run: str | Path) -> pd.DataFrame:
    """Return what each step of the finished rounds of a run measured of each agent.

    Args:
        run: The run folder, finished or not.

    Returns:
        One row per step and agent, by round, step and agent; none where metrics were not kept. The
        columns: round, step and agent (Int64), then a float64 for each metric that any step has,
        NaN where it was not finite or is not there. Their meanings stand in docs/metrics.md.

    Raises:
        RunNotFoundError: When it is no run folder.
        CheckpointError: When a line is damaged, naming it.
    """
    rows = metric_rows(run)
    names = list(dict.fromkeys(name for row in rows for name in row if name not in WHERE))
    types = {**dict.fromkeys(WHERE, "Int64"), **dict.fromkeys(names, "float64")}
    return columns.frame(rows, types)


def _rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(read_plain(path).splitlines(), start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not _is_row(cast("dict[str, Any]", row)):
                raise ValueError("it is no mapping of names to numbers with round, step and agent")
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path}, line {number}: expected the metrics of a step and an agent, but {error}; "
                "put the file back as it was, from a copy"
            ) from error
        rows.append(cast("dict[str, Any]", row))
    return rows


def _is_row(row: dict[str, Any]) -> bool:
    return all(type(row.get(name)) is int for name in WHERE) and all(
        value is None or type(value) in (int, float) for value in row.values()
    )

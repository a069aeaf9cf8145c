"""The metrics of each GRPO step and agent of a run, as rows or as a typed pandas frame."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from evo_grpo.errors import CheckpointError
from evo_grpo.record import columns
from evo_grpo.record.files import load_json
from evo_grpo.record.folder import expect_run, read_rounds, round_entries
from evo_grpo.record.names import METRICS
from evo_grpo.record.plain import MAX_LOG_BYTES, read_plain

if TYPE_CHECKING:
    import pandas as pd

WHERE = ("round", "step", "agent")
"""Keys that identify the step and the agent of a row: integers, round and step 0-based."""


def metric_rows(run: str | Path, finished: int | None = None) -> list[dict[str, Any]]:
    """Return the metrics of the finished rounds of a run, a row per step and agent.

    Args:
        run: The run folder, finished or not.
        finished: Number of finished rounds, if it is known; None reads it.

    Returns:
        Rows as recorded, ordered by round, step and agent: `round`, `step`, `agent`, then a number
        for each metric, None if it was not finite. A round whose metrics were not kept has no
        rows.

    Raises:
        RunNotFoundError: `run` is not a run folder.
        CheckpointError: A line is damaged; the error names it.
        RunDirError: Another version of this library wrote it.
    """
    folder = expect_run(run)
    finished = len(read_rounds(folder)) if finished is None else finished
    rows: list[dict[str, Any]] = []
    for round, path in round_entries(folder / METRICS):
        if round < finished:
            lines = read_plain(path, MAX_LOG_BYTES).splitlines()
            rows += [row_of(f"{path}, line {n}", line) for n, line in enumerate(lines, start=1)]
    return rows


def read_metrics(run: str | Path) -> pd.DataFrame:
    """Return the metrics of each step and agent in the finished rounds of a run.

    Args:
        run: The run folder, finished or not.

    Returns:
        One row per step and agent, ordered by round, step and agent; no rows where metrics were not
        kept. The columns: round, step and agent (Int64), then a float64 for each metric that any
        step has, NaN if it was not finite or is missing. docs/metrics.md defines them.

    Raises:
        RunNotFoundError: `run` is not a run folder.
        CheckpointError: A line is damaged; the error names it.
    """
    rows = metric_rows(run)
    names = list(dict.fromkeys(name for row in rows for name in row if name not in WHERE))
    types = {**dict.fromkeys(WHERE, "Int64"), **dict.fromkeys(names, "float64")}
    return columns.frame(rows, types)


def row_of(where: Path | str, line: bytes) -> dict[str, Any]:
    """Return a line of metrics, or raise CheckpointError, which names its file and line."""
    try:
        row = load_json(line)
        if not isinstance(row, dict) or not _is_row(cast("dict[str, Any]", row)):
            raise ValueError("it is not a mapping of names to numbers with round, step and agent")
    except ValueError as error:
        raise CheckpointError(
            f"{where}: expected the metrics of a step and an agent, but {error}; put the file back "
            "as it was, from a copy"
        ) from error
    return cast("dict[str, Any]", row)


def _is_row(row: dict[str, Any]) -> bool:
    return all(type(row.get(name)) is int for name in WHERE) and all(
        value is None or type(value) in (int, float) for value in row.values()
    )

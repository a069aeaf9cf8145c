"""The history of a run: a row per round and agent, or per GRPO step and agent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from evo_grpo.errors import CheckpointError
from evo_grpo.record import columns
from evo_grpo.record.files import load_json
from evo_grpo.record.folder import expect_run, read_rounds, round_entries
from evo_grpo.record.names import METRICS
from evo_grpo.record.plain import MAX_LOG_BYTES, read_plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from evo_grpo.record.records import AgentRecord, RoundRecord

#: Means over the GRPO steps of a round that get a column; NaN if an agent has none.
MEANS = (
    "reward",
    "kl",
    "loss",
    "entropy",
    "zero_variance",
    "clip_fraction",
    "completion_length",
)


def history(run: str | Path | Sequence[RoundRecord]) -> pd.DataFrame:
    """Return one row per round and agent of a run, finished or not.

    Args:
        run: The run folder, or the finished rounds, first to last.

    Returns:
        One row per round and agent, in this order; no rows before the first finished round. The
        columns, all typed:

        - round (0-based), agent, member, parent (missing in the first population)
        - state ("ok" or "failed"), fitness, fitness_se; after a round in between, they come from
          few validation prompts, or are the mean reward of the round's training
        - the hyperparameters that the agent trained with, as on the leaderboard
        - op and mutated: the mutation since the round before. op is that of `types.Mutation`, or
          "continue" where the same member trains on; mutated has the names of the hyperparameters
          that changed, joined by commas
        - reward, kl, loss, entropy, zero_variance, clip_fraction, completion_length: means over the
          round's steps, NaN if an agent has none; kl is NaN where beta is 0, since none is computed
        - tokens (sampled in training), wall_seconds
        - checkpoint (relative to the run folder), reason (why it failed, empty when it did not)
        - between: whether nothing was decided after the round

    Raises:
        RunNotFoundError: `run` is not a run folder.
        CheckpointError: Its records are damaged.
        RunDirError: Another version of this library wrote them.
    """
    rounds = read_rounds(run) if isinstance(run, str | Path) else run
    names = columns.hyperparameters(rounds)
    rows: list[dict[str, object]] = []
    before: set[int] = set()
    for record in rounds:
        agents = sorted(record.agents, key=lambda agent: agent.agent)
        rows += [
            {**_row(agent, names, continues=agent.member in before), "between": record.between}
            for agent in agents
        ]
        before = {agent.member for agent in agents}
    types = {
        **dict.fromkeys(("round", "agent", "member", "parent"), "Int64"),
        "state": "string",
        **dict.fromkeys(("fitness", "fitness_se"), "float64"),
        **columns.dtypes(names),
        **dict.fromkeys(("op", "mutated"), "string"),
        **dict.fromkeys(MEANS, "float64"),
        "tokens": "Int64",
        "wall_seconds": "float64",
        **dict.fromkeys(("checkpoint", "reason"), "string"),
        "between": "boolean",
    }
    return columns.frame(rows, types)


def _row(agent: AgentRecord, names: Sequence[str], *, continues: bool) -> dict[str, object]:
    mutation = agent.mutation
    return {
        "round": agent.round,
        "agent": agent.agent,
        "member": agent.member,
        "parent": agent.parent,
        "state": agent.state,
        "fitness": columns.fitness(agent),
        "fitness_se": columns.fitness_se(agent),
        **columns.values(agent.hparams, names),
        "op": "continue" if continues else mutation.op,
        "mutated": "" if continues else ",".join(mutation.changes),
        **{name: agent.metrics.get(name, math.nan) for name in MEANS},
        "kl": columns.kl(agent),
        "tokens": agent.tokens,
        "wall_seconds": agent.wall_seconds,
        "checkpoint": agent.checkpoint,
        "reason": agent.reason,
    }


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

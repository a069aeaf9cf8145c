"""Reads the history of a run's agents, and the hyperparameters that old runs give to a new run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from evo_grpo.errors import ConfigError, RunNotFoundError
from evo_grpo.evolve.start import Start, carried_over, in_both, starts_with
from evo_grpo.places import find
from evo_grpo.record import columns, files, leaderboard, plain
from evo_grpo.record.folder import expect_run, read_rounds, round_entries
from evo_grpo.record.names import METRICS
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.record.summary import read_summary, winner_of
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig

if TYPE_CHECKING:
    import pandas as pd


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
        Rows ordered by round and agent. The columns, all typed:

        - round (0-based), agent, member, parent (missing in the first population)
        - state ("ok" or "failed"), fitness, fitness_se; after a round without a decision, the
          fitness comes from few validation prompts, or is the mean training reward of the round
        - the hyperparameters that the agent trained with, as on the leaderboard
        - op: the mutation since the round before, as in `types.Mutation`, or "continue" if the same
          member trains on; mutated: the names of the changed hyperparameters, joined by commas
        - reward, kl, loss, entropy, zero_variance, clip_fraction, completion_length: means over the
          round's steps, NaN if an agent has none; kl is NaN where beta is 0
        - tokens (sampled in training), wall_seconds
        - checkpoint (relative to the run folder), reason (of a failure, else empty)
        - between: whether nothing was decided after the round

    Raises:
        RunNotFoundError: `run` is not a run folder.
        CheckpointError: Its records are damaged.
    """
    rounds = read_rounds(run) if isinstance(run, str | Path) else run
    names = columns.hyperparameters(rounds)
    rows: list[dict[str, object]] = []
    members: set[int] = set()
    for record in rounds:
        agents = sorted(record.agents, key=lambda agent: agent.agent)
        rows += [
            {**_row(agent, names, continues=agent.member in members), "between": record.between}
            for agent in agents
        ]
        members = {agent.member for agent in agents}
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
        "kl": agent.metrics.get("kl"),
        "tokens": agent.tokens,
        "wall_seconds": agent.wall_seconds,
        "checkpoint": agent.checkpoint,
        "reason": agent.reason,
    }


WHERE = ("round", "step", "agent")
"""Keys that identify the step and the agent of a row: integers, round and step 0-based."""


def metric_rows(run: str | Path, finished: int | None = None) -> list[dict[str, Any]]:
    """Return the metrics of the finished rounds of a run; `finished` is their number, if known.

    Rows are ordered by round, step and agent. They have `round`, `step`, `agent`, then each metric
    as a number, None if it was not finite. Rounds without kept metrics have no rows.
    """
    folder = expect_run(run)
    finished = len(read_rounds(folder)) if finished is None else finished
    rows: list[dict[str, Any]] = []
    for round, path in round_entries(folder / METRICS):
        if round < finished:
            lines = plain.read_plain(path, plain.MAX_LOG_BYTES).splitlines()
            rows += [row_of(f"{path}, line {n}", line) for n, line in enumerate(lines, start=1)]
    return rows


def read_metrics(run: str | Path) -> pd.DataFrame:
    """Return the metrics of each step and agent in the finished rounds of a run.

    Returns:
        Rows ordered by round, step and agent; none for rounds whose metrics were not kept. The
        columns: round, step and agent (Int64), then a float64 for each metric that any step has,
        NaN if it was not finite or is missing. docs/metrics.md defines them.

    Raises:
        RunNotFoundError: `run` is not a run folder.
        CheckpointError: A line is damaged; the error names it.
    """
    rows = metric_rows(run)
    names = list(dict.fromkeys(name for row in rows for name in row if name not in WHERE))
    types = {**dict.fromkeys(WHERE, "Int64"), **dict.fromkeys(names, "float64")}
    return columns.frame(rows, types)


def row_of(where: Path | str, line: bytes) -> dict[str, Any]:
    """Parse a line of metrics; raise CheckpointError, which names `where`, for a damaged line."""
    with files.expecting(where, "the metrics of a step and an agent"):
        row = files.load_json(line)
        if not isinstance(row, dict) or not _is_row(cast("dict[str, Any]", row)):
            raise ValueError("it is not a mapping of names to numbers with round, step and agent")
    return cast("dict[str, Any]", row)


def _is_row(row: dict[str, Any]) -> bool:
    return all(type(row.get(name)) is int for name in WHERE) and all(
        value is None or type(value) in (int, float) for value in row.values()
    )


SETTING = "population.init.from"


def resolved_start(
    init: Start, first: Hparams, hp_config: HyperparameterConfig, size: int, seed: int
) -> Start:
    """Replace run folders in `init`, a `population.init`, by hyperparameters of the runs' agents.

    The best agent of each run comes first, then the second of each, as on the leaderboards. `first`
    has the hyperparameters of the new run's first agent, `hp_config` the new run's ranges.
    """
    if not isinstance(init, Mapping):
        return init
    if size < 2:
        raise ConfigError(
            f"{SETTING}: expected a population.size of at least 2, since the first agent has the "
            f"values of algorithm, got {size}; raise it, or write the settings of the winner with: "
            "evo-grpo recipe RUN"
        )
    runs = [list(_settings(find(run), first, hp_config)) for run in init["from"]]
    values = [
        hparams for same_rank in zip_longest(*runs) for hparams in same_rank if hparams is not None
    ]
    return starts_with(first, hp_config, size, values, seed)


def _settings(run: Path, first: Hparams, hp_config: HyperparameterConfig) -> Iterator[Hparams]:
    """Yield the hyperparameters of an old run's agents, best first, within the new run's ranges."""
    try:
        rounds = read_rounds(run)
    except RunNotFoundError as error:
        raise ConfigError(f"{SETTING}: {error}") from error
    searched = {name for record in rounds for name in record.mutable} | set(columns.steered(rounds))
    names = in_both(searched, hp_config)
    problem = ""
    if not rounds:
        problem = f"with a finished round, got one without; continue it with: evo-grpo resume {run}"
    elif not names:
        problem = (
            f"that searched some of {', '.join(hp_config.names()) or 'no hyperparameter'}, as this "
            f"one does, got one that searched {', '.join(sorted(searched)) or 'nothing'}; name "
            "another run, or search the same with evolve.hyperparameters"
        )
    if problem:
        raise ConfigError(f"{SETTING}: {run}: expected a run {problem}")
    for hparams in _in_order(rounds, read_summary(run)):
        yield carried_over(hparams, names, first, hp_config)


def _in_order(
    rounds: Sequence[RoundRecord], summary: Mapping[str, Any] | None
) -> Iterator[Hparams]:
    """Yield the hyperparameters of the agents that did not fail, ordered as on the leaderboard."""
    by_round = {(agent.agent, agent.round): agent for record in rounds for agent in record.agents}
    for row in leaderboard.leaderboard_rows(rounds, summary):
        if row["agent"] is None:  # the mean of two agents won
            winner = winner_of(rounds, summary)
            assert winner is not None, "it has a row"
            yield winner.record.hparams
        elif row["fitness"] is not None:
            yield by_round[row["agent"], row["round"]].hparams

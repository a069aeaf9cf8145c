"""The history of a run: a row per round and agent, as a typed pandas frame."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from evo_grpo.record import columns
from evo_grpo.record.folder import read_rounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from evo_grpo.record.records import AgentRecord, RoundRecord

#: Means over the GRPO steps of a round that get a column; NaN if an agent has none.
METRICS = (
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
        **dict.fromkeys(METRICS, "float64"),
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
        **{name: agent.metrics.get(name, math.nan) for name in METRICS},
        "kl": columns.kl(agent),
        "tokens": agent.tokens,
        "wall_seconds": agent.wall_seconds,
        "checkpoint": agent.checkpoint,
        "reason": agent.reason,
    }

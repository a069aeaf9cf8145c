"""Where every agent stands, as a typed pandas frame."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from evo_grpo.record.files import atomic_write
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.names import LEADERBOARD

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from evo_grpo.record.records import AgentRecord, RoundRecord
    from evo_grpo.schema.hparams import ClipCoef

# Nullable ints, so that a member of the first population has no parent rather than parent NaN.
# clip_coef is text, since it may be a scalar ("0.2") or a pair of ratio bounds ("0.8:1.28").
DTYPES: dict[str, str] = {
    "rank": "Int64",
    "agent": "Int64",
    "member": "Int64",
    "parent": "Int64",
    "round": "Int64",
    "fitness": "float64",
    "fitness_se": "float64",
    "lr": "float64",
    "beta": "float64",
    "clip_coef": "string",
    "group_size": "Int64",
    "tokens": "Int64",
    "wall_seconds": "float64",
    "checkpoint": "string",
}


def leaderboard(run: str | Path) -> pd.DataFrame:
    """Read the leaderboard of a run, finished or going on.

    Args:
        run: The run folder.

    Returns:
        One row per agent, as in `from_records`.

    Raises:
        RunNotFoundError: When it is no run folder.
        CheckpointError: When its records are damaged.
    """
    return from_records(read_rounds(run))


def from_records(rounds: Sequence[RoundRecord]) -> pd.DataFrame:
    """Make the leaderboard from records in memory.

    Args:
        rounds: The finished rounds, first to last; none gives an empty frame with the same columns.

    Returns:
        One row per agent, best first (equal fitness: the lower slot first; failed agents, whose
        fitness is NaN, last). What an agent is stands as in its last finished round; tokens
        (sampled in training) and wall_seconds are sums over all rounds of its slot; checkpoint is
        relative to the run folder. `DTYPES` has the types.
    """
    # Imported late: pandas takes longer to load than everything else that the command line needs.
    import pandas as pd

    latest: dict[int, AgentRecord] = {}
    tokens: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for record in rounds:
        for agent in record.agents:
            latest[agent.agent] = agent
            tokens[agent.agent] = tokens.get(agent.agent, 0) + agent.tokens
            seconds[agent.agent] = seconds.get(agent.agent, 0.0) + agent.wall_seconds
    standing = sorted(latest.values(), key=lambda agent: (-_sortable(agent), agent.agent))
    rows = [
        {
            "rank": rank,
            "agent": agent.agent,
            "member": agent.member,
            "parent": agent.parent,
            "round": agent.round,
            "fitness": _fitness(agent),
            "fitness_se": _number(agent.score.se if agent.score else None),
            "lr": agent.hparams.lr,
            "beta": agent.hparams.beta,
            "clip_coef": _clip_text(agent.hparams.clip_coef),
            "group_size": agent.hparams.group_size,
            "tokens": tokens[agent.agent],
            "wall_seconds": seconds[agent.agent],
            "checkpoint": agent.checkpoint,
        }
        for rank, agent in enumerate(standing, start=1)
    ]
    # By way of objects: pandas would take a column of ints and None through float.
    return pd.DataFrame(rows, columns=list(DTYPES), dtype=object).astype(DTYPES)


def best_agent(record: RoundRecord) -> AgentRecord | None:
    """Return the agent with the greatest fitness of a round; None when all failed.

    Of agents with equal fitness it is the one with the lowest number, as on the leaderboard.
    """
    ranked = [agent for agent in record.agents if not math.isnan(_fitness(agent))]
    return min(ranked, key=lambda agent: (-_fitness(agent), agent.agent), default=None)


def write_csv(rounds: Sequence[RoundRecord], path: str | Path) -> None:
    """Write the leaderboard as CSV, whole or not at all.

    Args:
        rounds: The finished rounds, first to last.
        path: The file, or a folder that gets a leaderboard.csv.
    """
    file = Path(path)
    atomic_write(
        file / LEADERBOARD if file.is_dir() else file, from_records(rounds).to_csv(index=False)
    )


def _number(value: float | None) -> float:
    # JSON has no NaN: the records hold None where a number was not finite.
    return math.nan if value is None else float(value)


def _fitness(agent: AgentRecord) -> float:
    return _number(agent.score.mean if agent.score and agent.state == "ok" else None)


def _sortable(agent: AgentRecord) -> float:
    fitness = _fitness(agent)
    return -math.inf if math.isnan(fitness) else fitness


def _clip_text(clip_coef: ClipCoef) -> str:
    if isinstance(clip_coef, tuple):
        return ":".join(repr(float(bound)) for bound in clip_coef)
    return repr(float(clip_coef))

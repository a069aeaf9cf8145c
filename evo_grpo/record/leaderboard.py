"""The leaderboard: where every agent of a run stands, as a typed pandas frame."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from evo_grpo.evolve.compare import compare
from evo_grpo.record import columns
from evo_grpo.record.files import atomic_write
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.names import LEADERBOARD

TIE_LEVEL = 0.1
"""p-value up to which two agents count as different."""

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from evo_grpo.record.records import AgentRecord, RoundRecord


def leaderboard(run: str | Path) -> pd.DataFrame:
    """Read the leaderboard of a run, finished or not.

    Args:
        run: The run folder.

    Returns:
        One row per agent, as in `from_records`.

    Raises:
        RunNotFoundError: When it is no run folder.
        CheckpointError: When its records are damaged.
        RunDirError: When another version of this library wrote them.
    """
    return from_records(read_rounds(run))


def from_records(rounds: Sequence[RoundRecord]) -> pd.DataFrame:
    """Make the leaderboard from records in memory.

    Args:
        rounds: The finished rounds, first to last; none gives an empty frame.

    Returns:
        One row per agent that ever lived: first those of the last round, then those that left
        earlier, the latest first. Among them the best comes first; of equal fitness the lower
        agent, and failed agents, whose fitness is NaN, last. The columns, all typed:

        - rank (from 1), agent, member, parent (missing in the first population), round (its last)
        - left: the round after which it left, missing for those that are still there
        - fitness and fitness_se of its last round; fitness_se is NaN from a single sample
        - tie: whether a paired test on the prompts that both answered cannot separate it from the
          first; missing for the first itself, for those that left or failed
        - lr, beta, clip_coef (NaN where it is a pair of bounds), clip_low and clip_high (the
          bounds, also those of a scalar), group_size, then what else mutates in this run
        - tokens (sampled in training) and wall_seconds: sums over all rounds of the agent
        - checkpoint, relative to the run folder

        Equal runs are equal in every column but wall_seconds.
    """
    latest: dict[int, AgentRecord] = {}
    tokens: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for record in rounds:
        for agent in record.agents:
            latest[agent.agent] = agent
            tokens[agent.agent] = tokens.get(agent.agent, 0) + agent.tokens
            seconds[agent.agent] = seconds.get(agent.agent, 0.0) + agent.wall_seconds
    standing = sorted(latest.values(), key=lambda agent: (-agent.round, *_order(agent)))
    names = columns.hyperparameters(rounds)
    last = rounds[-1].round if rounds else 0
    there = {member.agent for member in rounds[-1].members} if rounds else set[int]()
    rows = [
        {
            "rank": rank,
            "agent": agent.agent,
            "member": agent.member,
            "parent": agent.parent,
            "round": agent.round,
            "left": agent.round if agent.round < last or agent.agent not in there else None,
            "fitness": columns.fitness(agent),
            "fitness_se": columns.fitness_se(agent),
            "tie": tied(standing[0], agent),
            **columns.values(agent.hparams, names),
            "tokens": tokens[agent.agent],
            "wall_seconds": seconds[agent.agent],
            "checkpoint": agent.checkpoint,
        }
        for rank, agent in enumerate(standing, start=1)
    ]
    types = {
        **dict.fromkeys(("rank", "agent", "member", "parent", "round", "left"), "Int64"),
        **dict.fromkeys(("fitness", "fitness_se"), "float64"),
        "tie": "boolean",
        **columns.dtypes(names),
        "tokens": "Int64",
        "wall_seconds": "float64",
        "checkpoint": "string",
    }
    return columns.frame(rows, types)


def best_agent(record: RoundRecord) -> AgentRecord | None:
    """Return the first of a round's agents on the leaderboard; None when all have failed."""
    ranked = [agent for agent in record.agents if math.isfinite(columns.fitness(agent))]
    return min(ranked, key=_order, default=None)


def tied(first: AgentRecord, other: AgentRecord) -> bool | None:
    """Return whether a paired test cannot tell an agent from the first of the leaderboard.

    None where the two were not ranked on the same prompts in the same round, or are the same.
    """
    if other is first or first.round != other.round or first.score is None or other.score is None:
        return None
    return not compare(first.score, other.score).significant(TIE_LEVEL)


def write_csv(rounds: Sequence[RoundRecord], folder: Path) -> None:
    """Write leaderboard.csv into a run folder, whole or not at all."""
    atomic_write(folder / LEADERBOARD, from_records(rounds).to_csv(index=False))


def _order(agent: AgentRecord) -> tuple[float, int]:
    """Return a key that sorts the agents of a round: best first, failed ones last."""
    fitness = columns.fitness(agent)
    return math.inf if math.isnan(fitness) else -fitness, agent.agent

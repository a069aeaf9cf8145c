"""Builds the leaderboard of a run as rows or a frame: the winner first, then all other agents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evo_grpo.evolve.claims import TIE_LEVEL, claims
from evo_grpo.record import columns
from evo_grpo.record.family import front, order
from evo_grpo.record.files import atomic_write
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.names import LEADERBOARD
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.record.summary import SelectedAgent, read_summary, rivals_of, winner_of
from evo_grpo.schema.hparams import Hparams, Value, of_mean
from evo_grpo.types import Score

if TYPE_CHECKING:
    import pandas as pd


def leaderboard(run: str | Path) -> pd.DataFrame:
    """Read the leaderboard of a run, finished or not; see `from_records` for its rows and columns.

    Raises:
        RunNotFoundError: `run` is not a run folder.
        CheckpointError: Its records are damaged.
    """
    return from_records(read_rounds(run), read_summary(run))


def from_records(
    rounds: Sequence[RoundRecord], summary: Mapping[str, Any] | None = None
) -> pd.DataFrame:
    """Return the leaderboard of finished rounds as a typed frame.

    Args:
        rounds: The finished rounds, first to last; none gives an empty frame.
        summary: The content of summary.json; None before the end of the run.

    Returns:
        One row per agent that ever played, and one for the winner if it is the mean of two agents.
        The first row is the winner, or before the end the agent that would win now. Agents of the
        last round follow, then those that left, the latest first. Within these groups agents are
        ordered by fitness, ties by number; failed agents, whose fitness is NaN, are last. The
        columns, all typed:

        - rank (from 1), agent (missing for a mean), member, parent (missing in the first
          population; for a mean, the better parent), round (0-based, the agent's last one)
        - left: the round after which the agent left the population, missing if it did not leave
        - fitness and fitness_se: the score on the validation prompts of `round`; fitness_se is NaN
          from a single sample. In an unfinished run, after a round without a decision, fitness
          may be the mean training reward of the round. For a mean, fitness is `final`
        - only in a run with several objectives: objective_NAME and objective_NAME_se, the score in
          each further objective on the same prompts; front, whether the agent, as it was after
          `round`, is on the front of the run (`record.family.front`)
        - tie: whether the first row is not significantly ahead of this row (`ties`); for a
          finalist, in the final comparison. Missing for the first row, and for agents that were
          scored on other prompts
        - final and final_se: the score in the final comparison, on validation prompts with new
          draws; missing if the agent was not compared
        - test and test_se: the score of the winner on the test prompts; missing for all others
        - lr, beta, clip_coef (NaN if it is a pair of bounds), clip_low and clip_high (the bounds,
          also those of a scalar), group_size, then other hyperparameters that mutate in this run. A
          mean has the values of its better parent, with two exceptions: its rank and alpha are
          those of the parent with the larger rank, and lora.target_modules is missing if the
          parents' values differ
        - tokens (sampled in training) and wall_seconds: sums over all rounds of the agent; 0 for a
          mean
        - checkpoint, relative to the run folder

        An agent that won as it was after an earlier round has the values of that round. With
        several objectives, the agents of the front follow the winner, each as it was when it
        reached the front; an agent that reached the front in several rounds, or has trained since,
        has several rows. Equal runs are equal in every column except wall_seconds.
    """
    names, goals = columns.hyperparameters(rounds), columns.objectives(rounds)
    types = {
        **dict.fromkeys(("rank", "agent", "member", "parent", "round", "left"), "Int64"),
        **dict.fromkeys(("fitness", "fitness_se"), "float64"),
        **{f"{column}{end}": "float64" for column in goals.values() for end in ("", "_se")},
        **({"front": "boolean"} if goals else {}),
        "tie": "boolean",
        # Nullable: NaN is not equal to itself, and rows of equal runs are.
        **dict.fromkeys(("final", "final_se", "test", "test_se"), "Float64"),
        **columns.dtypes(names),
        "tokens": "Int64",
        "wall_seconds": "float64",
        "checkpoint": "string",
    }
    return columns.frame(leaderboard_rows(rounds, summary), types)


def leaderboard_rows(
    rounds: Sequence[RoundRecord], summary: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return the rows of the leaderboard of `from_records`; None stands for missing and for NaN."""
    if not rounds:
        return []
    latest: dict[int, AgentRecord] = {}
    spent: dict[int, tuple[int, float]] = {}
    for record in rounds:
        for agent in record.agents:
            latest[agent.agent] = agent
            tokens, seconds = spent.get(agent.agent, (0, 0.0))
            spent[agent.agent] = tokens + agent.tokens, seconds + agent.wall_seconds
    winner, last_round = winner_of(rounds, summary), rounds[-1]
    won = None if winner is None else winner.agent
    if winner is not None and winner.agent is not None:
        latest[winner.agent] = winner.record
    front_agents, tied = {(a.agent, a.round): a for a in front(rounds)}, ties(rounds, winner)
    playing = {player.agent for player in last_round.members or last_round.agents}

    def on_front(agent: AgentRecord) -> bool:
        return (agent.agent, agent.round) in front_agents

    def left(agent: AgentRecord) -> bool:
        has_left = agent.round < last_round.round or agent.agent not in playing
        return has_left and agent.agent != won and not (on_front(agent) and agent.agent in playing)

    def place(agent: AgentRecord) -> tuple[Any, ...]:
        if front_agents:  # the first of the front is the winner
            return not on_front(agent), not on_front(agent) and left(agent), order(agent)
        return agent.agent != won, left(agent), -agent.round, order(agent)

    names, goals = columns.hyperparameters(rounds), columns.objectives(rounds)
    rows = [] if winner is None or winner.agent is not None else [_mean(winner, last_round, names)]
    finalists = {
        (finalist.agent, finalist.record.round): finalist
        for finalist in (*rivals_of(rounds, summary), *([] if winner is None else [winner]))
    }
    agents = [*latest.values(), *(a for a in front_agents.values() if a is not latest[a.agent])]
    for agent in sorted(agents, key=place):
        finalist = finalists.get(key := (agent.agent, agent.round))
        rows.append(
            {
                "agent": agent.agent,
                "member": agent.member,
                "parent": agent.parent,
                "round": agent.round,
                "left": agent.round if left(agent) else None,
                **_score("fitness", agent.score if agent.state == "ok" else None),
                **_goals(agent, goals),
                **({"front": on_front(agent)} if goals else {}),
                "tie": tied.get(key) if finalist in (None, winner) else finalist.tie,
                **_score("final", None if finalist is None else finalist.final),
                **_score("test", None if finalist is None else finalist.test),
                **_values(agent.hparams, names),
                "tokens": spent[agent.agent][0],
                "wall_seconds": spent[agent.agent][1],
                "checkpoint": agent.checkpoint,
            }
        )
    return [{"rank": rank, **row} for rank, row in enumerate(rows, start=1)]


def order_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence on the order of a leaderboard's rows; "" if they descend in fitness."""
    ranked = [row["fitness"] for row in rows if row["fitness"] is not None]
    if ranked == sorted(ranked, reverse=True):
        return ""
    return (
        "Order: the winner, the rest of the front, then the other agents, by fitness."
        if "front" in rows[0]
        else "Order: the winner, the other agents of the last round by fitness, then those that "
        "left, the latest first."
    )


def fitness_text(rounds: Sequence[RoundRecord]) -> str:
    """Return a sentence if fitness in the last round is a mean training reward, else ""."""
    agents = rounds[-1].agents if rounds else ()
    if not any(agent.score is not None and agent.score.steps for agent in agents):
        return ""
    return (
        f"Fitness after round {rounds[-1].round + 1} is the mean reward of its training: agents "
        "are evaluated when the run decides."
    )


def _mean(winner: SelectedAgent, last: RoundRecord, names: Sequence[str]) -> dict[str, Any]:
    """Return the leaderboard row of a winner that is the mean of two agents."""
    better = winner.record
    hparams = of_mean([line[-1].hparams for line in winner.lines])
    return {
        "agent": None,
        "member": winner.member,
        "parent": better.member,
        "round": last.round,
        "left": None,
        **_score("fitness", winner.final),
        "tie": None,
        **_score("final", winner.final),
        **_score("test", winner.test),
        **_values(hparams, names),
        "tokens": 0,
        "wall_seconds": 0.0,
        "checkpoint": winner.checkpoint or None,
    }


def _score(name: str, score: Score | None) -> dict[str, float | None]:
    mean, error = (None, None) if score is None else (score.mean, score.se)
    return {name: _or_none(mean), f"{name}_se": _or_none(error)}


def _goals(agent: AgentRecord, goals: Mapping[str, str]) -> dict[str, float | None]:
    """Return, by column, an agent's means and standard errors in the objectives beside fitness."""
    scores = {} if agent.score is None else {goal.name: goal for goal in agent.score.further}
    cells: dict[str, float | None] = {}
    for name, column in goals.items():
        score = scores.get(name)
        cells[column] = None if score is None else _or_none(score.mean)
        cells[f"{column}_se"] = None if score is None else _or_none(score.se)
    return cells


def _values(hparams: Hparams, names: Sequence[str]) -> dict[str, Value | None]:
    values = columns.values(hparams, names).items()
    return {n: value if isinstance(value, str) else _or_none(value) for n, value in values}


def _or_none(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def ties(
    rounds: Sequence[RoundRecord], winner: SelectedAgent | None
) -> dict[tuple[int, int], bool]:
    """Return, by (agent, round), whether the winner is not significantly ahead of the agent.

    Only agents of the winner's round with a finite fitness are included. The result is empty if the
    winner is a mean. The level of significance is `TIE_LEVEL`, corrected for all pairs of agents
    because the winner was chosen as the best of them. If the winner's kind is "archive", the level
    is also corrected for the number of rounds.
    """
    if winner is None or winner.fitness is None:
        return {}
    played = rounds[winner.record.round].agents
    scored = [(a, a.score) for a in played if a.score and math.isfinite(a.score.mean)]
    winner_index = [agent.agent for agent, _ in scored].index(winner.record.agent)
    level = TIE_LEVEL / (len(rounds) if winner.kind == "archive" else 1)
    signs = zip(scored, claims([score for _, score in scored], winner_index, level), strict=True)
    return {(a.agent, a.round): sign < 1 for (a, _), sign in signs if a.agent != winner.agent}


def write_csv(
    rounds: Sequence[RoundRecord], folder: Path, summary: Mapping[str, Any] | None = None
) -> None:
    """Write leaderboard.csv into a run folder; a write that fails leaves the file as it was."""
    atomic_write(folder / LEADERBOARD, from_records(rounds, summary).to_csv(index=False))

"""Chooses an agent of a run as it was after a round: the winner, or one that the caller names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evo_grpo.errors import CheckpointError, ConfigError, RunNotFoundError
from evo_grpo.record import family
from evo_grpo.record.family import best_agent, front
from evo_grpo.record.folder import continuing
from evo_grpo.record.names import BEST
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.record.summary import SelectedAgent, select, winner_files
from evo_grpo.record.view import RunView, view_of
from evo_grpo.schema.problems import nearest
from evo_grpo.schema.validation import is_number

SHOWN = 24
"""Greatest number of checkpoints that an error about a missing checkpoint lists, latest first."""


@dataclass(frozen=True)
class ChosenAgent:
    """An agent of a run as it was after a round; `files` has SHA-256 by path in its checkpoint."""

    run: Path
    view: RunView
    agent: SelectedAgent
    files: Mapping[str, str]

    @property
    def checkpoint(self) -> str:
        """Path of the agent's checkpoint relative to the run folder; empty if none was saved."""
        return self.agent.checkpoint

    @property
    def is_winner(self) -> bool:
        """Whether the agent is the winner, which was scored on the test prompts."""
        winner = self.view.winner
        if self.view.summary is None or winner is None:
            return False
        return self.agent is winner or (
            winner.kind != "mean"
            and self.agent.kind != "mean"
            and winner.record is self.agent.record
        )

    @property
    def loss(self) -> str:
        """`RunView.loss`, how far the winner is behind the base; "" for any other agent."""
        return self.view.loss if self.is_winner else ""

    @property
    def title(self) -> str:
        """The agent in words, with its member id."""
        return f"{self.agent.name}, member {self.agent.member}"


def choose_of(
    run: str | Path,
    agent: int | None = None,
    member: int | None = None,
    round: int | None = None,
    *,
    best_ever: bool = False,
    prefer: Mapping[str, float] | None = None,
) -> ChosenAgent:
    """Choose an agent of a run: the one that the arguments name, or the winner if they name none.

    The winner of a finished run is the winner of the final comparison: the best agent of the last
    round, the best of all rounds, or the mean of two survivors. Before the end the winner is the
    best agent of the last round; with several objectives, the agent of the Pareto front with the
    greatest fitness.

    Args:
        run: The run folder.
        agent: Number of an agent.
        member: Id of a member, which is one life of an agent.
        round: 0-based round after which the agent is taken; None takes the agent's last round.
        best_ever: Take the agent with the greatest fitness of all rounds.
        prefer: Objective -> weight in [0, 1]; the weights sum to at most 1, and objectives without
            a weight share the rest equally. Each objective is scaled so that the worst agent of the
            front has 0 and the best has 1. The agent of the front with the greatest weighted sum
            is taken.

    Raises:
        CheckpointError: No round is finished, no agent has a fitness, the checkpoint was removed,
            or a record is damaged.
        ConfigError: The agent, member or round does not exist, or several agents are named.
    """
    by_way = {"agent": agent is not None, "member": member is not None, "best ever": best_ever}
    by_way["prefer"] = prefer is not None
    ways = [name for name, is_given in by_way.items() if is_given]
    if (best_ever or prefer is not None) and round is not None:
        ways.append("round")
    if len(ways) > 1:
        raise ConfigError(
            f"choice of an agent: expected one of agent, member, best ever and prefer, got "
            f"{' and '.join(ways)}; leave all but one out"
        )
    is_winner = not ways and round is None
    view = view_of(run) if is_winner else _with_known_finalists(view_of(run))
    folder, rounds, winner = Path(run), view.rounds, view.winner
    if not rounds or (is_winner and winner is None):
        raise CheckpointError(
            f"{folder}: nothing to export, expected a finished round with a ranked agent; continue "
            f"with: {continuing(folder)}"
        )
    if is_winner:
        assert winner is not None, "checked above"
        return ChosenAgent(folder, view, winner, _winner_files(view, winner))
    if prefer is not None:
        record = _preferred(view, prefer)
    else:
        record = family.best_ever(rounds) if best_ever else _named(rounds, agent, member, round)
    if record is None:
        raise CheckpointError(
            f"{folder}: expected an agent with a finite fitness "
            f"in {'any round' if round is None else f'round {round + 1}'}, got none; name an agent"
        )
    chosen = select("ever" if best_ever else "named", rounds, record)
    files = rounds[record.round].files_of(str(record.checkpoint))
    return _with_existing_checkpoint(ChosenAgent(folder, view, chosen, files))


def _with_known_finalists(view: RunView) -> RunView:
    """Return a view, without its summary if the summary names a member that no round has.

    Such a summary is damaged, but an agent that the caller names can be chosen without it.
    """
    try:
        _ = view.winner, view.rivals
    except RunNotFoundError:
        return replace(view, summary=None)
    return view


def _preferred(view: RunView, weights: Mapping[str, float]) -> AgentRecord:
    """Return the agent of a run's front with the greatest weighted sum; see `choose_of`.

    Of agents with equal sums, the one with the greatest fitness is returned.
    """
    settings = view.settings
    names = [] if settings is None else [o.name for o in settings.evolve.fitness.objectives]
    best = front(view.rounds)
    if problem := _wrong_weights(names if best else (), weights):
        raise ConfigError(f"prefer: expected {problem}")
    unweighted = [name for name in names if name not in weights]
    shared_weights = {name: (1 - sum(weights.values())) / len(unweighted) for name in unweighted}
    goals = [[goal.mean for goal in agent.score.goals] for agent in best if agent.score is not None]
    sums = [0.0] * len(best)
    for name, values in zip(names, zip(*goals, strict=True), strict=True):
        span = max(values) - min(values)
        for index, value in enumerate(values if span > 0 else ()):
            weight = weights.get(name, shared_weights.get(name, 0.0))
            sums[index] += weight * (value - min(values)) / span
    return best[sums.index(max(sums))]


def _wrong_weights(names: Sequence[str], weights: Mapping[str, float]) -> str:
    """Return the text of an error about weights of objectives; "" if the weights are valid."""
    if not names:
        return (
            "a run with evolve.fitness.objectives, got one with one goal; leave prefer out, and "
            "the winner is taken"
        )
    for name, weight in weights.items():
        if name not in names:
            near = nearest(name, names)
            hint = "" if near is None else f"; did you mean {near!r}?"
            return f"one of the objectives {', '.join(names)}, got {name!r}{hint}"
        if not (is_number(weight) and 0 <= weight <= 1):
            return f"a weight from 0 to 1 for {name}, got {weight!r}"
    total = sum(weights.values())
    if not weights or total > 1 + 1e-9 or (total == 0 and len(weights) == len(names)):
        return (
            f"weights above 0 that are together at most 1, got {total:g} for "
            f"{', '.join(weights) or 'no objective'}; objectives without a weight share the rest"
        )
    return ""


def _winner_files(view: RunView, winner: SelectedAgent) -> dict[str, str]:
    """Return the SHA-256 of each file of the winner, by its path within the checkpoint."""
    if view.summary is not None:
        return winner_files(view.rounds, view.summary["best"], view.summary["files"])
    return view.rounds[winner.record.round].files_of(winner.checkpoint)


def _named(
    rounds: Sequence[RoundRecord], agent: int | None, member: int | None, round: int | None
) -> AgentRecord | None:
    """Return the record of an agent or member in `round`, or its latest record without `round`.

    If only `round` is named, return the record of the best agent of that round.
    """
    if round is not None and not 0 <= round < len(rounds):
        raise ConfigError(
            f"round: expected one of the finished rounds, 1 to {len(rounds)}, got {round + 1}"
        )
    searched = rounds if round is None else [rounds[round]]
    if agent is None and member is None:
        return best_agent(searched[-1])
    key, number = ("agent", agent) if member is None else ("member", member)
    records = [record for round_record in searched for record in round_record.agents]
    played: dict[int | None, AgentRecord] = {getattr(record, key): record for record in records}
    if number not in played:
        when = "" if round is None else f" that played round {round + 1}"
        numbers = ", ".join(map(str, sorted({getattr(record, key) for record in records})))
        raise ConfigError(f"{key}: expected one{when} of {numbers}, got {number}")
    return played[number]


def _with_existing_checkpoint(choice: ChosenAgent) -> ChosenAgent:
    """Return a choice whose checkpoint exists: the recorded one, else its copy checkpoints/best."""
    folder, record = choice.run, choice.agent.record
    if choice.checkpoint and (folder / choice.checkpoint).is_dir():
        return choice
    if family.best_ever(choice.view.rounds) == record and (folder / BEST).is_dir():
        return replace(choice, agent=replace(choice.agent, checkpoint=BEST))
    raise CheckpointError(
        f"{folder}: the checkpoint of agent {record.agent} after round {record.round + 1} does "
        "not exist (record.checkpoints says which are kept; `all` keeps each); take one of: "
        f"{_checkpoints_there(folder, choice.view.rounds)}"
    )


def _checkpoints_there(folder: Path, rounds: Sequence[RoundRecord]) -> str:
    """Return a text that lists a run's latest checkpoints that still exist; rounds count from 1."""
    existing = [
        f"agent {agent.agent} of round {record.round + 1}"
        for record in reversed(rounds)
        for agent in record.agents
        if agent.checkpoint is not None and (folder / agent.checkpoint).is_dir()
    ]
    ever = family.best_ever(rounds) if (folder / BEST).is_dir() else None
    best = [] if ever is None else [f"the best ever: agent {ever.agent} of round {ever.round + 1}"]
    return ", ".join([*existing[:SHOWN], *best]) or "none"

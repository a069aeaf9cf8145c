"""What ranks report about the agents of a round, and which agents are evaluated again. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from evo_grpo.evolve.goals import best_first
from evo_grpo.population.evaluate import Evaluation, undecided
from evo_grpo.population.rules import RoundSettings
from evo_grpo.population.stats import Tally
from evo_grpo.population.steps import CheckpointFiles
from evo_grpo.types import Score, Slot


@dataclass(frozen=True)
class AgentReport:
    """What a rank reports about one of its agents after the steps and the evaluation.

    Attributes:
        score: Its fitness, None if its update or its evaluation was not finite.
        checkpoint: Path of its checkpoint, None if none is written.
        steps: GRPO steps that its slot has taken so far.
        dead_steps: Latest steps in a row in which all its groups had equal rewards.
        rank_error: Relative error of the cut of its rank before the round; None without one.
    """

    score: Score | None
    tally: Tally
    evaluation: Evaluation
    checkpoint: str | None
    steps: int
    dead_steps: int
    rank_error: float | None = None


@dataclass(frozen=True)
class RankReport:
    """The message of one rank to the first rank at the exchange of a round.

    Attributes:
        reduced: Engine settings that were lowered to save memory, with their present values.
        fresh: The fresh evaluations of the archive and of the best agent that it has made.
        judge_cost: What its judges have cost from the start of the run.
        decodes_by: What computed its completions, see `RolloutEngine`.
    """

    agents: Mapping[Slot, AgentReport]
    reduced: Mapping[str, int] = field(default_factory=dict[str, int])
    files: CheckpointFiles = field(default_factory=CheckpointFiles)
    fresh: Mapping[Slot, Evaluation] = field(default_factory=dict[Slot, Evaluation])
    judge_cost: float = 0.0
    decodes_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Look:
    """The decision to evaluate some agents before the round is planned.

    Attributes:
        slots: The agents.
        number: Number of the look; 0 is the first look, at all agents.
        prompts: Validation prompts; with 0 the rewards of training stand for an evaluation.
        fresh: Whether the archive and the best agent are measured for their comparison alone.
    """

    slots: tuple[Slot, ...]
    number: int
    prompts: int
    fresh: bool = False

    def stream(self, round: int) -> tuple[str | int, ...]:
        """Return the path of the random stream of this look."""
        if self.fresh:
            return ("archive", round)
        return ("evaluate", round, self.number) if self.number else ("evaluate", round)


def agents_of(reports: Sequence[RankReport], slots: Sequence[Slot]) -> dict[Slot, AgentReport]:
    """Return the reports of all agents, by slot, in the order of the slots.

    If several ranks report an agent, the report of the first one is used, which has the files.
    """
    found = {slot: one for report in reversed(reports) for slot, one in report.agents.items()}
    return {slot: found[slot] for slot in slots}


def next_look(
    agents: Mapping[Slot, AgentReport], settings: RoundSettings, look: Look, round: int
) -> Look | None:
    """Return the agents that are evaluated again; None if the round can be planned.

    Further looks may cost a share `evolve.fitness.racing` of the completions of the first look.
    Without decisions, nobody is looked at again.
    """
    if look.fresh or not settings.decides(round):
        return None
    results = {slot: agent.evaluation for slot, agent in agents.items()}
    left = settings.evolve.fitness.second_looks * len(agents)
    left -= sum(result.looks - 1 for result in results.values())
    open_ones = undecided(results, settings.room(round + 1, len(agents)))
    if 1 < len(open_ones) <= left:
        return Look(tuple(open_ones), look.number + 1, look.prompts)
    return None


def look_at_archive(
    agents: Mapping[Slot, AgentReport], archive: Slot | None, settings: RoundSettings, round: int
) -> Look | None:
    """Return the fresh look at the archive and the best agent; None where there is nothing to do.

    What is restored, and what enters the archive, is decided by draws that selected neither, on
    other prompts where the validation split has them.
    """
    ends = round + 1 >= settings.population.rounds
    if (
        archive is None
        or not settings.evolve.keeps_archive
        or not (ends or settings.decides(round))
    ):
        return None
    scores = {slot: agent.score for slot, agent in agents.items() if agent.score is not None}
    if not scores:
        return None
    best = min(scores, key=lambda slot: best_first(scores[slot]))
    return Look((best, archive), 0, settings.evolve.fitness.prompts, fresh=True)

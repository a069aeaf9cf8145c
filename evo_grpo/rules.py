"""How the rounds of a run are played: counts and strategies, whatever they were made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from evo_grpo.errors import ConfigError
from evo_grpo.evolve.explore.protocol import Explorer
from evo_grpo.evolve.select.protocol import Selector
from evo_grpo.evolve.sizes import prompts_of_agents
from evo_grpo.settings.engine import StopConfig


@dataclass(frozen=True)
class RoundSettings:
    """How the rounds of a run are played.

    Attributes:
        rounds: Rounds in all.
        steps_per_round: GRPO steps of every agent per round.
        prompts_per_step: P, the same prompts or episode seeds for every agent.
        selector: Plans who survives, and who is copied.
        explorer: Varies the hyperparameters of those that go on.
        window: Latest scores of a member that the selector sees, in [1, `KEPT_SCORES`].
        places: Agents that each round has room for, one number per round, the last of which
            repeats. Where a round has fewer places than agents, agents leave. None has room for all
            of them.
        rows_per_step: Completions that all agents together sample in a step: each agent takes as
            many prompts as make up its equal share, so that those which leave give their part to
            the others. None gives every agent `prompts_per_step` prompts, whatever its group size.
        significance: p-value up to which a difference in fitness counts; None: every difference.
        archive: Keep the best agent ever, from which a population that fell behind goes on.
        dead_steps: An agent has collapsed when all groups of so many steps in a row had equal
            rewards and it is behind the best; None never looks.
        eval_prompts: Validation prompts behind a fitness.
        eval_samples: Completions per validation prompt.
        eval_temperature: The same for all agents.
        eval_extra: Completions for a second look at agents that the first cannot separate, as a
            share of those of the first; see `evaluate.race`.
        inherit_optimizer: Copies take their parent's AdamW moments; False starts them afresh.
        completions: Sample completions kept per agent and round.
        metrics: Whether the metrics of each step are kept.
        stop: Rules that end a run before its last round.

    Raises:
        ConfigError: A sequence of places is empty, grows, or leaves no place.
    """

    rounds: int
    steps_per_round: int
    prompts_per_step: int
    selector: Selector
    explorer: Explorer
    window: int = 1
    places: Sequence[int] | None = None
    rows_per_step: int | None = None
    significance: float | None = None
    archive: bool = False
    dead_steps: int | None = None
    eval_prompts: int = 64
    eval_samples: int = 1
    eval_temperature: float = 1.0
    eval_extra: float = 0.0
    inherit_optimizer: bool = True
    completions: int = 2
    metrics: bool = True
    stop: StopConfig = field(default_factory=StopConfig)

    def __post_init__(self) -> None:
        """Refuse places that no population could fill."""
        if self.places is None:
            return
        grows = any(later > earlier for earlier, later in pairwise(self.places))
        if not self.places or grows or min(self.places) < 1:
            raise ConfigError(
                "places: expected at least one number >= 1, none above the one before it, got "
                f"{list(self.places)}; an agent that has left does not come back"
            )

    def room(self, round: int, agents: int) -> int:
        """Return how many of `agents` agents a round has places for."""
        if self.places is None:
            return agents
        return min(self.places[min(round, len(self.places) - 1)], agents)

    def prompts_of(self, group_sizes: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return for each step of a round P_i of each agent, given its group size."""
        if self.rows_per_step is None:
            return [[self.prompts_per_step] * len(group_sizes)] * self.steps_per_round
        return prompts_of_agents(self.rows_per_step, self.steps_per_round, group_sizes)

"""The signature of `Population.train`, generated from the schema.

Written by docs/generate; change the declarations in evo_grpo/schema, settings and evolve instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from evo_grpo.api.by_keyword import by_keyword
from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.settings import FitnessConfig, StopConfig

if TYPE_CHECKING:
    from pathlib import Path

    from evo_grpo.evolve.explore.protocol import Explorer
    from evo_grpo.evolve.explore.registry import Exploration
    from evo_grpo.evolve.select.protocol import Selector
    from evo_grpo.evolve.select.registry import Selection
    from evo_grpo.record.observer import Observer
    from evo_grpo.record.records import RoundRecord
    from evo_grpo.settings.trackers import TrackerConfig


class PopulationSignature(ABC):
    """The signature of `Population.train`."""

    @by_keyword
    def train(
        self,
        env: Any,
        *,
        name: str = "population",
        rounds: int = 6,
        steps_per_round: int = 4,
        stop: StopConfig | Mapping[str, Any] = StopConfig(),
        sizes: list[int] | Literal["constant"] | None = None,
        selection: Selection | Selector | Mapping[str, Any] | str = TournamentSelection(),
        exploration: Exploration | Explorer | Mapping[str, Any] | str = Mutations(),
        significance: float | None = 0.1,
        archive: bool = True,
        dead_steps: int | None = 8,
        fitness: FitnessConfig | Mapping[str, Any] = FitnessConfig(),
        inherit_optimizer: bool = True,
        completions: int = 2,
        metrics: bool = True,
        checkpoints: Literal["all", "last", "best"] | int = "all",
        optuna: bool = True,
        storage: str | None = None,
        trackers: Sequence[TrackerConfig | Mapping[str, Any] | str] = (),
        out: str | Path | None = None,
        force: bool = False,
        observer: Observer | None = None,
        progress: bool | None = None,
    ) -> list[RoundRecord]:
        """Train and evolve for some rounds; a second call continues where the first ended.

        A call makes no selection after its last round. The next call makes this selection before
        its first round, by its own settings and the fitness of that last round, so that several
        calls give the same result as one. If agents were changed between the calls (weights,
        moments, hyperparameters, or the set of agents), it warns and skips this selection. `apply`
        counts as the selection.

        Args:
            env: A task's name such as "sums", the settings of a task as in `env` of the YAML file,
                or an environment of one or several turns.
            name: Name of the run; its folder is `runs/<name>-<n>`.
            rounds: Rounds: training, then evaluation, then selection and exploration.
            steps_per_round: GRPO steps of every agent in a round.
            stop: Rules that end training before the last of `rounds`, after the round in which one
                of them holds; then winner and base are judged as at any end. `evo-grpo resume RUN
                --rounds N` goes on all the same.
            sizes: Agents by round. null halves them after every round, down to 2 (with selection
                `none`, which lets nobody go, it keeps them all); a list such as [8, 4, 2] begins
                with `size`, and its last number repeats; `constant` keeps them all. What leaves
                gives its completions to the others, as more prompts per step: rows and time per
                round stay the same.
            selection: Who survives a round: a kind, a mapping of its kind and settings, or a class
                of your own as `module:Class`.
            exploration: How agents change after selection: likewise a kind, a mapping, or a class.
            significance: p-value of a paired test up to which a difference in fitness counts: an
                agent that is not significantly behind keeps its weights, and nobody leaves who is
                significantly ahead. null takes every difference for real.
            archive: Keep the best agent ever in checkpoints/best; a population that falls
                significantly behind it goes on from it, at a half and a quarter of its lr.
            dead_steps: An agent leaves when all groups of so many steps in a row had equal rewards
                and it is behind the best, or when its KL divergence explodes. null never looks.
            fitness: How agents are judged.
            inherit_optimizer: A copy takes over the optimizer state of its parent; else it begins
                afresh.
            completions: Sample completions kept for each agent and round.
            metrics: Keep what each GRPO step measured of each agent; else only the means of rounds
                stay.
            checkpoints: `all` keeps every round's checkpoints, `last` those of the last round, a
                number those of so many last rounds, `best` those of the last round and of each
                earlier one's best agent. Unless all stay, the best agent ever has a copy in
                checkpoints/best.
            optuna: Record one Optuna trial per agent and round.
            storage: Where the trials are kept. null: Optuna's journal in the run folder. `sqlite`:
                a SQLite file there. `postgresql+psycopg://user@host:port/database`: a server, on
                which each run has a study of its own; its password comes from PGPASSWORD or
                ~/.pgpass. `sqlite:///path`: a SQLite file of yours for several runs.
            trackers: Trackers that follow the run, each a kind or a mapping: `[tensorboard,
                wandb]`. With `metrics: false` they get the rounds and no steps.
            out: Run folder for records and checkpoints; None keeps the records only in memory.
            force: Replace a run that is already in `out`.
            observer: Its methods are called at the start, stages, steps, rounds and end.
            progress: Whether to print progress and the result; None prints in a terminal and in a
                notebook, True also into a pipe or a file.

        Returns:
            The records of these rounds.

        Raises:
            ConfigError: A wrong argument, or `out` given after a first call without it.
            RunFailedError: No agent is left that can be ranked.
        """
        given = dict(locals())
        del given["self"]
        return self._train(given)

    @abstractmethod
    def _train(self, given: dict[str, Any]) -> list[RoundRecord]: ...

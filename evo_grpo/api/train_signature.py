"""The real signature of `Population.train`, made from the schema.

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
        decisions: list[int] | Literal["every"] | None = None,
        sizes: list[int] | Literal["constant"] | None = None,
        selection: Selection | Selector | Mapping[str, Any] | str = TournamentSelection(),
        exploration: Exploration | Explorer | Mapping[str, Any] | str = Mutations(),
        significance: float | None = 0.1,
        archive: bool = False,
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
        """Train and evolve the agents for some rounds; another call continues after the last round.

        A call does not select after its last round. The next call makes that selection before its
        first round, with its own settings and the fitness of that round, so that several calls give
        the same result as one. If agents were changed in between (weights, moments, hyperparameters
        or their number), it warns and does not select. A call of `apply` replaces the selection.

        Args:
            env: The name of a task such as "sums", the settings of a task as under `env` in YAML,
                or an environment.
            name: Name of the run; its folder is `runs/<name>-<n>`.
            rounds: Number of rounds: training, evaluation, then selection and exploration.
            steps_per_round: GRPO steps of every agent in a round.
            stop: Rules that end training after the first round in which one of them holds; the
                winner is then compared with the base as usual. `evo-grpo resume RUN --rounds N`
                continues such a run.
            decisions: Rounds after which the run decides: all agents are evaluated, and selection
                and exploration act. null: after each quarter of the run, or smaller shares for more
                than 8 agents, and after the first round if all agents begin alike; a run records
                the list. After the last number, rounds decide at the distance of the last two.
                `every`: after each round.
            sizes: Number of agents in each round. null halves it at decisions, down to 2 for the
                second half of the run (or keeps all with selection `none`, which removes no agent);
                a list such as [8, 4, 2] begins with `size`, and its last number repeats; `constant`
                keeps all agents. The remaining agents take more prompts per step, so that rows and
                time per round stay the same.
            selection: Which agents survive a round: a kind, a mapping of kind and settings, or your
                own class as `module:Class`.
            exploration: How hyperparameters change after selection: a kind, a mapping of kind and
                settings, or your own class as `module:Class`.
            significance: Largest p-value of a paired test at which a difference in fitness counts.
                An agent that is not significantly behind keeps its weights, and one that is
                significantly ahead is not removed. null counts every difference.
            archive: Keep the best agent of all rounds in checkpoints/best. If the population falls
                significantly behind it, two copies of it, with a half and a quarter of its lr,
                replace the two worst agents. For rewards under which agents may collapse together;
                each decision measures it and the best agent afresh.
            dead_steps: Consecutive steps without a learning signal, in which the rewards of every
                group are equal, after which an agent that is behind the best is removed. An agent
                whose KL divergence explodes is removed too. null disables both.
            fitness: How agents are evaluated.
            inherit_optimizer: Copy the optimizer state with an agent; false resets it in the copy.
            completions: Sample completions kept for each agent and round.
            metrics: Keep the metrics of each GRPO step and agent; false keeps only the means of
                rounds.
            checkpoints: `all` keeps the checkpoints of every round, `last` those of the last round,
                a number those of that many last rounds, `best` those of the last round and of the
                best agent of each earlier round. Unless all are kept, checkpoints/best has a copy
                of the best agent.
            optuna: Record one Optuna trial per agent and round.
            storage: Where the trials are kept. null: Optuna's journal in the run folder. `sqlite`:
                a SQLite file in the run folder. `postgresql+psycopg://user@host:port/database`: a
                server, with one study per run; the password comes from PGPASSWORD or ~/.pgpass.
                `sqlite:///path`: a SQLite file that several runs may share.
            trackers: Trackers that follow the run, each a kind or a mapping: `[tensorboard,
                wandb]`. With `metrics: false` they receive rounds but no steps.
            out: Run folder for records and checkpoints; None keeps only the records, in memory.
            force: Replace an existing run in `out`.
            observer: An `Observer`, called while the population trains.
            progress: Show progress and the result: None in a terminal or a notebook, True also in a
                pipe or a file, False nowhere.

        Returns:
            The records of these rounds.

        Raises:
            ConfigError: An argument is invalid, or `out` is given after the first call.
            RunFailedError: No agent is left that can be ranked.
        """
        given = dict(locals())
        del given["self"]
        return self._train(given)

    @abstractmethod
    def _train(self, given: dict[str, Any]) -> list[RoundRecord]: ...

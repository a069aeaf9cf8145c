"""Population: agents over one base that generate, learn, are tested and evolve together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, final, overload

import numpy as np
import yaml

from evo_grpo.api.environments import environment_for
from evo_grpo.api.mutation_warnings import warn_of_inert_mutations
from evo_grpo.cohort.cohort import Cohort
from evo_grpo.cohort.state import AgentState
from evo_grpo.envs.protocol import Environment
from evo_grpo.errors import ConfigError
from evo_grpo.evaluate import evaluate
from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.explore.none import NoExploration
from evo_grpo.evolve.explore.protocol import Explorer
from evo_grpo.evolve.generation import next_generation
from evo_grpo.evolve.select.none import NoSelection
from evo_grpo.evolve.select.protocol import Offspring, Selector
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.learner.rows import AgentBatch
from evo_grpo.record.leaderboard import from_records
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.observer import Observer
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.run_dir import RunDir
from evo_grpo.round import RoundSettings, RunWriter, apply, next_slots, play_round
from evo_grpo.run_writer import FolderWriter, NullWriter
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.seeding import generator
from evo_grpo.training import RECORDED_IN_PYTHON
from evo_grpo.types import Member, Mutation, Score, Slot
from evo_grpo.validation import check_all, whole

if TYPE_CHECKING:
    import pandas as pd


class AgentHandle(Protocol):
    """What a population needs of its agents."""

    cohort: Cohort
    slot: Slot
    index: int

    @property
    def state(self) -> AgentState:
        """The agent's own state."""
        ...


AgentT = TypeVar("AgentT", bound=AgentHandle)


_RULES = {
    "rounds": whole(1),
    "steps_per_round": whole(1),
    "prompts_per_step": whole(1, "None takes the environment's batch size").or_none(),
    "eval_prompts": whole(1),
    "eval_samples": whole(1),
}


@final
class Population(Sequence[AgentT], Generic[AgentT]):
    """N agents over one base.

    Args:
        cohort: What they share.
        agents: Handles on N of its agents, or what wraps them.
        slots: Their slots; None asks the handles.
    """

    def __init__(
        self, cohort: Cohort, agents: Sequence[AgentT], slots: Sequence[Slot] | None = None
    ) -> None:
        """Keep the handles; no weights live here."""
        self.cohort = cohort
        self.agents = list(agents)
        self.slots = [agent.slot for agent in agents] if slots is None else list(slots)
        self.rounds: list[RoundRecord] = []
        self.elite: int | None = None

    @overload
    def __getitem__(self, index: int) -> AgentT: ...
    @overload
    def __getitem__(self, index: slice) -> list[AgentT]: ...
    def __getitem__(self, index: int | slice) -> AgentT | list[AgentT]:
        """Return one agent, or several."""
        return self.agents[index]

    def __len__(self) -> int:
        """Return N."""
        return len(self.agents)

    def __iter__(self) -> Iterator[AgentT]:
        """Iterate over the agents."""
        return iter(self.agents)

    @property
    def hp_config(self) -> HyperparameterConfig:
        """What may mutate."""
        return self.cohort.hp_config

    def train(  # noqa: PLR0913 -- the whole run is described here, all but the first two have defaults
        self,
        env: Environment[Any] | str,
        rounds: int = 6,
        *,
        steps_per_round: int = 4,
        prompts_per_step: int | None = None,
        selection: Selector | None = None,
        mutations: Explorer | None = None,
        eval_prompts: int = 64,
        eval_samples: int = 1,
        out: str | Path | None = None,
        force: bool = False,
        observer: Observer | None = None,
    ) -> list[RoundRecord]:
        """Train and evolve for some rounds; a second call goes on where the first ended.

        Args:
            env: The environment, of one turn or many, or a task's name such as "sums".
            rounds: Rounds to play now.
            steps_per_round: GRPO steps per round.
            prompts_per_step: P; None takes the environment's batch size.
            selection: Who survives; None is a tournament of two with elitism.
            mutations: What changes; None is the default `Mutations`.
            eval_prompts: Validation prompts behind a fitness.
            eval_samples: Completions per validation prompt.
            out: Run folder for records and checkpoints, None to keep them in memory alone.
            force: Replace a run that is already in `out`.
            observer: Follows the progress.

        Returns:
            The records of these rounds.

        Raises:
            ConfigError: A number is below 1, or `out` is given, but not at the first call.
        """
        check_all(_RULES, locals())
        env = environment_for(self.cohort, env)
        prompts = prompts_per_step or env.batch_size
        warn_of_inert_mutations(self.cohort, self.slots, mutations, prompts)
        settings = RoundSettings(
            rounds=len(self.rounds) + rounds,
            steps_per_round=steps_per_round,
            prompts_per_step=prompts,
            selector=selection or _default_selection(len(self)),
            explorer=mutations or Mutations(),
            eval_prompts=eval_prompts,
            eval_samples=eval_samples,
        )
        if out is None:
            return self._play(env, settings, NullWriter(), observer or Observer(), None)
        if self.rounds:
            raise ConfigError(
                f"out={str(out)!r}: a run is recorded from its first round on, and this population "
                f"has played {len(self.rounds)}; give out= at the first call, or leave it out"
            )
        base, seed = self.cohort.base.name, self.cohort.seed
        text = RECORDED_IN_PYTHON + yaml.safe_dump(
            {"name": Path(out).name, "seed": seed, "model": base, "env": env.name}
        )
        with RunDir.create(Path(out), Path(out).name, text, force=force) as folder:
            lineage = Lineage(folder.journal, Path(out).name, self.hp_config)
            with FolderWriter(folder, lineage, keep_last=False) as writer:
                return self._play(env, settings, writer, observer or Observer(), folder.path)

    def leaderboard(self) -> pd.DataFrame:
        """Return the leaderboard of the rounds played so far; see `evo_grpo.leaderboard`."""
        return from_records(self.rounds)

    def histories(self) -> list[list[Score]]:
        """Return each agent's own scores, latest last."""
        return [self._state(position).history for position in range(len(self))]

    def apply(self, plan: Sequence[Offspring]) -> None:
        """Carry a plan out: copy parents over children, and remove the agents that leave.

        The copies keep their parent's hyperparameters until they mutate.

        Args:
            plan: By position in this population.
        """
        states = [self._state(position) for position in range(len(self))]
        generation = next_generation(
            plan,
            [state.member for state in states],
            [state.hparams for state in states],
            NoExploration(),
            self.hp_config,
            generator(0),  # nothing is drawn
            round=len(self.rounds) - 1,
            next_id=self.cohort.next_member,
        )
        apply(self.cohort, self.slots, generation, inherit_optimizer=True)
        self.keep(generation.slots)
        self.elite = next((i for i, offspring in enumerate(plan) if offspring.elite), None)

    def keep(self, slots: Sequence[Slot]) -> None:
        """Forget the handles of agents that have left.

        Args:
            slots: Those of the agents that are still there.
        """
        kept = [(s, a) for s, a in zip(self.slots, self.agents, strict=True) if s in slots]
        self.slots = [slot for slot, _ in kept]
        self.agents = [agent for _, agent in kept]

    def set_hparams(
        self,
        position: int,
        hparams: Hparams,
        changes: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Give the agent at a position other hyperparameters; `changes` begin a new member."""
        slot = self.slots[position]
        self.cohort.set_hparams(slot, hparams)
        if changes:
            parent, mutation = self._state(position).member.id, Mutation("mutate", dict(changes))
            born = len(self.rounds)
            member = Member(self.cohort.next_member, slot, parent, born, mutation)
            self.cohort.set_member(slot, member)

    def test(self, env: Environment[Any] | str, loop: int = 1) -> list[Score]:
        """Evaluate all agents on the test split in one generation call.

        The draws are shared, at temperature 1.
        """
        whole(1).check("loop", loop)
        env = environment_for(self.cohort, env)
        results = evaluate(
            self.cohort,
            env,
            self.slots,
            env.prompts("test", None),
            samples=loop,
            temperature=1.0,
            stream=("test", self.cohort.next_call()),
        )
        return [result.score for result in results]

    def learn(self, batches: Sequence[AgentBatch]) -> list[dict[str, float]]:
        """Take one GRPO step for every agent with a batch, in one fused forward and backward."""
        return self.cohort.learn(batches, stream=("learn", self.cohort.next_call()))

    def mean_fitness(self) -> float:
        """Return the mean of the agents' latest fitness, NaN before the first evaluation."""
        last = [history[-1].mean for history in self.histories() if history]
        return float(np.mean(last)) if last else float("nan")

    def _state(self, position: int) -> AgentState:
        return self.cohort.agents[self.slots[position]]

    def _play(
        self,
        env: Environment[Any],
        settings: RoundSettings,
        writer: RunWriter,
        observer: Observer,
        run_dir: Path | None,
    ) -> list[RoundRecord]:
        first = len(self.rounds)
        observer.started(run_dir, settings.rounds, first, None)
        for number in range(first, settings.rounds):
            record = play_round(
                self.cohort, env, settings, self.slots, number, writer=writer, observer=observer
            )
            self.rounds.append(record)
            self.keep(next_slots(record))
        return self.rounds[first:]


def _default_selection(size: int) -> Selector:
    # A single agent would be the elite, which does not mutate.
    return NoSelection() if size == 1 else TournamentSelection()

"""Population: agents over one base that generate, learn, are tested and evolve together."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, final, overload

import numpy as np

from evo_grpo.api.environments import environment_for
from evo_grpo.api.mutation_warnings import warn_of_inert_mutations
from evo_grpo.api.tensors import check_generated
from evo_grpo.api.train_signature import PopulationSignature
from evo_grpo.assemble import Objects, Prepared, add_agents, build_cohort, round_settings
from evo_grpo.checkpoints.manifest import read_attributes
from evo_grpo.checkpoints.read import load_agent
from evo_grpo.checkpoints.rebuild import recipe
from evo_grpo.checkpoints.write import save_agent
from evo_grpo.cohort.cohort import Cohort
from evo_grpo.cohort.state import AgentState
from evo_grpo.envs.protocol import Environment
from evo_grpo.envs.resolve import named_task
from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.evaluate import evaluate
from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.explore.none import NoExploration
from evo_grpo.evolve.generation import next_generation
from evo_grpo.evolve.select.none import NoSelection
from evo_grpo.evolve.select.protocol import Offspring
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.evolve.start import Start, described_start
from evo_grpo.learner.rows import AgentBatch
from evo_grpo.record.family import next_member_id
from evo_grpo.record.files import atomic_write, to_line
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.leaderboard import best_agent, from_records
from evo_grpo.record.names import RECORDED_IN_PYTHON
from evo_grpo.record.observer import Observer, Several, check_observer
from evo_grpo.record.records import RoundRecord, member_from_json, round_from_json, to_json
from evo_grpo.record.run_dir import RunDir
from evo_grpo.report.notebook import as_html
from evo_grpo.round import apply
from evo_grpo.run_writer import NullWriter
from evo_grpo.schema.group import Group
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.seeding import generator
from evo_grpo.settings import (
    EnvConfig,
    EvolveConfig,
    ModelConfig,
    PopulationConfig,
    RecordConfig,
    RunConfig,
    to_yaml,
)
from evo_grpo.settings.keywords import TRAIN_KEYWORDS
from evo_grpo.settings.trackers import check_trackers
from evo_grpo.strategies import check_explorer, from_object
from evo_grpo.studies import check_storage
from evo_grpo.trackers.following import with_trackers
from evo_grpo.training import play_and_judge, play_rounds
from evo_grpo.types import Member, Mutation, Score, Slot
from evo_grpo.validation import check_folder, whole

if TYPE_CHECKING:
    import pandas as pd

    from evo_grpo.terminal.progress import RunProgress

FORMAT = 3
"""Version of population.json."""
POPULATION = "population.json"
STRATEGIES = (("selection", "selector", "plan"), ("exploration", "explorer", "explore"))
"""Keyword, name in `RoundSettings`, and the method that makes an object one."""


HANDLES: dict[str, Any] = {}
"""The class of each algorithm, entered by the module that defines it: it lies above this one."""


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


@final
class Population(PopulationSignature, Sequence[AgentT], Generic[AgentT]):
    """N agents over one base.

    Args:
        cohort: What they share.
        agents: Handles on N of its agents, or what wraps them.
        slots: Their slots; None asks the handles.

    Attributes:
        rounds: The rounds played so far.
        summary: Base and best agent on the test split, after a `train` with `out`.
        elite: Position of the agent that the last `apply` kept as the best, or None.
    """

    def __init__(
        self, cohort: Cohort, agents: Sequence[AgentT], slots: Sequence[Slot] | None = None
    ) -> None:
        """Keep the handles; no weights live here."""
        self.cohort = cohort
        self.agents = list(agents)
        self.slots = [agent.slot for agent in agents] if slots is None else list(slots)
        self.rounds: list[RoundRecord] = []
        self.summary: Mapping[str, Any] | None = None
        self.elite: int | None = None

    def __repr__(self) -> str:
        """Show what it is and how far it came."""
        kind = type(self.agents[0]).__name__ if self.agents else "no"
        parts = [f"{len(self)} {kind} agents over {self.cohort.base.name!r}"]
        if self.rounds:
            parts.append(f"{len(self.rounds)} rounds")
            best = best_agent(self.rounds[-1])
            if best is not None and best.score is not None:
                parts.append(f"best fitness {best.score.mean:.3f} (agent {best.agent})")
        return f"Population({', '.join(parts)})"

    def _repr_html_(self) -> str:
        return as_html(self.rounds, repr(self))

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

    def _train(self, given: dict[str, Any]) -> list[RoundRecord]:
        # Those that left in earlier rounds count: their completions went to the others.
        size = len(self.rounds[0].agents) if self.rounds else len(self)
        call = _TrainCall.of(given, size=size, played=len(self.rounds))
        env = environment_for(self.cohort, call.env)
        prompts = self.cohort.settings.algorithm.prompts_per_step or env.batch_size
        group_size = self.cohort.settings.algorithm.group_size
        settings = round_settings(call.population, call.evolve, call.record, prompts, group_size)
        settings = replace(settings, **call.strategies)
        check_explorer(settings.explorer, self.cohort.settings)
        explorer = settings.explorer if given["exploration"] != Mutations() else None
        warn_of_inert_mutations(self.cohort, self.slots, explorer, prompts)
        prepared = Prepared(self.cohort, env, settings, tuple(self.slots))
        first = len(self.rounds)
        # A rule that ended the last call does not end this one before it has begun.
        self.rounds[-1:] = [replace(r, went_on=bool(r.stopped)) for r in self.rounds[-1:]]
        with _shown(call.progress, self._title(env, call), self.hp_config.names()) as progress:
            observer = Several(tuple(o for o in (progress, call.observer) if o is not None))
            if call.out is None:
                observer.started(None, settings.rounds, first, None)
                slots, writer = tuple(self.slots), NullWriter()
                slots = play_rounds(prepared, slots, self.rounds, writer=writer, observer=observer)
            else:
                slots = self._record(call, prepared, observer)
        self.keep(slots)
        if progress is not None:
            progress.show_ending(self.rounds, None if call.out is None else self.summary)
        return self.rounds[first:]

    def _record(self, call: _TrainCall, prepared: Prepared, observer: Observer) -> tuple[Slot, ...]:
        """Train into a run folder, and judge the best agent at the end."""
        if self.cohort.team.size > 1:
            raise ConfigError(
                f"out: expected one process to record a run, got {self.cohort.team.size}, which "
                "train together; leave it out, or use evo_grpo.run(config), which records for all"
            )
        if self.rounds or call.out is None:
            raise ConfigError(
                f"out={str(call.out)!r}: a run is recorded from its first round on, and this "
                f"population has played {len(self.rounds)}; give out= at the first call, or leave "
                "it out"
            )
        first = self.cohort.settings.algorithm.hparams()
        begun = [state.hparams for state in self._states()]
        init = described_start(begun, first, self.hp_config, self.cohort.seed)
        config = call.config(self.cohort, prepared.env, init)
        check_storage(config)
        check_trackers(config.record.trackers)
        text = to_yaml(config)
        if objects := self._objects(call):
            text = f"{RECORDED_IN_PYTHON}{', '.join(objects)}\n{text}"
        with RunDir.create(call.out, config.name, text, force=call.force) as folder:
            with with_trackers(config.record, observer, rank=0) as observer:
                slots = play_and_judge(config, folder.path, folder, prepared, observer)
            self.rounds = read_rounds(folder.path)
            self.summary = folder.summary()
        return slots

    def _objects(self, call: _TrainCall) -> list[str]:
        """Name what a run file cannot: without these it could not be resumed from its folder."""
        names = [*self.cohort.objects, *call.strategies]
        if named_task(call.env) is None:
            names.append(f"env ({type(call.env).__name__})")
        if self.slots != list(range(len(self))) or any(s.steps for s in self._states()):
            names.append("agents that had trained before")
        return [
            "selection" if n == "selector" else "exploration" if n == "explorer" else n
            for n in names
        ]

    def _title(self, env: Environment[Any], call: _TrainCall) -> str:
        return (
            f"{self.cohort.base.name} on {env.name}, {len(self)} agents, "
            f"{call.population.rounds} rounds of {call.population.steps_per_round} steps"
        )

    def save(self, path: str | Path) -> None:
        """Write all agents and the rounds that they played; `load` brings them back.

        Args:
            path: Folder; each agent has a checkpoint in `agent-NN/`.
        """
        folder = check_folder("save: path", path)
        for slot in self.slots:
            save_agent(self.cohort, slot, folder / f"agent-{slot:02d}")
        data = {
            "format": FORMAT,
            "agents": [int(slot) for slot in self.slots],
            "rounds": [to_json(record) for record in self.rounds],
        }
        atomic_write(folder / POPULATION, to_line(data) + "\n")

    @classmethod
    def load(
        cls, path: str | Path, device: str = "auto", *, trust_remote_code: bool = False
    ) -> Population[Any]:
        """Read a population that `save` wrote, over a base of its own.

        Args:
            path: The folder.
            device: Where the base goes.
            trust_remote_code: Run Python code that comes with the base; only for one you trust.

        Raises:
            CheckpointError: It is no such folder, or a file in it is missing or damaged.
        """
        folder = Path(path)
        slots, rounds = _read_population(folder)
        places = [folder / f"agent-{slot:02d}" for slot in slots]
        attributes = [read_attributes(place) for place in places]
        kind = str(attributes[0]["settings"]["algorithm"]["kind"])
        made = recipe(places[0], attributes[0], kind, device, trust_remote_code=trust_remote_code)
        cohort, _ = build_cohort(
            made.settings, Objects(made.model, lora=made.lora, padding=made.padding)
        )
        for slot in add_agents(cohort, max(slots) + 1, "same"):
            if slot not in slots:
                cohort.remove(slot)
        for slot, place, own in zip(slots, places, attributes, strict=True):
            load_agent(cohort, slot, place, load_optimizer=bool(own["has_optimizer"]))
            cohort.agents[slot].member = member_from_json(own["member"])
        cohort.reserve_members(next_member_id(rounds))
        population = Population(
            cohort, [HANDLES[kind].on(cohort, s, i) for i, s in enumerate(slots)]
        )
        population.rounds = rounds
        return population

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
        """Take one GRPO step for every agent with a batch, in one fused forward and backward.

        Raises:
            ShapeError: An agent has rows, and none of them has a generated token.
        """
        for batch in batches:
            if batch.rows:
                check_generated(batch.rows)
        return self.cohort.learn(batches, stream=("learn", self.cohort.next_call()))

    def mean_fitness(self) -> float:
        """Return the mean of the agents' latest fitness, NaN before the first evaluation."""
        last = [history[-1].mean for history in self.histories() if history]
        return float(np.mean(last)) if last else float("nan")

    def _state(self, position: int) -> AgentState:
        return self.cohort.agents[self.slots[position]]

    def _states(self) -> list[AgentState]:
        return [self._state(position) for position in range(len(self))]


@dataclass(frozen=True)
class _TrainCall:
    """One call of `train`, its settings sorted into their groups.

    Attributes:
        strategies: Those that came as objects of one's own, by their names in `RoundSettings`.
    """

    env: Any
    name: str
    population: PopulationConfig
    evolve: EvolveConfig
    record: RecordConfig
    strategies: Mapping[str, Any]
    out: Path | None
    force: bool
    observer: Observer | None
    progress: bool | None

    @classmethod
    def of(cls, given: Mapping[str, Any], *, size: int, played: int) -> _TrainCall:
        groups: dict[str, dict[str, Any]] = {}
        for name, path in TRAIN_KEYWORDS.items():
            groups.setdefault(str(path[0]), {})[str(path[-1])] = given[name]
        evolve, own = groups["evolve"], dict[str, Any]()
        if given["observer"] is not None:
            check_observer(given["observer"])
        for name, field, method in STRATEGIES:
            if hasattr(evolve[name], method) and not isinstance(evolve[name], Group):
                own[field] = from_object(name, method, evolve.pop(name))
        if size == 1 and evolve.get("selection") == TournamentSelection():
            evolve["selection"] = NoSelection()  # an agent alone has nobody to compete with
        population = PopulationConfig(size=size, **groups["population"])
        population = population.replace(rounds=played + population.rounds)
        record = RecordConfig(**groups["record"])
        if record.storage is not None and given["out"] is None:
            raise ConfigError(
                "storage: expected out= too, a run folder, since trials are those of the rounds "
                "that it records; give it, or leave storage out"
            )
        if record.trackers and given["out"] is None:
            raise ConfigError(
                "trackers: expected out= too, a run folder, in which they write; give it, or "
                "observer=evo_grpo.trackers.Tracker(...)"
            )
        return cls(
            given["env"],
            str(given["name"]),
            population,
            EvolveConfig(**evolve),
            record,
            own,
            None if given["out"] is None else Path(given["out"]),
            bool(given["force"]),
            given["observer"],
            given["progress"],
        )

    def config(self, cohort: Cohort, env: Environment[Any], init: Start) -> RunConfig:
        """Return the call as a run file would have it, as far as a file can.

        Args:
            cohort: The agents.
            env: What they train on.
            init: How they began, as `population.init` has it.
        """
        settings = cohort.settings
        return RunConfig(
            name=self.name,
            seed=settings.seed,
            model=settings.model or ModelConfig(name=cohort.base.name),
            env=named_task(self.env) or EnvConfig(kind=f"object:{env.name}"),
            population=self.population.replace(init=init),
            algorithm=settings.algorithm,
            evolve=self.evolve.replace(hyperparameters=settings.hyperparameters),
            engine=settings.engine,
            record=self.record,
        )


def _read_population(folder: Path) -> tuple[list[Slot], list[RoundRecord]]:
    file = folder / POPULATION
    if not file.is_file():
        raise CheckpointError(
            f"{folder}: expected a folder written by Population.save, but {POPULATION} is missing"
        )
    try:
        data = json.loads(file.read_bytes())
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']}, expected {FORMAT}")
        slots = [Slot(int(slot)) for slot in data["agents"]]
        return slots, [round_from_json(record) for record in data["rounds"]]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{file}: expected what Population.save wrote, but {error}; put the file back"
        ) from error


@contextmanager
def _shown(wanted: bool | None, title: str, names: Sequence[str]) -> Generator[RunProgress | None]:
    """Show progress in a terminal or a notebook; elsewhere where it is asked for, or nowhere."""
    if wanted is False:
        yield None
        return
    from evo_grpo.terminal.progress import progress  # rich, which a quiet call does without

    with progress(title=title, hyperparameters=names, anywhere=wanted is True) as shown:
        yield shown

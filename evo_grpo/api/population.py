"""Defines Population: agents over one base that train, are tested and evolve together."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, Unpack, final, overload

from peft import LoraConfig

from evo_grpo.api import calls, keywords, tensors, unapplied
from evo_grpo.api.by_keyword import TRAIN_FIELDS, by_keyword
from evo_grpo.api.saved import ARCHIVE, load, write
from evo_grpo.envs.protocol import Environment
from evo_grpo.errors import FailedDeviceError
from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.explore.on_copy import NoExploration
from evo_grpo.evolve.generation import check_plan, next_generation
from evo_grpo.evolve.protocols import Offspring
from evo_grpo.learn.rows import AgentBatch
from evo_grpo.places import searching
from evo_grpo.population.checkpoints.write import save_agent
from evo_grpo.population.cohort.archive import LastWholeRound
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.evaluate import Evaluation, evaluate
from evo_grpo.population.round import apply, next_slots
from evo_grpo.population.steps import RunWriter
from evo_grpo.record import files, run_dir, study, summary
from evo_grpo.record.folder import code_folder, expect_run, read_rounds, with_objects
from evo_grpo.record.leaderboard import from_records
from evo_grpo.record.observer import Observer, ObserverList, check_observer
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.view import view_of
from evo_grpo.schema.hparams import Hparams, Value
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.schema.validation import check_folder, whole
from evo_grpo.seeding import generator
from evo_grpo.settings import PopulationConfig, to_yaml
from evo_grpo.settings.trackers import check_trackers
from evo_grpo.training.assemble import Objects, Prepared, environment_for, round_settings
from evo_grpo.training.followers import Followers
from evo_grpo.training.from_python import FromPython, resume_from_python
from evo_grpo.training.run import play_and_judge, play_rounds
from evo_grpo.training.shortages import warn_of_shortages
from evo_grpo.training.strategies import check_explorer
from evo_grpo.types import Member, Mutation, Score, Slot

if TYPE_CHECKING:
    import pandas as pd

HANDLES: dict[str, Any] = {}
"""Algorithm -> its class; api/agent.py fills this in, because that module imports this one."""


class AgentHandle(Protocol):
    """An element of a population: an agent, or a wrapper that has the agent's slot."""

    slot: Slot


AgentT = TypeVar("AgentT", bound=AgentHandle)


@final
class Population(Sequence[AgentT], Generic[AgentT]):
    """N agents over one base.

    Args:
        cohort: The state that the agents share.
        agents: Handles on N agents of the cohort, or wrappers around handles.
        slots: Slots of the agents; None reads them from the handles.

    Attributes:
        rounds: Records of the rounds played so far.
        summary: Test results of the base and the best agent, after a `train` with `out`.
        elite: Position of the agent that the last `apply` kept as the best, or None.
    """

    def __init__(
        self, cohort: Cohort, agents: Sequence[AgentT], slots: Sequence[Slot] | None = None
    ) -> None:
        """Make a population of existing agents."""
        self.cohort = cohort
        self.agents = list(agents)
        self.slots = [agent.slot for agent in agents] if slots is None else list(slots)
        self._handles: dict[Slot, AgentT] = {}  # also of agents that have left and may return
        self.rounds: list[RoundRecord] = []
        self.summary: Mapping[str, Any] | None = None
        self.course: PopulationConfig | None = None  # decisions and sizes of the latest call
        self.elite: int | None = None

    def __repr__(self) -> str:
        kind = type(self.agents[0]).__name__ if self.agents else "no"
        parts = [f"{len(self)} {kind} agents over {self.cohort.base.name!r}"]
        if self.rounds:
            parts.append(f"{len(self.rounds)} rounds")
            winner = view_of(self).winner
            if winner is not None and winner.fitness is not None:
                parts.append(f"best fitness {winner.fitness.mean:.3f} ({winner.name})")
            elif winner is not None:
                parts.append(f"winner {winner.name}")
        return f"Population({', '.join(parts)})"

    def _repr_html_(self) -> str:
        from evo_grpo.readers.report.run_page import as_html

        return as_html(self, repr(self))

    @overload
    def __getitem__(self, index: int) -> AgentT: ...
    @overload
    def __getitem__(self, index: slice) -> list[AgentT]: ...
    def __getitem__(self, index: int | slice) -> AgentT | list[AgentT]:
        return self.agents[index]

    def __len__(self) -> int:
        return len(self.agents)

    @property
    def hp_config(self) -> HyperparameterConfig:
        """The hyperparameters that may mutate, with their ranges."""
        return self.cohort.hp_config

    @by_keyword(TRAIN_FIELDS, keywords.TrainKeywords)
    def train(
        self,
        env: Any,  # noqa: ANN401 -- a name, settings or an environment
        *,
        out: str | Path | None = None,
        force: bool = False,
        observer: Observer | None = None,
        progress: bool | None = None,
        **settings: Unpack[keywords.TrainKeywords],
    ) -> list[RoundRecord]:
        """Train and evolve the agents for some rounds; another call continues after the last round.

        Each call plans a selection after its last round, with its own settings, and the next call
        carries it out, so that several calls give the same result as one. If agents were changed in
        between, the next call warns and does not select. A call of `apply` replaces the selection.

        Args:
            env: The name of a task, its settings as under `env` in YAML, or an environment.
            out: Run folder for records and checkpoints; None keeps only the records, in memory.
            force: Replace an existing run in `out`.
            observer: An `Observer`, called while the population trains.
            progress: Whether to show progress and the result. None shows them in a terminal or a
                notebook, True also in a pipe or a file, False nowhere.
            **settings: Settings; docs/configuration.md has their meaning, `help` their types.

        Returns:
            The records of these rounds.

        Raises:
            ConfigError: An argument is invalid, or `out` is given after the first call.
            RunFailedError: No agent is left that can be ranked.
        """
        call = {"env": env, "out": out, "force": force, "observer": observer, "progress": progress}
        return self._train({**call, **settings})

    def _train(self, given: dict[str, Any]) -> list[RoundRecord]:
        # Include agents that have left: the others have taken over their completions.
        size = len(self.rounds[0].agents) if self.rounds else len(self)
        check_observer(given["observer"] or Observer())
        out = None if given["out"] is None else Path(given["out"])
        population, evolve, record, strategies = calls.in_groups(
            given, size=size, played=len(self.rounds)
        )
        env = environment_for(self.cohort, given["env"])
        played, course_so_far = len(self.rounds), (self.rounds, self.course)
        population, evolve = calls.going_on(
            population, evolve, self.cohort, self.slots, course_so_far
        )
        self.course = population
        algorithm = self.cohort.settings.algorithm
        prompts, group_size = algorithm.prompts_per_step or env.batch_size, algorithm.group_size
        settings = replace(
            round_settings(population, evolve, record, prompts, group_size), **strategies
        )
        check_explorer(settings.explorer, self.cohort.settings)
        explorer = settings.explorer if given["exploration"] != Mutations() else None
        calls.warn_of_inert_mutations(
            self.cohort, self.slots, explorer, prompts, population, evolve
        )
        if out is not None:
            calls.check_out(out, self.cohort, len(self.rounds))
        task = getattr(env, "task", None)
        warn_of_shortages(task, prompts, evolve.fitness, tests=out is not None)
        objects = calls.given_objects(self.cohort, given, strategies)
        parts = {} if out is None else objects.parts(self.cohort.seed)
        self.make_up(inherit_optimizer=evolve.inherit_optimizer)
        last_round, slots = LastWholeRound(self.cohort), tuple(self.slots)
        prepared = Prepared(self.cohort, env, settings, slots, last_round.keep, parts)
        title = (
            f"{self.cohort.base.name} on {env.name}, {len(self)} agents, "
            f"{population.rounds} rounds of {population.steps_per_round} steps"
        )
        with (
            calls.shown_progress(given["progress"], title, self.hp_config.names()) as progress,
            self._put_back_if_interrupted(last_round, population.rounds, out),
        ):
            observer = ObserverList((progress or Observer(), given["observer"] or Observer()))
            if out is not None:
                slots = self._record(out, given, strategies, prepared, observer)
            else:
                observer.started(None, population.rounds, played, None)
                writer = RunWriter()
                slots = play_rounds(prepared, slots, self.rounds, writer=writer, observer=observer)
        self._after_rounds(slots, population.rounds)
        if progress is not None:
            progress.show_ending(view_of(self if out is None else out))
        return self.rounds[played:]

    def _after_rounds(self, slots: Sequence[Slot], planned: int) -> None:
        """Keep only the agents in `slots`; after the last planned round, remember its plan."""
        self.keep(slots)
        if self.rounds and (len(self.rounds) >= planned or self.rounds[-1].is_end):
            unapplied.note(self.cohort, self.rounds[-1])

    @contextmanager
    def _put_back_if_interrupted(
        self, whole: LastWholeRound, planned: int, out: Path | None
    ) -> Generator[None]:
        """If the block raises, put agents back to the end of the last finished round."""
        try:
            yield
        except BaseException as error:  # Ctrl-C too: the stop button of a notebook
            # Nothing can be put back on a device that failed.
            if not isinstance(error, FailedDeviceError) and whole.put_back():
                rounds = self.rounds if out is None else read_rounds(out)
                self.rounds = list(rounds[: whole.rounds])
                self._after_rounds(whole.slots, planned)
            raise

    def make_up(self, *, inherit_optimizer: bool) -> None:
        """Carry out the pending plan of the last round, if any; see `evo_grpo.api.unapplied`."""
        if not self.rounds:  # rounds of another population do not count
            unapplied.withdraw(self.cohort, self.slots)
            return
        last_round = self.rounds[-1]
        record = unapplied.make_up(self.cohort, self.slots, inherit_optimizer=inherit_optimizer)
        self.rounds[-1] = record or replace(last_round, went_on=bool(last_round.stopped), plan=None)
        if record is not None:
            self.keep(next_slots(record))

    def _record(
        self,
        out: Path,
        given: Mapping[str, Any],
        strategies: Mapping[str, Any],
        prepared: Prepared,
        observer: Observer,
    ) -> tuple[Slot, ...]:
        """Train, write a run folder, and evaluate the best agent at the end.

        `given` has the keywords of `train`, `strategies` the user's strategies that are objects.
        """
        config = calls.recorded_config(prepared, str(given["name"]), given["env"])
        study.check_storage(config.record.storage)
        check_trackers(config.record.trackers)
        objects = calls.unnamed_objects(self.cohort, self.slots, given["env"], strategies)
        text = with_objects(to_yaml(config), objects)
        with (
            Followers() as followers,
            run_dir.RunDir.create(out, config.name, text, force=bool(given["force"])) as folder,
        ):
            observers = ObserverList((observer, followers))
            slots = play_and_judge(config, folder.path, folder, prepared, observers)
            self.rounds = read_rounds(folder.path)
            self.summary = summary.read_summary(folder.path)
        return slots

    @classmethod
    def resume(  # noqa: PLR0913 -- all but the first have defaults
        cls,
        out: str | Path,
        env: object = None,
        *,
        model: object = None,
        tokenizer: object = None,
        lora: LoraConfig | None = None,
        selection: object = None,
        exploration: object = None,
        rounds: int | None = None,
        allow: Sequence[str] = (),
        code: str | Path | None = None,
        observer: Observer | None = None,
        progress: bool | None = None,
    ) -> Population[Any]:
        """Continue a run that `train(..., out=)` recorded, to its last round.

        The result equals that of a run without the stop, to the bit. A finished run is loaded and
        does not train, unless `rounds` extends it. Objects that population.yaml cannot name must be
        passed again: its first line lists them. Their rows and sources are compared with those at
        the start of the run.

        Args:
            out: The run folder.
            env: The environment, if the run began with an object; the next five arguments likewise.
            model: See `env`.
            tokenizer: See `env`.
            lora: See `env`; not needed once a round is finished, because checkpoints contain it.
            selection: See `env`.
            exploration: See `env`.
            rounds: Rounds of the whole run, in place of the recorded number.
            allow: Files of yours, and parts of the objects, that may have changed since the run
                began, named as in the error message.
            code: A further folder to search for the files and modules that the run names.
            observer: Gets the progress.
            progress: As for `train`.

        Returns:
            A population over a new base, with the rounds of the run.

        Raises:
            ConfigError: An object is missing, or differs from that of the run.
            RunDirError: The folder is in use.
            CheckpointError: A file of the run is missing or was changed.
        """
        folder = expect_run(out)
        strategies = {"selection": selection, "exploration": exploration}
        from_python = FromPython(
            env,
            Objects(model, tokenizer, lora),
            {name: value for name, value in strategies.items() if value is not None},
        )
        with (
            searching(code_folder(code), is_code=True),
            calls.shown_progress(progress) as display,
        ):
            observers = ObserverList((display or Observer(), observer or Observer()))
            prepared, slots = resume_from_python(
                folder, from_python, rounds=rounds, allow=allow, observer=observers
            )
        cohort, played = prepared.cohort, read_rounds(folder)
        first_agents = [a.agent for a in played[0].agents]
        kind = HANDLES[cohort.settings.algorithm.kind]
        handles = [
            kind.on(cohort, slot, i) for i, slot in enumerate(first_agents) if slot in cohort.agents
        ]
        population = Population(cohort, handles)
        population.rounds, population.summary = played, summary.read_summary(folder)
        population._after_rounds(slots, prepared.round_settings.population.rounds)
        if display is not None:
            display.show_ending(view_of(folder))
        return population

    def save(self, path: str | Path) -> None:
        """Write all agents, also an archived one, and the records of their rounds, for `load`."""
        folder = check_folder("save: path", path)
        for slot in self.slots:
            save_agent(self.cohort, slot, folder / f"agent-{slot:02d}")
        shutil.rmtree(folder / ARCHIVE, ignore_errors=True)
        if self.cohort.archive is not None:
            save_agent(self.cohort, self.cohort.archive.slot, folder / ARCHIVE)
        files.sync_tree(folder)
        rounds = list(self.rounds)
        if rounds and not unapplied.is_unchanged(self.cohort, self.slots):
            rounds[-1] = replace(rounds[-1], plan=None)
        write(folder, self.slots, rounds)

    @classmethod
    def load(
        cls, path: str | Path, device: str = "auto", *, trust_remote_code: bool = False
    ) -> Population[Any]:
        """Build a population from a folder that `save` wrote, over a new base.

        Args:
            path: The folder.
            device: Device of the base.
            trust_remote_code: Run Python code that comes with the base; only for a base you trust.

        Raises:
            CheckpointError: A file of the folder is missing or damaged.
        """
        slots, rounds, kind, cohort = load(Path(path), device, trust_remote_code=trust_remote_code)
        agents = [HANDLES[kind].on(cohort, slot, i) for i, slot in enumerate(slots)]
        population = Population(cohort, agents)
        population.rounds = rounds
        if rounds:
            unapplied.note(cohort, rounds[-1])
        return population

    def leaderboard(self) -> pd.DataFrame:
        """Return the leaderboard of the rounds played so far; see `evo_grpo.leaderboard`."""
        view = view_of(self)
        return from_records(view.rounds, view.summary)

    def histories(self) -> list[list[Score]]:
        """Return the scores of each agent, latest last."""
        return [self.cohort.agents[slot].history for slot in self.slots]

    def apply(self, plan: Sequence[Offspring]) -> None:
        """Carry out a plan: copy parents over children, and remove the agents that leave.

        The copies have their parent's hyperparameters until they mutate.

        Args:
            plan: One `Offspring` per agent of the next round, with positions in this population.
        """
        states = [self.cohort.agents[slot] for slot in self.slots]
        check_plan("plan", plan, len(states), len(states))
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
        unapplied.withdraw(self.cohort, self.slots)
        apply(self.cohort, self.slots, generation, inherit_optimizer=True)
        self.keep(generation.slots)
        self.elite = next((i for i, offspring in enumerate(plan) if offspring.elite), None)

    def keep(self, slots: Sequence[Slot]) -> None:
        """Keep the agents in these slots, and drop the others."""
        self._handles |= dict(zip(self.slots, self.agents, strict=True))
        self.slots = [slot for slot in slots if slot in self._handles]
        self.agents = [self._handles[slot] for slot in self.slots]

    def set_hparams(
        self,
        position: int,
        hparams: Hparams,
        changes: Mapping[str, tuple[Value, Value]] | None = None,
    ) -> None:
        """Set the hyperparameters of the agent at a position.

        With `changes`, name -> (old, new), the agent becomes a new member.
        """
        slot = self.slots[position]
        self.cohort.set_hparams(slot, hparams)
        if changes:
            parent, mutation = self.cohort.agents[slot].member.id, Mutation("mutate", dict(changes))
            born = len(self.rounds)
            member = Member(self.cohort.next_member, slot, parent, born, mutation)
            self.cohort.set_member(slot, member)

    def test(self, env: Environment[Any] | str, loop: int = 1) -> list[Score]:
        """Evaluate all agents on the test split at temperature 1, in one generation call.

        Args:
            env: The environment, or the name of a task such as "sums".
            loop: Completions per prompt, or episodes per seed, >= 1. Agents have the same draws.
        """
        return [result.score for result in tested(self.cohort, env, self.slots, loop)]

    def learn(self, batches: Sequence[AgentBatch]) -> list[dict[str, float]]:
        """Take one GRPO step for every agent with a batch, in one fused forward and backward.

        Args:
            batches: At most one batch per agent.

        Returns:
            The learner's metrics, one mapping per batch.

        Raises:
            ShapeError: The rows of an agent have no generated token.
        """
        for batch in batches:
            if batch.rows:
                tensors.check_generated(batch.rows)
        return self.cohort.learn(batches, stream=("learn", self.cohort.next_call()))


def tested(cohort: Cohort, env: object, slots: Sequence[Slot], loop: int) -> list[Evaluation]:
    """Evaluate agents as `Population.test` does; return all results of the evaluation."""
    whole(1).check("loop", loop)
    environment = environment_for(cohort, env)
    return evaluate(
        cohort,
        environment,
        slots,
        environment.prompts("test", None),
        samples=loop,
        temperature=1.0,
        stream=("test", cohort.next_call()),
    )

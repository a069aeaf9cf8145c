"""The base class of trackers, the values that all of them write, and `evo_grpo.Tracker`.

docs/metrics.md lists the values.

Each tracker is a reader of the log in a module named after its kind. A new kind needs such a
module with a class `Writer`, a line in `evo_grpo.settings.trackers.KINDS` and an extra.
"""

from __future__ import annotations

import math
import os
import queue
import re
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self, cast, final

from evo_grpo.errors import ConfigError
from evo_grpo.escaping import error_text
from evo_grpo.readers.reader import Reader
from evo_grpo.record import columns, observer, plain, wording
from evo_grpo.record.log import Entry, RoundDone, RunFinished, StepDone
from evo_grpo.record.names import TRACKERS
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.record.vocabulary import HYPERPARAMETER, SECONDS, VALIDATION
from evo_grpo.schema.validation import shown
from evo_grpo.settings.env import without_rows
from evo_grpo.settings.trackers import KINDS, TrackerConfig, check_trackers
from evo_grpo.training.recorded_inputs import flat
from evo_grpo.types import Slot

PROJECT = "evo-grpo"
POPULATION = "population"
"""The owner, in `Values`, of numbers that do not belong to one agent."""
_UNSUITABLE = re.compile(r"[^\w./ -]")
"""Characters that MLflow, the strictest tracker, rejects in the name of a metric."""
Settings = dict[str, str | float | None]
"""The settings of a run, by path."""


class TrackerReader(ABC):
    """Writes the entries of a run to a tracker; see `evo_grpo.readers.reader.Reader`.

    A subclass whose `run` has the methods `log` and `finish` only needs to implement `open`.

    Attributes:
        environment: Default values of environment variables of the tracker's package.
        makes_links: Whether the package creates symbolic links in its folder.
        named_by_folder: Whether the package identifies a run by its folder.
    """

    environment: ClassVar[Mapping[str, str]] = {}
    makes_links: ClassVar[bool] = False
    named_by_folder: ClassVar[bool] = False
    run: Any

    def __init__(self, target: TrackerConfig, settings: Settings, id: str) -> None:
        self.id = self.open(target, settings, id)

    @abstractmethod
    def open(self, target: TrackerConfig, settings: Settings, id: str) -> str:
        """Start a run, or continue one, and return the id for continuing it later.

        Args:
            target: Project, name and folder of the run; all are set, and the folder exists.
            settings: The settings of the run.
            id: Id of the run to continue, empty for a new run.
        """

    def write(self, values: Values) -> None:
        """Write the numbers and texts of a step to the tracker."""
        texts = {f"lineage/{owner}": text for owner, text in values.texts.items()}
        self.run.log({**values.by_name(), **texts}, step=values.step)

    def read(self, entry: Entry) -> None:
        """Write an entry of the log, if it has values for trackers."""
        values = values_of(entry)
        if values is not None:
            self.write(values)

    def flush(self) -> bool:
        """Return whether the written values survive a kill of this process.

        The result is False for packages that write in another thread or process. The cursor is then
        saved only when the reader is closed, and after a kill the values are written again.
        """
        return False

    def close(self) -> None:
        """Write the remaining values and end the run."""
        self.run.finish()


def open_tracker(config: TrackerConfig, run: Path | None, settings: object, id: str) -> Reader:
    """Construct the reader that writes a run to the tracker in `config`.

    `run` is the run folder, None for training without one. `settings` are those of the run. `id` is
    that of the run in the tracker, empty for a new run.
    """
    check_trackers([config])
    writer: type[TrackerReader] = import_module(f"{__package__}.{config.kind}").Writer
    # Without a run folder, the name is the time, so that two runs are not mixed.
    default_name = time.strftime("run-%Y%m%d-%H%M%S") if run is None else run.resolve().name
    name = config.name or default_name
    if config.folder is None and run is not None:
        folder = run.resolve() / TRACKERS / config.kind
        if not writer.makes_links:  # the contents of a run folder are not trusted
            plain.refuse_links(folder)
    else:
        folder = Path(config.folder or f"{TRACKERS}/{config.kind}").expanduser().resolve()
        folder = folder / name if writer.named_by_folder else folder
    for variable, value in writer.environment.items():
        os.environ.setdefault(variable, value)
    folder.mkdir(parents=True, exist_ok=True)
    updates = {"project": config.project or PROJECT, "name": name, "folder": str(folder)}
    return writer(config.model_copy(update=updates), flat_settings(settings), id)


def flat_settings(settings: object) -> Settings:
    """Return the settings of a run for trackers, path -> value; {} if `settings` is None.

    Few-shot rows are replaced by their number and digest, because a tracker may upload them.
    """
    dump = getattr(settings, "model_dump", None)
    by_path: Settings = {}
    values = cast("dict[str, Any]", dump(mode="json")) if callable(dump) else {}
    for path, value in flat(without_rows(values)):
        if isinstance(value, list):
            by_path[path] = ", ".join(map(str, cast("list[object]", value)))
        elif value != {}:
            by_path[path] = value if value is None or isinstance(value, int | float) else str(value)
    return by_path


def of_agent(agent: int) -> str:
    """Return the name of an agent in trackers and folders: "agent-03"."""
    return f"agent-{agent:02d}"


@dataclass(frozen=True)
class Values:
    """The values that a tracker writes at one step.

    Attributes:
        step: Number of GRPO steps of the run up to this one, >= 1.
        values: Finite numbers by owner ("agent-03" or "population") and name of the metric.
        texts: By owner, sentences about the life of an agent or the decisions of a round.
    """

    step: int
    values: Mapping[str, Mapping[str, float]]
    texts: Mapping[str, str] = field(default_factory=dict[str, str])

    def by_name(self) -> dict[str, float]:
        """Return the values by name: "reward/agent-03" for an agent, "round" for the population.

        Trackers show names that are equal up to the slash in one group of charts.
        """
        return {
            name if owner == POPULATION else f"{name}/{owner}": value
            for owner, values in self.values.items()
            for name, value in values.items()
        }


def values_of(entry: Entry) -> Values | None:
    """Return the values that trackers write for a log entry; None if there are none."""
    texts: Mapping[str, str] = {}
    match entry:
        case StepDone():
            table = {of_agent(slot): metrics for slot, metrics in entry.agents.items()}
        case RoundDone():
            # The hyperparameters that mutate, without those that a request set after this round.
            names = columns.hyperparameters([replace(entry.record, steering=())])
            table, texts = _of_round(entry.record, names), _texts(entry.record, names)
        case RunFinished():
            tested = {f"test/{which}": entry.summary.get(which) for which in ("best", "base")}
            table = {POPULATION: {n: score.get("mean") for n, score in tested.items() if score}}
        case _:
            return None
    return Values(entry.number, {owner: finite(metrics) for owner, metrics in table.items()}, texts)


def _of_round(record: RoundRecord, names: Sequence[str]) -> dict[str, dict[str, float | None]]:
    # Rewards of training are logged by step: they are no fitness.
    evaluated = [agent for agent in record.agents if columns.was_evaluated(agent)]
    fitness = [f for agent in evaluated if math.isfinite(f := columns.fitness(agent))]
    population: dict[str, float | None] = {
        "round": record.round + 1,
        "agents": len(record.agents),
        "tokens/training": sum(agent.tokens for agent in record.agents),
        "tokens/evaluation": record.evaluation_tokens,
        **{f"{SECONDS}{phase}": spent for phase, spent in record.seconds.items()},
        "fitness/best": max(fitness, default=None),
        "fitness/mean": sum(fitness) / len(fitness) if fitness else None,
    }
    return {
        **{of_agent(a.agent): _of_agent(a, names) for a in record.agents},
        POPULATION: population,
    }


def _texts(record: RoundRecord, names: Sequence[str]) -> dict[str, str]:
    texts = {of_agent(agent.agent): life(agent, names) for agent in record.agents}
    if record.decisions:
        texts[POPULATION] = "\n\n".join(decision.sentence for decision in record.decisions)
    return texts


def life(agent: AgentRecord, names: Sequence[str]) -> str:
    """Return a sentence on an agent: its member, parent, changes, and non-numeric values.

    The values are those of the searched hyperparameters `names`, such as a prompt or a loss.
    """
    text = f"member {agent.member}"
    if agent.parent is not None:
        text += f", from member {agent.parent} ({agent.mutation.op})"
    if changes := wording.changes_text(agent.mutation.changes):
        text += f": {changes}"
    values = columns.values(agent.hparams, names).items()
    chosen = [f"{name} {value}" for name, value in values if isinstance(value, str)]
    return f"{text}; {', '.join(chosen)}" if chosen else text


def finite(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the finite values, under names that every tracker accepts."""
    return {
        _UNSUITABLE.sub("_", name): float(value)
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    }


def _of_agent(agent: AgentRecord, names: Sequence[str]) -> dict[str, float | None]:
    further = () if agent.score is None else agent.score.further
    rewards = () if agent.score is None or len(agent.score.rewards) < 2 else agent.score.rewards
    evaluated = columns.was_evaluated(agent)
    return {
        "fitness": columns.fitness(agent) if evaluated else None,
        "fitness_se": columns.fitness_se(agent) if evaluated else None,
        **{columns.objective(objective.name): objective.mean for objective in further},
        **{f"{columns.objective(objective.name)}_se": objective.se for objective in further},
        **{f"{VALIDATION}{reward.name}": reward.mean for reward in rewards},
        "member": agent.member,
        "parent": agent.parent,
        "dead_steps": agent.metrics.get("dead_steps"),
        "rank_error": agent.metrics.get("rank_error"),
        **{
            f"{HYPERPARAMETER}{name}": value
            for name, value in columns.values(agent.hparams, names).items()
            if not isinstance(value, str)  # a tracker draws numbers
        },
    }


WAITING = 256
"""Greatest number of queued entries; while the queue is full, new entries are dropped."""
SECONDS_TO_FINISH = 60.0
"""How long the end of training waits for the tracker."""
SECONDS_TO_STOP = 4.0
"""How long interrupted training waits for the tracker."""


class Tracker(observer.Observer):
    """An observer that writes training to a tracker, in a thread of this process.

    A run with a folder does not need a `Tracker`: the trackers in `record.trackers` read the log of
    the run in another process. A tracker that fails is dropped, and a tracker that is too slow
    misses entries; both cause a warning.

    For example:

        with Tracker("tensorboard", folder="boards") as tracker:
            population.train("sums", observer=tracker)

    Args:
        kind: A kind of `record.trackers`, such as "tensorboard"; or an object with the methods of
            `accelerate.tracking.GeneralTracker`.
        **options: Options of `record.trackers`: project, name, folder, online, server. The default
            folder is in the run folder, or in the current folder if there is no run folder.

    Raises:
        ConfigError: The kind or an option is unknown, or the object is not a tracker.
        EngineUnavailable: The package of the tracker is not installed.
    """

    def __init__(self, kind: Any, **options: Any) -> None:  # noqa: ANN401 -- a name, or an object
        self._make: Callable[[Path | None, object], Reader]
        if isinstance(kind, str):
            config = TrackerConfig(kind=kind, **options)
            check_trackers([config])
            self.kind = kind
            self._make = lambda run, settings: open_tracker(config, run, settings, "")
        else:
            _check_object(kind, options)
            self.kind = str(getattr(kind, "name", type(kind).__name__))
            self._make = lambda run, settings: _AccelerateReader(kind, settings)
        self._steps_per_round: int | None = None
        self._steps = 0
        self._writing: _Writing | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the tracker; after an error, wait for `SECONDS_TO_STOP` only."""
        self.close(stopped=error is not None)

    def started(
        self, run_dir: Path | None, rounds: int, first_round: int, settings: object
    ) -> None:
        """Start a thread that writes to the tracker; see `Observer`."""
        if run_dir is None and first_round > 0 and self._writing is not None:
            return  # another call of `train` of the same population
        self.close()
        steps = getattr(getattr(settings, "population", None), "steps_per_round", None)
        self._steps_per_round = steps
        self._steps = first_round * (steps or 0)
        self._writing = _Writing(self.kind, lambda: self._make(run_dir, settings))

    def step_done(self, round: int, step: int, metrics: Mapping[Slot, Mapping[str, float]]) -> None:
        """Queue the metrics of a step; see `Observer`."""
        per_round = self._steps_per_round
        self._steps = self._steps + 1 if per_round is None else round * per_round + step + 1
        self._put(StepDone(round, step, self._steps, metrics))

    def round_done(self, record: RoundRecord) -> None:
        """Queue the record of a round; see `Observer`."""
        self._put(RoundDone(self._steps, record))

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Queue the summary and close the tracker; see `Observer`."""
        self._put(RunFinished(self._steps, summary))
        self.close()

    def close(self, *, stopped: bool = False) -> None:
        """Write the queued entries and close the tracker; give up after a limit on the time.

        The limit is `SECONDS_TO_STOP` if training was `stopped`, else `SECONDS_TO_FINISH`.
        """
        if self._writing is not None:
            self._writing.end(SECONDS_TO_STOP if stopped else SECONDS_TO_FINISH)
            self._writing = None

    def _put(self, entry: Entry) -> None:
        if self._writing is not None and not self._writing.put(entry):
            self.close()


@final
class _Writing:
    """A thread that writes entries to a tracker, so that training does not wait for it.

    `kind` is the tracker's name in warnings; the thread calls `make` to construct the reader.
    """

    def __init__(self, kind: str, make: Callable[[], Reader]) -> None:
        self._kind = kind
        self._make = make
        self._entries: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._failed = ""
        self._missed = 0
        # A daemon thread: the process can end although a tracker hangs.
        self._thread = threading.Thread(target=self._write, name=f"tracker-{kind}", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> bool:
        """Queue an entry without waiting; return False if the tracker has failed."""
        if self._entries.qsize() < WAITING:
            self._entries.put(entry)
        else:
            self._missed += 1
        return not self._failed

    def end(self, seconds: float) -> None:
        """Wait up to `seconds` for the thread; warn if the tracker failed or missed entries."""
        self._entries.put(None)
        self._thread.join(seconds)
        reason = self._failed
        if not reason and self._thread.is_alive():
            reason = f"it has not written all entries within {seconds:g} s"
        if not reason and self._missed:
            reason = f"it was too slow and missed {self._missed} entries"
        if reason:
            warnings.warn(
                f"tracker {self._kind}: {reason}; training continues without it",
                UserWarning,
                stacklevel=4,
            )

    def _write(self) -> None:
        try:
            reader = self._make()
            while (entry := self._entries.get()) is not None:
                reader.read(entry)
            reader.close()
        except BaseException as error:  # any error of a tracker: training continues without it
            self._failed = error_text(error)


@final
class _AccelerateReader(TrackerReader):
    """Writes entries to an `accelerate.tracking.GeneralTracker`, or to an object like it."""

    def __init__(self, tracker: Any, settings: object) -> None:  # noqa: ANN401 -- by its methods
        self.run = tracker
        super().__init__(TrackerConfig.model_construct(), flat_settings(settings), "")

    def open(self, target: TrackerConfig, settings: Settings, id: str) -> str:
        if callable(start := getattr(self.run, "start", None)):
            start()
        self.run.store_init_configuration(settings)
        return ""

    def write(self, values: Values) -> None:
        """Log the numbers of a step, without texts."""
        if row := values.by_name():
            self.run.log(row, step=values.step)


def _check_object(tracker: Any, options: Mapping[str, Any]) -> None:  # noqa: ANN401 -- any object
    methods = ("store_init_configuration", "log", "finish")
    missing = [name for name in methods if not callable(getattr(tracker, name, None))]
    if missing or options:
        without = f"without {', '.join(missing)}" if missing else f"beside {', '.join(options)}"
        raise ConfigError(
            f"tracker: expected {', '.join(map(repr, KINDS))}, or an object like "
            "accelerate.tracking.GeneralTracker and no options, got "
            f"{shown(tracker)} {without}"
        )

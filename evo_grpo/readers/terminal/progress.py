"""Keeps the progress of a run, and prints it as plain lines where nothing can be redrawn."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, final

from rich.console import Console

from evo_grpo.readers.terminal.console import say
from evo_grpo.readers.terminal.result import ALWAYS_SHOWN, show_ending, show_next
from evo_grpo.record import columns, family, observer, view, wording
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.schema.hparams import Value
from evo_grpo.schema.problems import short_name
from evo_grpo.settings import PopulationConfig, RunConfig
from evo_grpo.types import Slot

RECENT = 3
"""Number of latest rounds from whose mean time the next round is estimated."""
BESIDE_LEARNING = 1.2
"""Estimated time of the first round, as a multiple of the time of its training steps."""
SECONDS_BETWEEN_LINES = 30.0
"""Seconds between the lines of a long round, which show in a log that the run is alive."""


@final
class Pace:
    """Estimates the time until the end of a run, without its test, from the reported progress.

    Args:
        clock: Function that returns the time in seconds.
        whole: Whether the stage "learn" is the whole run with its test, as in a replay, and not the
            training steps of one round.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, whole: bool = False) -> None:
        self.clock, self.whole = clock, whole
        self.start(0, 0)

    def start(self, rounds: int, first_round: int) -> None:
        """Begin to estimate at the start of a run, or at round `first_round` (from 0) of it."""
        self.rounds, self.done = (1, 0) if self.whole else (rounds, first_round)
        self.tokens_per_second: float | None = None
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._began = self.clock()
        self._first: float | None = None  # estimated seconds of the first round
        self._tokens = 0.0

    def stage(self, name: str, done: int, total: int) -> None:
        """Update the estimate of the first round, if the stage is "learn"."""
        if name == "learn" and done:
            spent = self.clock() - self._began
            self._first = spent * total / done * (1 if self.whole else BESIDE_LEARNING)

    def step_done(self, metrics: Mapping[Slot, Mapping[str, float]]) -> None:
        """Count the tokens in the `metrics` of a step, and in the first round set the speed."""
        spent = self.clock() - self._began
        self._tokens += sum(agent_metrics.get("tokens", 0.0) for agent_metrics in metrics.values())
        if not self._durations and spent > 0:
            self.tokens_per_second = self._tokens / spent

    def round_done(self, record: RoundRecord) -> None:
        """Add the time of a finished round to the estimate, and set the speed to that round's."""
        now = self.clock()
        self._durations.append(now - self._began)
        self._began, self.done = now, record.round + 1
        tokens = sum(agent.tokens for agent in record.agents) + record.evaluation_tokens
        seconds = sum(record.seconds.values())
        self.tokens_per_second = tokens / seconds if seconds else None

    def left(self) -> float | None:
        """Return the estimated remaining seconds; None before there is an estimate."""
        durations = self._durations
        estimate = sum(durations) / len(durations) if durations else self._first
        if self.done >= self.rounds or estimate is None:
            return None if estimate is None else 0.0
        # A round that takes longer than estimated adds nothing.
        spent = self.clock() - self._began
        return max(estimate - spent, 0.0) + estimate * (self.rounds - self.done - 1)


class RunProgress(observer.Observer):
    """Keeps the progress of a run for messages about errors; subclasses also show the progress.

    The object is a context manager. If `started` gets a RunConfig, that RunConfig replaces `title`
    and `hyperparameters`.

    Args:
        console: Where notes and the result of the run are shown; None shows nothing.
        title: The first line: the model, the task and the size of the run.
        hyperparameters: Hyperparameters to show, in addition to `ALWAYS_SHOWN`.
        limited: Whether a round may end before all its steps.
        pace: The estimate of the remaining time; None takes a new one.

    Attributes:
        run_dir: The run folder, None before the run has one.
        rounds_done: Finished rounds, including those before a resume.
        began: Whether the run began, so that it can be resumed.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        title: str = "",
        hyperparameters: Sequence[str] = (),
        limited: bool = False,
        pace: Pace | None = None,
    ) -> None:
        self.console = Console(quiet=True) if console is None else console
        self.title = title
        self.names = shown_names(hyperparameters)
        self.limited = limited
        self.pace = Pace() if pace is None else pace
        self.run_dir: Path | None = None
        self.rounds = 0
        self.rounds_done = 0
        self.began = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the terminal, even after an error."""
        self.close()

    def loading(self, what: str) -> None:
        """Show that `what`, the name of a model or a run, is being loaded."""
        self.note(f"loading {what} …")

    def started(
        self, run_dir: Path | None, rounds: int, first_round: int, settings: object
    ) -> None:
        """Keep the folder and the numbers of rounds, and show the first line; see `Observer`."""
        self.run_dir, self.rounds, self.rounds_done = run_dir, rounds, first_round
        self.began = True
        title = self.title
        if isinstance(settings, RunConfig):
            model_on_task = f"{settings.model.name} on {settings.env.kind}"
            title = f"{model_on_task}, {_size_of(settings.population, limited=self.limited)}"
            self.names = shown_names(settings.search_space().names())
        heading = title if run_dir is None else f"{run_dir}: {title}"
        if first_round:
            heading += f", going on after round {first_round}"
        self.pace.start(rounds, first_round)
        self.begin(heading)

    def begin(self, heading: str) -> None:
        """Show the first line of a run; does nothing in this base class."""

    def stage(self, round: int, name: str, done: int, total: int) -> None:
        """Update the estimated time; see `Observer`."""
        self.pace.stage(name, done, total)

    def step_done(self, round: int, step: int, metrics: Mapping[Slot, Mapping[str, float]]) -> None:
        """Update the speed; see `Observer`."""
        self.pace.step_done(metrics)

    def round_done(self, record: RoundRecord) -> None:
        """Count a finished round; see `Observer`."""
        self.rounds_done = record.round + 1
        self.pace.round_done(record)

    def note(self, text: str) -> None:
        """Print a sentence; see `Observer`."""
        say(self.console, text, wrap=True)

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Stop drawing; see `Observer`."""
        self.close()

    def close(self) -> None:
        """Stop drawing and restore the terminal; does nothing here, nor at a second call."""

    def show_ending(self, run: view.RunView) -> None:
        """Show the leaderboard and the story of a run, if it has finished rounds."""
        self.close()
        if run.rounds and not self.console.quiet:
            show_ending(self.console, run)
            if self.run_dir is not None:
                show_next(self.console, str(self.run_dir), worse=bool(run.loss))

    def how_to_resume(self) -> str:
        """Return a line on when an interrupted run stopped, with the command that continues it."""
        if self.run_dir is None:
            return "stopped before the run began"
        if not self.began:
            return f"stopped before the run went on; continue with: evo-grpo resume {self.run_dir}"
        rounds = self.rounds_done
        when = f"after round {rounds}" if rounds else "before the first round was finished"
        return f"stopped {when}; continue with: evo-grpo resume {self.run_dir}"


@final
class PlainLines(RunProgress):
    """Prints a block of lines after every round, and single lines during a long round."""

    last_line = -math.inf
    """Time at which the last line was printed, by `time.monotonic`."""

    def begin(self, heading: str) -> None:
        """Print the heading."""
        self._line(heading)

    def stage(self, round: int, name: str, done: int, total: int) -> None:
        """Print a line if the last line is older than `SECONDS_BETWEEN_LINES`."""
        super().stage(round, name, done, total)
        if time.monotonic() - self.last_line >= SECONDS_BETWEEN_LINES:
            self._line(f"  round {round + 1}/{self.rounds}: {name} {done}/{total}{self._pace()}")

    def round_done(self, record: RoundRecord) -> None:
        """Print the round, its agents, the decisions about them, and the mutations."""
        super().round_done(record)
        self._line(round_line(record, self.rounds) + self._pace())
        for agent in record.agents:
            self._line("  " + self._agent(agent))
        for decision in record.decisions:
            self._line(f"  {decision.sentence}")
        if changes := evolution(record):
            self._line("  " + "  ".join(f"{name} {text}" for name, text in changes.items()))

    def _pace(self) -> str:
        """Return the speed and the estimated remaining time as text, if known."""
        speed, left = self.pace.tokens_per_second, self.pace.left()
        text = "" if speed is None else f"  {speed:,.0f} tok/s"
        return f"{text}  ETA {clock(left)}" if left else text

    def _agent(self, agent: AgentRecord) -> str:
        score = agent.score
        metrics = agent.metrics
        if score is not None and score.steps:  # a reward of training, no fitness
            fitness = "-"
        else:
            fitness = (
                "failed"
                if score is None
                else f"{wording.number(score.mean)} ± {wording.number(score.se)}"
            )
        goals = () if score is None else score.further
        parts = [
            f"agent {agent.agent:<2} fitness {fitness:<13}",
            *(
                f"{goal.name} {wording.number(goal.mean)} ± {wording.number(goal.se)}"
                for goal in goals
            ),
            f"reward {wording.number(metrics.get('reward'))}",
            f"kl {wording.number(metrics.get('kl'), 4)}",
            f"zero-var {wording.number(metrics.get('zero_variance'), 2)}",
        ]
        for name in self.names:
            change = direction(agent.mutation.changes, name)
            parts.append(
                f"{short_name(name)} {wording.hyperparameter(agent.hparams, name)}"
                + (f" ({change})" if change else "")
            )
        if agent.reason:
            parts.append(agent.reason)
        return "  ".join(parts)

    def _line(self, text: str) -> None:
        say(self.console, text, wrap=True)
        self.last_line = time.monotonic()


def shown_names(hyperparameters: Iterable[str]) -> list[str]:
    """Return the hyperparameters to show: `ALWAYS_SHOWN`, then the rest of `hyperparameters`."""
    return wording.combined((*ALWAYS_SHOWN, *hyperparameters))


def direction(changes: Mapping[str, tuple[Value, Value]], name: str) -> str:
    """Return "up" or "down" if a mutation changed the number `name`, else ""."""
    ends = ("clip_coef", "clip_low", "clip_high") if name == "clip_coef" else (name,)
    for end in ends:
        if end in changes:
            old, new = changes[end]
            if not isinstance(old, str) and not isinstance(new, str):
                return "up" if new > old else "down"
    return ""


def clock(seconds: float) -> str:
    """Return seconds as hours, minutes and seconds: 0:01:05, and 27:00:00 for more than a day."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def round_line(record: RoundRecord, rounds: int) -> str:
    """Return the result of a round in one line; `rounds` is the number of rounds of the run."""
    best = family.best_agent(record)
    means = [mean for agent in record.agents if math.isfinite(mean := columns.fitness(agent))]
    tokens = sum(agent.tokens for agent in record.agents)
    parts = [f"round {record.round + 1}/{rounds}"]
    if best is not None and best.score is not None:
        score = wording.with_error(best.score.mean, best.score.se, 3)
        label = "best reward" if best.score.steps else "best"
        parts.append(f"{label} {score} (agent {best.agent})")
        parts.append(f"mean {wording.number(sum(means) / len(means))}")
    parts += [f"{tokens:,} tokens", f"{sum(record.seconds.values()):.1f} s"]
    dropped = sum(agent.metrics.get("dropped", 0.0) for agent in record.agents)
    if dropped:
        parts.append(f"dropped {int(dropped)} episodes")
    set_aside = sum(agent.metrics.get("set_aside", 0.0) for agent in record.agents)
    if set_aside:
        parts.append(f"set aside {wording.count(int(set_aside), 'group')}")
    failed = [str(agent.agent) for agent in record.agents if agent.state != "ok"]
    if failed:
        parts.append(f"failed: agent {', '.join(failed)}")
    return "  ".join(parts)


def evolution(record: RoundRecord, arrow: str = " -> ") -> dict[str, str]:
    """Return the copies and mutations after a round that its decisions do not state, as text.

    The value of "copied" is "0 -> 1, ...", with agents. The value of "mutated" is
    "1: clip 0.2 -> 0.16; ...", with an agent before the colon; lr is left out for an agent that
    was copied or restored by a decision, which states it. A key without changes is missing.
    """
    slots = {agent.member: agent.agent for agent in record.agents}
    decided = {d.agent for d in record.decisions if d.kind in ("copied", "restored")}
    copies: list[str] = []
    mutations: list[str] = []
    for member in record.members:
        if member.id in slots or member.mutation.op.startswith("steer-"):
            continue  # it is unchanged, or steered, which is a decision
        source = slots.get(member.parent) if member.parent is not None else None
        if source is not None and source != member.agent and member.agent not in decided:
            copies.append(f"{source}{arrow}{member.agent}")
        changes = dict(member.mutation.changes)
        if member.agent in decided:
            changes.pop("lr", None)
        if changes:
            mutations.append(f"{member.agent}: {wording.changes_text(changes, arrow)}")
    changes_by_kind = {"copied": ", ".join(copies), "mutated": "; ".join(mutations)}
    return {name: details for name, details in changes_by_kind.items() if details}


def _size_of(population: PopulationConfig, *, limited: bool) -> str:
    """Return the size of a run; `limited` says whether a round may end before all its steps."""
    bound = "at most " if limited else ""
    return (
        f"{wording.count(population.size, 'agent')}, {wording.count(population.rounds, 'round')} "
        f"of {bound}{wording.count(population.steps_per_round, 'step')}"
    )

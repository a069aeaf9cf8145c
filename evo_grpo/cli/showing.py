"""Shows a run while it trains and at its end: as text to a person, or as events to a program.

`--json` writes one event per line of standard output, as JSON. Rounds are 0-based, as in
rounds.jsonl. docs/command_line.md lists the keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import typer

from evo_grpo.cli.host_memory import keep_freed_memory
from evo_grpo.cli.output import say, warn, write
from evo_grpo.cli.stopping import interruptible
from evo_grpo.errors import EvoGrpoError
from evo_grpo.escaping import printable
from evo_grpo.population.ranks.team import is_silent_rank
from evo_grpo.record.names import REPORT
from evo_grpo.record.observer import Observer, ObserverList

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.console import Console

    from evo_grpo.readers.terminal.progress import RunProgress
    from evo_grpo.record.records import AgentRecord, RoundRecord
    from evo_grpo.record.view import RunView

METRICS = ("reward", "zero_variance", "loss", "entropy")
"""Metrics of each agent in the event of a round, besides the KL; rounds.jsonl has all metrics."""


@final
class Events(Observer):
    """Writes the progress of a run as lines of JSON.

    If `ends` is true, `finished` writes the event that ends the run. Otherwise the caller must call
    `ended`, whose event also has the story and the warnings.
    """

    def __init__(self, *, ends: bool = False) -> None:
        self.ends = ends
        self.run: str | None = None
        self.rounds = 0

    def started(
        self, run_dir: Path | None, rounds: int, first_round: int, settings: object
    ) -> None:
        """See `Observer`."""
        del settings  # population.yaml of the run folder has them
        self.run = None if run_dir is None else str(run_dir)
        self.rounds = rounds
        self.write("started", rounds=rounds, first_round=first_round)

    def stage(self, round: int, name: str, done: int, total: int) -> None:
        """See `Observer`."""
        self.write("stage", round=round, name=name, done=done, total=total)

    def round_done(self, record: RoundRecord) -> None:
        """See `Observer`."""
        tokens = sum(agent.tokens for agent in record.agents)
        self.write(
            "round",
            round=record.round,
            rounds=self.rounds,
            between=record.between,
            agents=[_agent(agent) for agent in record.agents],
            tokens=tokens,
            evaluation_tokens=record.evaluation_tokens,
            seconds=sum(record.seconds.values()),
            decisions=[
                {"kind": decision.kind, "agent": decision.agent, "sentence": decision.sentence}
                for decision in record.decisions
            ],
        )

    def finished(self, summary: Mapping[str, Any]) -> None:
        """See `Observer`."""
        if self.ends:
            self.write("finished", summary=summary)

    def ended(self, run: Path, view: RunView) -> None:
        """Write the end of the run, with its story and its warnings."""
        self.run = str(run)
        self.write(
            "finished",
            summary=view.summary,
            story=[asdict(sentence) for sentence in view.story],
            warnings=[
                {
                    "kind": trouble.kind,
                    "text": trouble.text,
                    "remedy": trouble.remedy,
                    "round": trouble.round,
                }
                for trouble in view.troubles
            ],
        )

    @contextmanager
    def errors(self) -> Generator[None]:
        """Write an exception of the body as an event, and raise it again."""
        try:
            yield
        except Exception as error:
            code = error.exit_code if isinstance(error, EvoGrpoError) else 1
            notes = list(getattr(error, "__notes__", []))
            text = "\n".join([str(error) or type(error).__name__, *notes])
            self.write("error", type=type(error).__name__, text=text, code=code)
            raise

    def write(self, event: str, **values: Any) -> None:
        """Write one event with its keys."""
        from evo_grpo.record.files import to_line

        if not is_silent_rank():  # the first rank writes for all
            line = {"event": event, "run": self.run, **values}
            # ASCII, so that text of a model or a file cannot control a terminal.
            write(to_line(line, ensure_ascii=True) + "\n")


def _agent(agent: AgentRecord) -> dict[str, Any]:
    score = agent.score
    return {
        "agent": agent.agent,
        "member": agent.member,
        "parent": agent.parent,
        "state": agent.state,
        "fitness": None if score is None else score.mean,
        "fitness_se": None if score is None else score.se,
        "tokens": agent.tokens,
        "hparams": agent.hparams.to_dict(),
        **{name: agent.metrics.get(name) for name in METRICS},
        "kl": agent.metrics.get("kl"),
    }


@final
class RunOutput:
    """The output of a run: text for a person, events for a program, or only errors.

    `quiet` prints only errors, and the run folder as the last line; `as_json` prints one event per
    line. Both together raise typer.BadParameter.
    """

    def __init__(self, *, quiet: bool = False, as_json: bool = False) -> None:
        from evo_grpo.readers.terminal.console import standard_output

        if quiet and as_json:
            raise typer.BadParameter("expected one of --quiet and --json, got both")
        self.quiet = quiet
        self.events = Events() if as_json else None
        self.person = not (quiet or as_json or is_silent_rank())
        self.console: Console = standard_output()
        if not self.person:
            # Download progress bars are shown only to a person.
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    def errors(self) -> AbstractContextManager[None]:
        """Return a context that writes an error of its body as an event, if events are written."""
        return nullcontext() if self.events is None else self.events.errors()

    def warn(self, text: str) -> None:
        """Write a warning; with several ranks, only the first writes."""
        if self.events is not None:
            self.events.write("warning", text=text)
        elif self.person:
            warn(text)

    def progress(self, *, arm: bool = False) -> RunProgress:
        """Return the display of a run's progress; with `arm`, of a population of a comparison."""
        from evo_grpo.readers.terminal.live import progress_on
        from evo_grpo.readers.terminal.progress import RunProgress

        return progress_on(self.console, limited=arm) if self.person else RunProgress()

    def observer(self, progress: RunProgress, *, arm: bool = False) -> Observer:
        """Return an observer that updates `progress` and writes the events of a run or an `arm`."""
        events = Observer() if self.events is None else Events(ends=True) if arm else self.events
        return ObserverList((progress, events))

    def loading(self, progress: RunProgress, what: str) -> None:
        """Show, as the first line, the name `what` of the model or run that is being loaded."""
        progress.loading(what)
        if self.events is not None:
            self.events.write("loading", what=what)

    def stopped(self, text: str) -> None:
        """Write the event that the run has stopped; the caller prints the message for a person."""
        if self.events is not None:
            self.events.write("stopped", text=text)


def show_run(
    play: Callable[[RunProgress], Path],
    audience: RunOutput,
    *,
    loading: str,
    compare: bool,
    folder: Path | None = None,
    allow: Sequence[str] = (),
    report: bool = False,
) -> None:
    """Show a run while it trains, then its result, or how to resume it after an interruption.

    `play` trains the run by `training.run`, which is imported before the call. `loading` is the
    name of the model or run folder, shown first. With `compare`, populations without evolution are
    trained afterwards; `report` adds the comparison to the HTML report. `folder` is the run folder
    of a resumed run; the user's files that `allow` names may have changed since the run began.
    """
    from evo_grpo.readers.terminal.console import WorkLines, warnings_to

    option = " --compare" if compare else ""
    progress = audience.progress()
    progress.run_dir = folder

    def stopped() -> str:
        if is_silent_rank():
            return f"rank {os.environ['RANK']} stopped"
        how = progress.how_to_resume()
        return printable(how if progress.run_dir is None else how + option)

    audience.loading(progress, loading)
    working = WorkLines(audience.console) if audience.person else nullcontext()
    with interruptible(stopped) as begin, progress, working, warnings_to(audience.warn):
        import_module("evo_grpo.training.run")  # takes seconds; a signal still ends it at once
        keep_freed_memory()
        begin()
        try:
            finished = play(progress)
        except Exception as error:  # strategies of the user may raise anything
            if progress.began:
                error.add_note(
                    f"fix the cause, then continue with: evo-grpo resume {progress.run_dir}{option}"
                )
            raise
        except KeyboardInterrupt:
            audience.stopped(stopped())
            raise
    if is_silent_rank():
        return
    from evo_grpo.record.summary import read_summary

    if read_summary(finished) is None:  # stopped by `steer stop-after-round`
        audience.stopped(stopped())
        if audience.person:
            say(stopped())
        return
    _show_end(audience, finished, compare=compare, allow=allow, report=report)


def _show_end(
    audience: RunOutput, finished: Path, *, compare: bool, allow: Sequence[str], report: bool
) -> None:
    """Show the result of a finished run, its folder, and the next commands."""
    from evo_grpo.readers.follow import study_of
    from evo_grpo.readers.terminal.result import show_ending, show_next
    from evo_grpo.record.view import view_of

    view = view_of(finished)
    if audience.events is not None:
        audience.events.ended(finished, view)
    elif audience.person:
        show_ending(audience.console, view)
    if compare:
        _compare(audience, finished, allow)
        if report:
            from evo_grpo.readers.report.run_page import write_report

            write_report(finished)
    if report and audience.person:
        say(f"report: {finished / REPORT}")
    if audience.quiet:
        say(str(finished))
    if audience.person:
        show_next(audience.console, str(finished), study_of(finished), worse=bool(view.loss))


def _compare(audience: RunOutput, folder: Path, allow: Sequence[str]) -> None:
    """Train the populations that a finished run is compared with, then show all results as bars."""
    from evo_grpo.readers.terminal.console import say as say_to
    from evo_grpo.readers.terminal.console import warnings_to
    from evo_grpo.readers.terminal.result import show_arms
    from evo_grpo.record.arms import comparison_arms
    from evo_grpo.record.names import COMPARISON
    from evo_grpo.record.story import guess_sentence

    remedy = f"continue with: evo-grpo resume {folder} --compare"
    stopped = printable(f"stopped in the comparison; {remedy}")
    if audience.person:
        say("")
        say("the same population without evolution, at equal tokens:")
    with interruptible(lambda: stopped) as begin:
        from evo_grpo.analysis.arms import compare

        begin()
        with audience.progress(arm=True) as progress, warnings_to(audience.warn):
            try:
                result = compare(
                    folder, allow=allow, observer=audience.observer(progress, arm=True)
                )
            except (EvoGrpoError, OSError) as error:
                error.add_note(f"fix the cause, then {remedy}")
                raise
            except KeyboardInterrupt:
                audience.stopped(stopped)
                raise
    if audience.events is not None:
        audience.events.write("comparison", **result)
    if audience.person:
        show_arms(audience.console, comparison_arms(result))
        say_to(audience.console, guess_sentence(result), "bold", wrap=True)
        say_to(audience.console, f"comparison: {folder / COMPARISON}")

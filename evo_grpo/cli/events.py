"""`--json`: a run as events for a program, one JSON object per line of standard output.

Rounds are 0-based, as in rounds.jsonl. docs/command_line.md lists the keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

from evo_grpo.cli.launching import follows
from evo_grpo.cli.output import write
from evo_grpo.errors import EvoGrpoError
from evo_grpo.record.observer import Observer

if TYPE_CHECKING:
    from evo_grpo.record.records import AgentRecord, RoundRecord
    from evo_grpo.record.story import Sentence
    from evo_grpo.record.trouble import Trouble

METRICS = ("reward", "kl", "zero_variance", "loss", "entropy")
"""Training means that an event tells of an agent; rounds.jsonl has all of them."""


@final
class Events(Observer):
    """Writes what a run reports as lines of JSON.

    Args:
        ends: Write `finished` when the run reports its end; else the caller writes it, with what a
            program is told beside it.
    """

    def __init__(self, *, ends: bool = False) -> None:
        self.ends = ends
        self.run: str | None = None
        self.rounds = 0

    def loading(self, what: str) -> None:
        """Tell what is being loaded, before anything takes time."""
        self._tell("loading", what=what)

    def started(
        self, run_dir: Path | None, rounds: int, first_round: int, settings: object
    ) -> None:
        """See `Observer`."""
        del settings  # population.yaml of the run folder has them
        self.run = None if run_dir is None else str(run_dir)
        self.rounds = rounds
        self._tell("started", rounds=rounds, first_round=first_round)

    def stage(self, round: int, name: str, done: int, total: int) -> None:
        """See `Observer`."""
        self._tell("stage", round=round, name=name, done=done, total=total)

    def round_done(self, record: RoundRecord) -> None:
        """See `Observer`."""
        tokens = sum(agent.tokens for agent in record.agents)
        self._tell(
            "round",
            round=record.round,
            rounds=self.rounds,
            agents=[_agent(agent) for agent in record.agents],
            tokens=tokens,
            evaluation_tokens=record.evaluation_tokens,
            seconds=sum(record.seconds.values()),
            decisions=[
                {"kind": one.kind, "agent": one.agent, "sentence": one.sentence}
                for one in record.decisions
            ],
        )

    def finished(self, summary: Mapping[str, Any]) -> None:
        """See `Observer`."""
        if self.ends:
            self._tell("finished", summary=summary)

    def ended(
        self,
        run: Path,
        summary: Mapping[str, Any] | None,
        story: Sequence[Sentence],
        troubles: Sequence[Trouble],
    ) -> None:
        """Tell the end of the run, and its story."""
        self.run = str(run)
        self._tell(
            "finished",
            summary=summary,
            story=[{"kind": one.kind, "text": one.text} for one in story],
            warnings=[
                {"kind": one.kind, "text": one.text, "remedy": one.remedy, "round": one.round}
                for one in troubles
            ],
        )

    def comparison(self, result: Mapping[str, Any]) -> None:
        """Tell what a comparison found."""
        self._tell("comparison", **result)

    def warning(self, text: str) -> None:
        """Tell a warning."""
        self._tell("warning", text=text)

    def stopped(self, text: str) -> None:
        """Tell that a person stopped the run, and how to go on."""
        self._tell("stopped", text=text)

    @contextmanager
    def errors(self) -> Generator[None]:
        """Tell of an error on its way out."""
        try:
            yield
        except Exception as error:
            code = error.exit_code if isinstance(error, EvoGrpoError) else 1
            notes = list(getattr(error, "__notes__", []))
            text = "\n".join([str(error) or type(error).__name__, *notes])
            self._tell("error", type=type(error).__name__, text=text, code=code)
            raise

    def _tell(self, event: str, **values: Any) -> None:
        if not follows():  # the first rank tells for all
            line = {"event": event, "run": self.run, **values}
            write(json.dumps(_plain(line), allow_nan=False) + "\n")


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
    }


def _plain(value: object) -> object:
    """Return a value as JSON has it: None for what is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in cast("Sequence[object]", value)]
    return value

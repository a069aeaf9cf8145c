"""Implements `--json`: writes a run as events, one JSON object per line of standard output.

Rounds are 0-based, as in rounds.jsonl. docs/command_line.md lists the keys.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from evo_grpo.cli.output import write
from evo_grpo.errors import EvoGrpoError
from evo_grpo.population.ranks.team import is_silent_rank
from evo_grpo.record.files import to_line
from evo_grpo.record.observer import Observer

if TYPE_CHECKING:
    from evo_grpo.record.records import AgentRecord, RoundRecord
    from evo_grpo.record.view import RunView

METRICS = ("reward", "zero_variance", "loss", "entropy")
"""Training means in the event of a round, besides the KL; rounds.jsonl has all means."""


@final
class Events(Observer):
    """Writes the progress of a run as lines of JSON.

    With `ends`, `finished` writes the end of the run. Otherwise the caller must call `ended`, which
    adds the story and the warnings.
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
        """Write an error that is raised in the body."""
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

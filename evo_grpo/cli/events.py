"""`--json`: a run as events for a program, one JSON object per line of standard output.

Rounds are 0-based, as in rounds.jsonl. docs/command_line.md lists the keys.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from evo_grpo.cli.output import write
from evo_grpo.errors import EvoGrpoError
from evo_grpo.population.ranks.team import follows
from evo_grpo.record.files import to_line
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

    def started(
        self, run_dir: Path | None, rounds: int, first_round: int, settings: object
    ) -> None:
        """See `Observer`."""
        del settings  # population.yaml of the run folder has them
        self.run = None if run_dir is None else str(run_dir)
        self.rounds = rounds
        self.tell("started", rounds=rounds, first_round=first_round)

    def stage(self, round: int, name: str, done: int, total: int) -> None:
        """See `Observer`."""
        self.tell("stage", round=round, name=name, done=done, total=total)

    def round_done(self, record: RoundRecord) -> None:
        """See `Observer`."""
        tokens = sum(agent.tokens for agent in record.agents)
        self.tell(
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
            self.tell("finished", summary=summary)

    def ended(
        self,
        run: Path,
        summary: Mapping[str, Any] | None,
        story: Sequence[Sentence],
        troubles: Sequence[Trouble],
    ) -> None:
        """Tell the end of the run, and its story."""
        self.run = str(run)
        self.tell(
            "finished",
            summary=summary,
            story=[asdict(one) for one in story],
            warnings=[
                {"kind": one.kind, "text": one.text, "remedy": one.remedy, "round": one.round}
                for one in troubles
            ],
        )

    @contextmanager
    def errors(self) -> Generator[None]:
        """Tell of an error on its way out."""
        try:
            yield
        except Exception as error:
            code = error.exit_code if isinstance(error, EvoGrpoError) else 1
            notes = list(getattr(error, "__notes__", []))
            text = "\n".join([str(error) or type(error).__name__, *notes])
            self.tell("error", type=type(error).__name__, text=text, code=code)
            raise

    def tell(self, event: str, **values: Any) -> None:
        """Write one event with its keys."""
        if not follows():  # the first rank tells for all
            line = {"event": event, "run": self.run, **values}
            # In ASCII: what a model or a file says cannot command a terminal.
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
    }

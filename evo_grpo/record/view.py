"""One view of a run: the facts that every display of it shows, computed once from its log.

All displays (terminal, report, model card, notebook, dashboard, `--json`) render a `RunView` and
compute no facts, so that they show the same numbers under the same names. The winner of a run has
up to three scores, each from different samples:

- *fitness*: validation prompts, in the round after which the winner is taken
- *final*: validation prompts with new draws, in the final comparison with the other finalists
- *test*: test prompts, on which nothing was selected; this is **the** score of the winner
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

from evo_grpo.errors import ConfigError, EvoGrpoError
from evo_grpo.record import arms, columns, files, names, wording
from evo_grpo.record.family import FamilyMember, founders, tree
from evo_grpo.record.folder import config_text, expect_run, read_rounds, read_settings, round_name
from evo_grpo.record.leaderboard import fitness_text, leaderboard_rows, order_text
from evo_grpo.record.plain import MAX_LOG_BYTES, inside, read_plain
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.record.story import Sentence, tell_story
from evo_grpo.record.summary import (
    SelectedAgent,
    gain_interval,
    gain_sign,
    read_summary,
    rivals_of,
    score_of,
    winner_of,
)
from evo_grpo.record.trouble import Trouble, find_trouble
from evo_grpo.schema.validation import shown
from evo_grpo.settings import RunConfig
from evo_grpo.settings.yaml import from_dict
from evo_grpo.types import Mutation, Score


class HasRounds(Protocol):
    """A protocol of objects that have played rounds in memory, such as `Population`."""

    @property
    def rounds(self) -> Sequence[RoundRecord]:
        """The finished rounds, first to last."""
        ...


@dataclass(frozen=True)
class RunView:
    """The facts of a run that displays show; while the run trains, facts of its finished rounds.

    Attributes:
        name: The name of the run folder, or "population" for rounds in memory.
        rounds: The finished rounds, first to last.
        folder: The run folder, None for rounds in memory.
        summary: The content of summary.json; None before the end of the run.
        comparison: The content of compare.json; None if the run was not compared.
        config, text: The resolved settings by group, and as YAML; empty for rounds in memory.
    """

    name: str
    rounds: Sequence[RoundRecord]
    folder: Path | None = None
    summary: Mapping[str, Any] | None = None
    comparison: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    text: str = ""

    @cached_property
    def planned(self) -> int:
        """Number of rounds of the whole run; if settings are missing, of the finished rounds."""
        population = self.config.get("population")
        planned = population.get("rounds") if isinstance(population, dict) else None
        return planned if isinstance(planned, int) else len(self.rounds)

    @cached_property
    def settings(self) -> RunConfig | None:
        """The settings, None for rounds in memory and where this version cannot read them."""
        if not self.config:
            return None
        with warnings.catch_warnings(), suppress(EvoGrpoError):
            warnings.simplefilter("ignore")
            return from_dict(self.config)
        return None

    @cached_property
    def winner(self) -> SelectedAgent | None:
        """The winner, or the agent that would win now; None if no agent has a finite fitness."""
        return winner_of(self.rounds, self.summary)

    @property
    def lines(self) -> Sequence[Sequence[AgentRecord]]:
        """The records of the winner and its ancestors; a mean has a sequence for each parent."""
        return () if self.winner is None else self.winner.lines

    @cached_property
    def rivals(self) -> tuple[SelectedAgent, ...]:
        """The finalists that lost the final comparison; none if nothing was compared."""
        return rivals_of(self.rounds, self.summary)

    @cached_property
    def base(self) -> Score | None:
        """The score of the base model on the test prompts; None before the end."""
        return None if self.summary is None else score_of(self.summary["base"])

    @cached_property
    def loss(self) -> str:
        """The winner's gain over the base model as text, if significantly below 0; else ""."""
        summary = self.summary
        if summary is None or gain_sign(summary) >= 0:
            return ""
        ends = gain_interval(summary)
        gain = wording.with_error(summary["gain"], summary["gain_se"], 4)
        prompts = wording.count(summary["best"]["n"], f"{summary['split']} prompt")
        return f"{gain}, 95% interval {ends[0]:+.4f} to {ends[1]:+.4f}, on {prompts}"

    @cached_property
    def leaderboard(self) -> list[dict[str, Any]]:
        """The rows of the leaderboard; see `record.leaderboard.from_records`."""
        return leaderboard_rows(self.rounds, self.summary)

    @cached_property
    def order(self) -> str:
        """A note on the leaderboard, or "".

        There is a note if the rows are not sorted by fitness, or if fitness is a training reward.
        """
        return f"{order_text(self.leaderboard)} {fitness_text(self.rounds)}".strip()

    @cached_property
    def family(self) -> tuple[FamilyMember, ...]:
        """The family tree of each member of the first population; last, the mean if a mean won."""
        return (*tree(self.rounds), *self._mean())

    def _mean(self) -> Iterator[FamilyMember]:
        winner = self.winner
        if winner is not None and winner.kind == "mean":
            better, other = (line[-1] for line in winner.lines)
            yield FamilyMember(
                id=winner.member,
                agent=None,
                parent=better.member,
                born=len(self.rounds),
                mutation=Mutation("mean"),
                hparams=better.hparams,
                fitness=(None if winner.final is None else winner.final.mean,),
                alive=True,
                second_parent=other.member,
            )

    @cached_property
    def founders(self) -> dict[int, int]:
        """For each member id, the id of the ancestor in the first population."""
        return founders(self.rounds)

    @cached_property
    def story(self) -> tuple[Sentence, ...]:
        """The run in sentences: its winner, its result and what is missing (`tell_story`)."""
        return tell_story(
            self.rounds,
            self.winner,
            self.rivals,
            summary=self.summary,
            comparison=self.comparison,
            planned=self.planned,
        )

    @property
    def missing(self) -> list[str]:
        """The sentences of the story about facts that this run does not have."""
        return [sentence.text for sentence in self.story if sentence.kind == "missing"]

    @cached_property
    def troubles(self) -> list[Trouble]:
        """The problems of the run, with their remedies."""
        settings = self.settings
        if settings is None:
            return find_trouble(self.rounds, self.winner)
        dropout = settings.model.lora.dropout
        return find_trouble(self.rounds, self.winner, settings.search_space(), dropout)

    @property
    def played(self) -> Iterator[AgentRecord]:
        """The records of all agents in all rounds."""
        return (agent for record in self.rounds for agent in record.agents)

    @property
    def agents(self) -> int:
        """The number of agents that ever played."""
        return len({agent.agent for agent in self.played})

    @property
    def tokens(self) -> int:
        """Number of tokens that all agents sampled in training, in all rounds."""
        return sum(agent.tokens for agent in self.played)

    @property
    def seconds(self) -> float:
        """Wall time of all rounds, in seconds."""
        return sum(sum(record.seconds.values()) for record in self.rounds)

    @cached_property
    def steps_per_round(self) -> int:
        """Number of GRPO steps of the longest round so far, at least 1."""
        return max((1, *(len(agent.step_rewards) for agent in self.played)))

    @cached_property
    def mutable(self) -> tuple[str, ...]:
        """Hyperparameters that mutate, then those that `set` requests changed.

        A clip range appears as its two ends.
        """
        mutating = self.rounds[-1].mutable if self.rounds else ()
        return tuple(dict.fromkeys([*mutating, *columns.steered(self.rounds)]))

    def family_document(self) -> dict[str, Any]:
        """Return the family trees as plain JSON values: all members, ordered by id.

        "rounds" is the number of finished rounds, "best" is the entry of summary.json or None.
        """

        def flat(member: FamilyMember) -> list[FamilyMember]:
            return [member, *(below for child in member.children for below in flat(child))]

        members = [member for founder in self.family for member in flat(founder)]
        return {
            "rounds": len(self.rounds),
            "best": None if self.summary is None else self.summary["best"],
            "members": [
                {
                    "id": member.id,
                    "agent": member.agent,
                    "parent": member.parent,
                    "second_parent": member.second_parent,
                    "born": member.born,
                    "alive": member.alive,
                    "op": member.mutation.op,
                    "changes": {name: list(ends) for name, ends in member.mutation.changes.items()},
                    "hparams": member.hparams.to_dict(),
                    "fitness": list(member.fitness),
                }
                for member in sorted(members, key=lambda member: member.id)
            ],
        }

    def completions(self) -> Iterator[dict[str, Any]]:
        """Yield the sample completions of the finished rounds; a round may have none.

        Raises:
            CheckpointError: A file is damaged.
            RunDirError: A file is a link, or lies behind one.
        """
        if self.folder is not None:
            for record in self.rounds:
                name = f"{names.COMPLETIONS}/{round_name(record.round)}.jsonl"
                yield from _json_lines(self.folder, name)


Run = str | Path | HasRounds | Sequence["RoundRecord"] | RunView
"""A run folder, a population, the finished rounds, first to last, or a view of them."""


def view_of(run: Run) -> RunView:
    """Return the view of a run, even while it trains.

    Raises:
        ConfigError: `run` is neither a run folder nor rounds.
        RunNotFoundError: The run folder does not exist.
    """
    if isinstance(run, RunView):
        return run
    if isinstance(run, str | Path):
        folder = expect_run(run)
        return RunView(
            name=folder.resolve().name,
            rounds=read_rounds(folder),
            folder=folder,
            summary=read_summary(folder),
            comparison=arms.read_comparison(folder),
            config=read_settings(folder),
            text=config_text(folder),
        )
    rounds = getattr(run, "rounds", run)
    if not isinstance(rounds, Sequence) or isinstance(rounds, bytes):
        raise ConfigError(
            f"run: expected a run folder, a population or a sequence of rounds, got {shown(run)}"
        )
    rounds = cast("Sequence[RoundRecord]", rounds)
    summary = getattr(run, "summary", None)
    # A population that has trained on since its test has no winner yet.
    if summary is not None and summary["rounds"] != len(rounds):
        summary = None
    return RunView("population", rounds, summary=summary)


def _json_lines(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    try:
        lines = read_plain(inside(folder, name), MAX_LOG_BYTES).splitlines()
    except FileNotFoundError:
        return
    content = "a JSON object with integers as round, agent and tokens"
    for number, line in enumerate(lines, start=1):
        with files.expecting(f"{folder / name}, line {number}", content):
            row = files.load_json(line)
            numbers = ("round", "agent", "tokens")
            if not isinstance(row, dict) or any(type(row.get(n, 0)) is not int for n in numbers):
                raise ValueError(f"got {line[:60]!r}")
        yield row

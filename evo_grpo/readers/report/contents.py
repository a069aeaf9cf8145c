"""What a report is about: a run in a folder, or the rounds of a population in memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from evo_grpo.errors import CheckpointError, ConfigError, EvoGrpoError
from evo_grpo.record import columns
from evo_grpo.record.arms import read_comparison
from evo_grpo.record.config import read_settings
from evo_grpo.record.family import founders
from evo_grpo.record.files import load_json
from evo_grpo.record.folder import config_text, expect_run, read_rounds, round_name
from evo_grpo.record.names import COMPLETIONS
from evo_grpo.record.plain import MOST_BYTES_OF_LINES, inside, read_plain
from evo_grpo.record.summary import read_summary
from evo_grpo.record.winner import leading_lines
from evo_grpo.schema.validation import shown
from evo_grpo.settings import RunConfig, from_dict

if TYPE_CHECKING:
    from evo_grpo.record.records import AgentRecord, RoundRecord


class Trained(Protocol):
    """What has played rounds in memory: a `Population`."""

    @property
    def rounds(self) -> Sequence[RoundRecord]:
        """The finished rounds, first to last."""
        ...


@dataclass(frozen=True)
class RunContents:
    """A run as reports and figures need it.

    Attributes:
        name: What the run is called.
        rounds: The finished rounds, first to last.
        folder: The run folder, None for rounds in memory.
        summary: What summary.json holds, None before the end of the run.
        comparison: What compare.json holds, None where nothing was compared.
        config: The resolved settings by group, empty for rounds in memory.
        text: The same as YAML.
    """

    name: str
    rounds: Sequence[RoundRecord]
    folder: Path | None = None
    summary: Mapping[str, Any] | None = None
    comparison: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    text: str = ""

    @property
    def planned(self) -> int:
        """Rounds of the whole run."""
        population = self.config.get("population")
        planned = population.get("rounds") if isinstance(population, dict) else None
        return planned if isinstance(planned, int) else len(self.rounds)

    @property
    def steps_per_round(self) -> int:
        """Steps of the longest round so far, at least 1."""
        steps = (len(agent.step_rewards) for record in self.rounds for agent in record.agents)
        return max((1, *steps))

    @property
    def mutable(self) -> tuple[str, ...]:
        """Hyperparameters that may mutate, then those that a person has set.

        The ends of the clip range stand for the range.
        """
        own = self.rounds[-1].mutable if self.rounds else ()
        return tuple(dict.fromkeys([*own, *columns.steered(self.rounds)]))

    @property
    def settings(self) -> RunConfig | None:
        """The settings, None for rounds in memory and where this version cannot read them."""
        if not self.config:
            return None
        with warnings.catch_warnings(), suppress(EvoGrpoError):
            warnings.simplefilter("ignore")
            return from_dict(self.config)
        return None

    def founders(self) -> dict[int, int]:
        """Return the member of the first population that each member descends from."""
        return founders(self.rounds)

    def winning_lines(self) -> list[list[AgentRecord]]:
        """Return what led to the winner, or to the best agent so far; empty without any."""
        return leading_lines(self.rounds, self.summary)

    def completions(self, rounds: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield the sample completions of some rounds; a round without any has none to yield.

        Raises:
            CheckpointError: A file is not as it was written.
            RunDirError: A file is a link, or lies behind one.
        """
        for number in rounds:
            if self.folder is not None:
                yield from _json_lines(self.folder, f"{COMPLETIONS}/{round_name(number)}.jsonl")


Run = str | Path | Trained | Sequence["RoundRecord"] | RunContents
"""A run folder, a population, the finished rounds, first to last, or what was read of them."""


def read_contents(run: str | Path) -> RunContents:
    """Read a run folder, also while the run goes on.

    Raises:
        RunNotFoundError: It is no run folder.
        CheckpointError: A file of it is damaged.
        RunDirError: Another version of this library wrote it.
    """
    folder = expect_run(run)
    config, text = read_settings(folder), config_text(folder)
    return RunContents(
        name=folder.resolve().name,
        rounds=read_rounds(folder),
        folder=folder,
        summary=read_summary(folder),
        comparison=read_comparison(folder),
        config=config,
        text=text,
    )


def contents_of(run: Run) -> RunContents:
    """Return the contents of whatever stands for a run.

    Raises:
        ConfigError: It is neither a run folder nor rounds.
        EvoGrpoError: As `read_contents` raises.
    """
    if isinstance(run, RunContents):
        return run
    if isinstance(run, str | Path):
        return read_contents(run)
    rounds = getattr(run, "rounds", run)
    if not isinstance(rounds, Sequence) or isinstance(rounds, bytes):
        raise ConfigError(
            f"run: expected a run folder, a population or a sequence of rounds, got {shown(run)}"
        )
    return RunContents(name="population", rounds=cast("Sequence[RoundRecord]", rounds))


def _json_lines(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    try:
        lines = read_plain(inside(folder, name), MOST_BYTES_OF_LINES).splitlines()
    except FileNotFoundError:
        return
    for number, line in enumerate(lines, start=1):
        try:
            row = load_json(line)
        except ValueError as error:
            raise CheckpointError(
                f"{folder / name}, line {number}: expected a JSON object, got {line[:60]!r}; put "
                "the file back as it was"
            ) from error
        if isinstance(row, dict):
            yield cast("dict[str, Any]", row)

"""The base class of rewards that a model computes: a reward model, a judge."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from evo_grpo.errors import RewardError


class Board(Protocol):
    """Small texts by name that the processes of a run share."""

    def swap(self, name: str, old: str, new: str) -> str:
        """Write a text where `old` stands, "" where none does; return the text that is there."""
        ...

    def write(self, texts: Mapping[str, str]) -> None:
        """Write texts by name."""
        ...

    def read(self, names: Sequence[str]) -> Sequence[str]:
        """Return the texts of names, each of which has one."""
        ...


class Scorer(ABC):
    """A reward function of this package, which scores completions with a model.

    It is called once per batch, in the process of the run: `env.reward_timeout` and `env.isolate`,
    which guard against code of the user, do not apply to it. Several threads may call it at once.

    Attributes:
        columns: Names of the columns that its templates need.
    """

    __name__: str = "scorer"
    columns: Sequence[str] = ()

    def fill(self, row: Mapping[str, Any]) -> None:  # noqa: B027 -- not all have templates
        """Fill in the templates with a row, a completion and a prompt.

        Raises:
            DataError: A column has a value that a template cannot print.
        """

    def prepare(self, device: str) -> None:  # noqa: B027 -- not all have something to do
        """Load and check what scoring needs, before the first batch; repeated calls do nothing.

        Args:
            device: Device of the run, such as "cpu" or "cuda:0".

        Raises:
            ConfigError: Something is missing.
        """

    def record_in(self, folder: Path, name: str, *, counts: bool = True) -> None:  # noqa: B027 -- the same
        """Keep results in a folder of the run, under a name of its own, and use earlier ones.

        `counts` is whether this process counts what the earlier ones have cost: one of them does.
        """

    def share(self, board: Board, *, known: bool) -> None:  # noqa: B027 -- the same
        """Share results with the other processes; `known`: tell them those of record_in too."""

    def unrecorded(self) -> Mapping[str, Any]:
        """Return the results that are not kept, because this process sees no folder of the run."""
        return {}

    def record(self, answers: Mapping[str, Any]) -> None:  # noqa: B027 -- the same
        """Keep the results of another process, which it returned from `unrecorded`."""

    def spent(self) -> Mapping[str, float]:
        """Return what scoring has cost since the start of the run; empty if it costs nothing."""
        return {}

    @abstractmethod
    def __call__(
        self, *, completions: Sequence[str], prompts: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | RewardError]:
        """Score completions.

        Args:
            completions: B completions.
            prompts: The B texts that the agents were given.
            **columns: B values of each column of the rows.

        Returns:
            B rewards; in place of a reward that cannot be used, the error that says why.
        """


def template_rows(
    completions: Sequence[str], prompts: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> Iterator[dict[str, Any]]:
    """Yield what the templates of a scorer may name, for each of B completions."""
    for number, (completion, prompt) in enumerate(zip(completions, prompts, strict=True)):
        row = {name: values[number] for name, values in columns.items()}
        yield {**row, "completion": completion, "prompt": prompt}


def needed_columns(names: Sequence[str]) -> list[str]:
    """Return the names in templates that the rows have to have as columns."""
    return [name for name in names if name not in ("completion", "prompt")]

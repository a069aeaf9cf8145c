"""The base class of rewards that a model computes, such as a reward model or a judge."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from evo_grpo.errors import RewardError


class UnusableRewardError(RewardError):
    """A reward is NaN, infinite or too large, possibly once only, unlike a reward of wrong type."""


class Board(Protocol):
    """A mapping from names to short texts that the processes of a run share."""

    def swap(self, name: str, old: str, new: str) -> str:
        """Set the text of a name to `new` if it equals `old` ("": unset); return the result."""
        ...

    def write(self, texts: Mapping[str, str]) -> None:
        """Write texts by name."""
        ...

    def read(self, names: Sequence[str]) -> Sequence[str]:
        """Return the texts of names; each name must have one."""
        ...


class Scorer(ABC):
    """A reward function of this package, which scores completions with a model.

    It is called once per batch, in the process of the run, and several threads may call it at once.
    `env.reward_timeout` and `env.isolate` apply to code of the user alone.

    Attributes:
        templates: The `prompts.Template`s of the model's prompt.
        columns: Names of the columns in the templates.
    """

    __name__: str = "scorer"

    def __init__(self, templates: Sequence[Any]) -> None:
        self.templates = templates
        names = [name for template in templates for name in template.columns()]
        self.columns = [name for name in names if name not in ("completion", "prompt")]

    def fill(self, row: Mapping[str, Any]) -> None:
        """Fill in the templates with a row, a completion and a prompt, to find errors early."""
        for template in self.templates:
            template.plain(row)

    @abstractmethod
    def prepare(self, device: str) -> None:
        """Load and check what scoring needs on the run's device; repeated calls do nothing.

        Raises:
            ConfigError: Something is missing.
        """

    @abstractmethod
    def __call__(
        self, *, completions: Sequence[str], prompts: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | RewardError]:
        """Return a reward for each of B completions, or a RewardError if it is unusable.

        `prompts` are the B texts that the agents were given; each of `columns` has B values.
        """


def template_rows(
    completions: Sequence[str], prompts: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the template variables of each of B completions."""
    for number, (completion, prompt) in enumerate(zip(completions, prompts, strict=True)):
        row = {name: values[number] for name, values in columns.items()}
        yield {**row, "completion": completion, "prompt": prompt}

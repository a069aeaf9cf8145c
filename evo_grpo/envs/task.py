"""Defines `Task`: rows, prompt templates and reward functions, without a tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from evo_grpo.envs.data.tables import SPLITS, DatasetRow, Split
from evo_grpo.envs.messages import listed
from evo_grpo.envs.prompts import Template
from evo_grpo.envs.rewards.functions import RewardFunction
from evo_grpo.errors import ConfigError
from evo_grpo.settings.algorithm import DEFAULT_OUTPUT_TOKENS
from evo_grpo.settings.env import RewardCalls, ThinkingTags, TooLong


@dataclass(frozen=True)
class Task:
    """A task, independent of a tokenizer: rows, templates and reward functions.

    Attributes:
        name: Name in messages and records.
        splits: Rows of train (learned from), validation (selection) and test (final evaluation).
        rewards: The reward functions, at least one.
        templates: The templates of `env.prompts` by name, at least one; a single template without a
            name has the key None.
        max_output_tokens: Tokens of a usual answer with its end token, >= 1; a hint.
        calls: How the reward functions are called.
        thinking: The tags around the thinking part of a completion; None if all of it is the
            answer.
        too_long: What happens to rows whose prompts leave no room for a completion.
    """

    name: str
    splits: Mapping[Split, Sequence[DatasetRow]]
    rewards: tuple[RewardFunction, ...]
    templates: Mapping[str | None, Template]
    max_output_tokens: int = DEFAULT_OUTPUT_TOKENS
    calls: RewardCalls = field(default_factory=RewardCalls)
    thinking: ThinkingTags | None = None
    too_long: TooLong = "error"

    def __post_init__(self) -> None:
        """Check that every split has rows."""
        if missing := [split for split in SPLITS if not self.splits.get(split)]:
            raise ConfigError(
                f"task {self.name!r}: expected rows for {listed(SPLITS)}, got none for "
                f"{listed(missing)}"
            )

    @property
    def template(self) -> Template:
        """The first template, which all agents use unless the prompt is searched."""
        return next(iter(self.templates.values()))

    @property
    def prompt_names(self) -> tuple[str, ...]:
        """Names in `env.prompts`; empty if the only template has no name."""
        return tuple(name for name in self.templates if name is not None)

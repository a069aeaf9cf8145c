"""ReasoningGym with the positions, spaces and parameters of AgileRL's reference pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from evo_grpo.envs.prompts import Messages
from evo_grpo.envs.single_turn import RewardFn, SingleTurnEnvironment, task_of_rows
from evo_grpo.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # for annotations only: it loads torch


@dataclass(frozen=True)
class TextSpace:
    """Input or output of a language model, for scripts that pass spaces on.

    Attributes:
        vocab_size: Number of tokens in the vocabulary.
        max_tokens: Longest string in tokens, or None without a limit.
    """

    vocab_size: int
    max_tokens: int | None


@final
class ReasoningGym(SingleTurnEnvironment):
    """`evo_grpo.ReasoningGym` as the reference pages call it.

    Args:
        train_dataset: As in `evo_grpo.ReasoningGym`.
        test_dataset: As in `evo_grpo.ReasoningGym`.
        tokenizer: As in `evo_grpo.ReasoningGym`.
        reward_fn: As in `evo_grpo.ReasoningGym`.
        conversation_template: As in `evo_grpo.ReasoningGym`.
        data_batch_size_per_gpu: Prompts per step of each process, >= 1: `batch_size` of
            `evo_grpo.ReasoningGym` where there is one.
        validation_dataset: As in `evo_grpo.ReasoningGym`.
        reward_weights: As in `evo_grpo.ReasoningGym`.
        max_context_length: As in `evo_grpo.ReasoningGym`.
        seed: As in `evo_grpo.ReasoningGym`.
        return_raw_completions: No effect: completions always carry text and token ids.
        accelerator: As for the agents: all its processes get all prompts of a step, which the
            agents divide among them.
        name: As in `evo_grpo.ReasoningGym`.
        max_output_tokens: As in `evo_grpo.ReasoningGym`.

    Raises:
        DataError: A dataset is missing, empty, or lacks a column.
        ConfigError: The template, a reward function or a number is malformed.
        PromptTooLongError: A prompt leaves no room for a completion.
    """

    def __init__(  # noqa: PLR0913 -- the signature of the reference pages
        self,
        train_dataset: object,
        test_dataset: object,
        tokenizer: PreTrainedTokenizerBase,
        reward_fn: RewardFn,
        conversation_template: str | Messages,
        data_batch_size_per_gpu: int = 8,
        *,
        validation_dataset: object = None,
        reward_weights: Sequence[float] | None = None,
        max_context_length: int | None = None,
        seed: int = 0,
        return_raw_completions: bool = False,
        accelerator: object = None,
        name: str = "dataset",
        max_output_tokens: int | None = None,
    ) -> None:
        del return_raw_completions
        if data_batch_size_per_gpu < 1:
            raise ConfigError(
                "data_batch_size_per_gpu: expected >= 1 prompt per step, got "
                f"{data_batch_size_per_gpu!r}"
            )
        task = task_of_rows(
            {"train": train_dataset, "validation": validation_dataset, "test": test_dataset},
            conversation_template,
            reward_fn,
            reward_weights,
            seed=seed,
            name=name,
            max_output_tokens=max_output_tokens,
        )
        super().__init__(
            task,
            tokenizer,
            batch_size=data_batch_size_per_gpu * _processes(accelerator),
            seed=seed,
            max_context_length=max_context_length,
        )

    @property
    def observation_space(self) -> TextSpace:
        """Prompts."""
        return TextSpace(len(self.tokenizer), self.max_context_length)

    @property
    def action_space(self) -> TextSpace:
        """Completions."""
        return TextSpace(len(self.tokenizer), self.max_output_tokens)


def _processes(accelerator: object) -> int:
    if accelerator is None:
        return 1
    # Imported where it is needed: it loads torch, and prompts do without.
    from evo_grpo.agilerl.checks import check_accelerator

    check_accelerator(accelerator)
    return int(getattr(accelerator, "num_processes"))  # noqa: B009 -- of a class that loads torch


#: The name of earlier AgileRL versions.
HuggingFaceGym = ReasoningGym

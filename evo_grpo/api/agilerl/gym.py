"""ReasoningGym with the positions, spaces and parameters of AgileRL's reference pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from evo_grpo.envs import single_turn
from evo_grpo.envs.prompts import Messages
from evo_grpo.envs.single_turn import RewardFn
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
class ReasoningGym(single_turn.ReasoningGym):
    """`evo_grpo.ReasoningGym` with AgileRL's argument names; the other arguments are the same.

    `data_batch_size_per_gpu`, >= 1, is the number of prompts per step and process; times the
    processes of `accelerator` it is the `batch_size` of `evo_grpo.ReasoningGym`. Every process gets
    all prompts of a step, and the agents divide them.

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
        reward_weights: Sequence[float] | Mapping[str, float] | None = None,
        max_context_length: int | None = None,
        seed: int = 0,
        accelerator: object = None,
        name: str = "dataset",
        max_output_tokens: int | None = None,
    ) -> None:
        if data_batch_size_per_gpu < 1:
            raise ConfigError(
                "data_batch_size_per_gpu: expected >= 1 prompt per step, got "
                f"{data_batch_size_per_gpu!r}"
            )
        super().__init__(
            train_dataset,
            test_dataset,
            tokenizer,
            reward_fn,
            conversation_template,
            batch_size=data_batch_size_per_gpu * _processes(accelerator),
            validation_dataset=validation_dataset,
            reward_weights=reward_weights,
            max_context_length=max_context_length,
            seed=seed,
            name=name,
            max_output_tokens=max_output_tokens,
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
    from evo_grpo.api.agilerl.checks import check_accelerator

    check_accelerator(accelerator)
    return int(getattr(accelerator, "num_processes"))  # noqa: B009 -- of a class that loads torch


#: The name of earlier AgileRL versions.
HuggingFaceGym = ReasoningGym

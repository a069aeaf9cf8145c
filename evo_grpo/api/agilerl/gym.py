"""ReasoningGym with the positions, spaces and parameters of AgileRL's reference pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from evo_grpo.envs import single_turn
from evo_grpo.envs.builtin.dataset import Rewards
from evo_grpo.envs.prompts import Messages

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

    def __init__(
        self,
        train_dataset: object,
        test_dataset: object,
        tokenizer: PreTrainedTokenizerBase,
        reward_fn: Rewards,
        conversation_template: str | Messages,
        data_batch_size_per_gpu: int = 8,
        *,
        accelerator: object = None,
        **others: Any,
    ) -> None:
        super().__init__(
            train_dataset,
            test_dataset,
            tokenizer,
            reward_fn,
            conversation_template,
            batch_size=data_batch_size_per_gpu * getattr(accelerator, "num_processes", 1),
            **others,
        )

    @property
    def observation_space(self) -> TextSpace:
        """Prompts."""
        return TextSpace(len(self.tokenizer), self.max_context_length)

    @property
    def action_space(self) -> TextSpace:
        """Completions."""
        return TextSpace(len(self.tokenizer), self.max_output_tokens)


#: The name of earlier AgileRL versions.
HuggingFaceGym = ReasoningGym

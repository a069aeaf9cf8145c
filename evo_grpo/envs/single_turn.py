"""ReasoningGym: a task and a tokenizer make the prompts of a step and score what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from evo_grpo.envs.data import dataset as own_rows
from evo_grpo.envs.names import listed
from evo_grpo.envs.prompts import Messages, Template
from evo_grpo.envs.protocol import Ask, Experience, Floats
from evo_grpo.envs.rendered import RenderedPrompts
from evo_grpo.envs.rewards.functions import RewardFunction, as_rewards
from evo_grpo.envs.rewards.scoring import score
from evo_grpo.envs.spaces import TextSpace
from evo_grpo.envs.task import DEFAULT_MAX_OUTPUT_TOKENS, SPLITS, Split, Task
from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.seeding import generator
from evo_grpo.types import Group, Prompt, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # for annotations only: it loads torch

RewardFn = Callable[..., Any] | RewardFunction | Sequence[Callable[..., Any] | RewardFunction]
Rewards = np.ndarray[Any, np.dtype[np.float64]]


class ReasoningGym:
    r"""An environment of one turn: a prompt from a dataset, a completion, a reward.

    Nothing in it has a state: the prompts of a step follow from (seed, step), those of a split from
    the seed.

    Args:
        train_dataset: Rows to learn from: a datasets.Dataset, a list of dicts, a pandas frame, or
            the path of a CSV, TSV, JSON, JSONL or Parquet file.
        test_dataset: Rows that are judged once, at the end; as train_dataset.
        tokenizer: The base model's transformers tokenizer.
        reward_fn: One reward function or several; see `RewardFunction` for what they get and may
            return.
        conversation_template: Messages such as [{"role": "user", "content": "Q: {question}"}] for
            the chat template, or a raw text such as "Q: {question}\nA:". Braces name columns.
        data_batch_size_per_gpu: Prompts per step, >= 1.
        validation_dataset: Rows for selection. None holds out a tenth of train; fewer than ten
            different prompts are too few for that, and selection then reads the train rows
            themselves.
        reward_weights: One factor per reward function; None means 1 each.
        max_context_length: Tokens of prompt and completion together; a longer prompt is an error.
            None: no limit until `limit_context` sets one.
        seed: Seed of the order of prompts and of what is held out.
        return_raw_completions: Accepted for compatibility; text and token ids are always there.
        accelerator: Accepted as None only.
        name: How messages and records call it.
        max_output_tokens: Hint, tokens that hold a usual answer; None leaves it to the algorithm.

    Raises:
        DataError: A dataset is missing, empty, or lacks a column.
        ConfigError: The template, a reward function or a number is malformed.
        PromptTooLongError: A prompt leaves no room for a completion.
        EngineUnavailable: An accelerator is given.
    """

    def __init__(  # noqa: PLR0913 -- the signature that users of the reference documentation know
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
        accelerator: None = None,
        name: str = "dataset",
        max_output_tokens: int | None = None,
    ) -> None:
        del return_raw_completions
        if accelerator is not None:
            raise EngineUnavailable(
                "accelerator: training over several processes is not supported by this version; "
                "leave it out"
            )
        if data_batch_size_per_gpu < 1:
            raise ConfigError(
                "data_batch_size_per_gpu: expected >= 1 prompt per step, got "
                f"{data_batch_size_per_gpu!r}"
            )
        if test_dataset is None:
            raise ConfigError("test_dataset: expected rows to judge the result on, got None")
        self.tokenizer = tokenizer
        self.batch_size = data_batch_size_per_gpu
        self.seed = seed
        self.max_output_tokens = max_output_tokens
        self.task = own_rows.build(
            seed,
            {"train": train_dataset, "validation": validation_dataset, "test": test_dataset},
            conversation_template,
            as_rewards(reward_fn, reward_weights),
            name=name,
            max_output_tokens=max_output_tokens or DEFAULT_MAX_OUTPUT_TOKENS,
            validation_from_few=True,
        )
        template = Template(self.task.prompt, self.task.conversation)
        self._rendered = RenderedPrompts(self.task.splits, template, tokenizer)
        if max_context_length is not None:
            self.limit_context(max_context_length)

    @classmethod
    def from_task(
        cls,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int = 8,
        seed: int = 0,
        max_context_length: int | None = None,
    ) -> ReasoningGym:
        """Make the environment of a task.

        Args:
            task: From `registry.build_task`, or your own.
            tokenizer: The base model's transformers tokenizer.
            batch_size: Prompts per step, >= 1.
            seed: Seed of the order of prompts.
            max_context_length: As in the constructor.
        """
        missing = [split for split in SPLITS if not task.splits.get(split)]
        template = task.conversation if task.prompt is None else task.prompt
        if missing or template is None:
            raise ConfigError(
                f"task {task.name!r}: expected rows for {listed(SPLITS)} and a prompt or a "
                "conversation, got "
                f"{'no rows for ' + listed(missing) if missing else 'neither of the two'}"
            )
        return cls(
            task.splits["train"],
            task.splits["test"],
            tokenizer,
            task.rewards,
            template,
            batch_size,
            validation_dataset=task.splits["validation"],
            max_context_length=max_context_length,
            seed=seed,
            name=task.name,
            max_output_tokens=task.max_output_tokens,
        )

    @property
    def name(self) -> str:
        """How messages and records call it."""
        return self.task.name

    @property
    def weights(self) -> Rewards:
        """The reward functions' weights, (K,) float64."""
        return np.array([reward.weight for reward in self.task.rewards], dtype=np.float64)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The reward functions' names, K of them, in the order of `weights`."""
        return tuple(reward.name for reward in self.task.rewards)

    @property
    def max_context_length(self) -> int | None:
        """Tokens of prompt and completion together, or None before a limit is set."""
        return self._rendered.max_context_length

    @property
    def observation_space(self) -> TextSpace:
        """What prompts are."""
        return TextSpace(len(self.tokenizer), self.max_context_length)

    @property
    def action_space(self) -> TextSpace:
        """What completions are."""
        return TextSpace(len(self.tokenizer), self.max_output_tokens)

    def batch(self, step: int, size: int | None = None) -> list[Prompt]:
        """Return the train prompts of a step.

        Steps walk through a seeded permutation of the rows, a new one each epoch; a batch that
        crosses the end of an epoch goes on in the next, and may then hold a row twice.

        Args:
            step: Number of the step, >= 0; the same number gives the same prompts.
            size: Prompts, >= 1; None takes `data_batch_size_per_gpu`.
        """
        size = self.batch_size if size is None else size
        if step < 0 or size < 1:
            raise ConfigError(
                f"batch: expected step >= 0 and size >= 1, got step {step}, size {size}"
            )
        rows = len(self.task.splits["train"])
        epochs: dict[int, Sequence[int]] = {}
        picked: list[int] = []
        for position in range(step * size, (step + 1) * size):
            epoch, offset = divmod(position, rows)
            if epoch not in epochs:
                epochs[epoch] = self._order("train", "epoch", epoch)
            picked.append(epochs[epoch][offset])
        return [self._rendered.get("train", index) for index in picked]

    def prompts(self, split: Split, size: int | None = None) -> list[Prompt]:
        """Return a fixed seeded subset of a split, the same at every call.

        A smaller subset begins a larger one.

        Args:
            split: "train", "validation" or "test".
            size: Prompts, >= 1; None, or more than there are, takes all. A task of one prompt
                repeats it as rows.
        """
        if split not in SPLITS:
            raise ConfigError(f"split: expected one of {listed(SPLITS)}, got {split!r}")
        if size is not None and size < 1:
            raise ConfigError(f"prompts: expected size >= 1 or None, got {size}")
        return [
            self._rendered.get(split, index) for index in self._order(split, "subset", 0)[:size]
        ]

    def score(self, groups: Sequence[Group]) -> Rewards:
        """Score completions with every reward function.

        Args:
            groups: Completions of prompts of this environment; groups may differ in size.

        Returns:
            (B, K) float64 rewards without weights, rows in the order of groups, then completions;
            NaN where a function abstains.

        Raises:
            RewardError: A function raised, or returned something that is no finite number.
        """
        rows = [
            (group.prompt, completion.text) for group in groups for completion in group.completions
        ]
        return score(
            self.task.rewards,
            [text for _, text in rows],
            [prompt.columns for prompt, _ in rows],
            [prompt.text for prompt, _ in rows],
            [prompt.index for prompt, _ in rows],
        )

    def begin(
        self, starts: Sequence[Sequence[Prompt]], group_sizes: Sequence[int]
    ) -> SingleTurnPlay:
        """Ask agents for completions of prompts of this environment; see `Environment`."""
        return SingleTurnPlay(starts, group_sizes, self.score)

    def limit_context(self, max_context_length: int) -> None:
        """Set the model's context and check that every prompt leaves room for one token.

        Args:
            max_context_length: Tokens of prompt and completion together, >= 2.

        Raises:
            PromptTooLongError: Names split, row, length and limit.
        """
        self._rendered.limit(max_context_length)

    def _order(self, split: Split, purpose: str, epoch: int) -> list[int]:
        rows = len(self.task.splits[split])
        return generator(self.seed, "prompts", split, purpose, epoch).permutation(rows).tolist()


@final
class SingleTurnPlay:
    """The one turn of N agents: asks once, and scores all completions together.

    Args:
        prompts: Per agent its prompts.
        group_sizes: Per agent G, completions of each prompt.
        score: Groups in order -> (B, K) rewards.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[Prompt]],
        group_sizes: Sequence[int],
        score: Callable[[Sequence[Group]], Floats],
    ) -> None:
        self._request = Ask(prompts, group_sizes)
        self._score = score
        self._groups: Sequence[Sequence[Group]] | None = None

    def ask(self) -> Ask | None:
        """See `Play`."""
        return self._request if self._groups is None else None

    def tell(self, groups: Sequence[Sequence[Group]]) -> None:
        """See `Play`."""
        self._groups = groups

    def experiences(self) -> list[Experience]:
        """See `Play`; all reward functions are called here, once for all agents."""
        groups = self._groups or []
        rewards = self._score([group for mine in groups for group in mine])
        ends = np.cumsum([sum(len(g.completions) for g in mine) for mine in groups])[:-1]
        return [
            Experience(tuple(t for group in mine for t in _trajectories(group)), scores)
            for mine, scores in zip(groups, np.split(rewards, ends), strict=True)
        ]


def _trajectories(group: Group) -> list[Trajectory]:
    prompt = group.prompt
    return [
        Trajectory(
            prompt=prompt.text,
            text=completion.text,
            token_ids=prompt.token_ids + completion.token_ids,
            mask=(False,) * len(prompt.token_ids) + (True,) * len(completion.token_ids),
            logprobs=completion.logprobs,
            ended=completion.ended,
        )
        for completion in group.completions
    ]


#: What an earlier version of the reference API calls it.
HuggingFaceGym = ReasoningGym

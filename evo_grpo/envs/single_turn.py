"""Environments of one turn, which take prompts from a task and score their completions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, NamedTuple, Self, final

import numpy as np

from evo_grpo.envs.builtin.dataset import Rewards, dataset_task
from evo_grpo.envs.data.tables import SPLITS, Split, place_of
from evo_grpo.envs.loading import as_rewards
from evo_grpo.envs.messages import listed
from evo_grpo.envs.prompting import with_prompting
from evo_grpo.envs.prompts import Messages, RenderedPrompts, Tokenizer, fitting_rows
from evo_grpo.envs.protocol import Ask, Experience, Floats
from evo_grpo.envs.rewards import process, scorers, scoring
from evo_grpo.envs.rewards.functions import Scorer
from evo_grpo.envs.task import Task
from evo_grpo.envs.template_keywords import dropped_sentence, ignored_keywords
from evo_grpo.envs.thinking import COLUMN, check_tags, parted
from evo_grpo.errors import ConfigError, RewardError
from evo_grpo.record.vocabulary import LOGGED
from evo_grpo.schema.problems import unknown_name
from evo_grpo.seeding import generator
from evo_grpo.settings.algorithm import DEFAULT_OUTPUT_TOKENS
from evo_grpo.settings.env import PROMPTS, PromptSettings, RewardCalls
from evo_grpo.types import CompletionGroup, Prompt, Trajectory

ANSWERS = ("answer", "solution", "ground_truth", "target", "label")
"""Usual names of the column with the right answer, for the record of sample completions."""


class ReasoningGym:
    r"""An environment of one turn on your own rows: a prompt, a completion, a reward.

    The prompts of a training step depend on the seed and the step alone. The prompts of a split
    depend on the seed alone.

    Args:
        train_dataset: Rows to learn from: a datasets.Dataset, a list of dicts, a pandas frame, or
            the path of a CSV, TSV, JSON, JSONL or Parquet file.
        test_dataset: Rows of the final evaluation; types as for train_dataset.
        tokenizer: The base model's transformers tokenizer.
        reward_fn: One reward function or several; see `RewardFunction` for their arguments and
            results. A name is "module:function"; a model or a judge is a mapping, as in YAML.
        conversation_template: Messages such as [{"role": "user", "content": "Q: {question}"}] for
            the chat template, or a raw string such as "Q: {question}\nA:". Braces name columns.
            None takes the value of the column "prompt", "question" or "messages": the user's
            message, or a conversation.
        batch_size: P, prompts per step, >= 1.
        validation_dataset: Rows for selection. None holds out a tenth of train, or uses the train
            rows if there are fewer than ten different prompts.
        reward_weights: One factor per reward function, or factors by name. A function without one
            keeps its own weight, by default 1.
        max_context_length: Tokens of prompt and completion; None until `limit_context` sets them.
        seed: Seed of the order of prompts and of the rows that are held out.
        name: Name in messages and records.
        max_output_tokens: Tokens of a usual answer, not a limit; None is 32.
        **settings: prompts, system_prompt, few_shot, chat_template_kwargs, too_long, thinking,
            reward_timeout, reward_failures, reward_errors, reward_style and isolate, as in `env`.

    Raises:
        DataError: A dataset is missing, empty, or lacks a column.
        ConfigError: The template, a reward function or a number is malformed.
        PromptTooLongError: A prompt leaves no room for a completion.
    """

    #: Whether several plays may go on at once, in threads; see `engine.overlap`.
    side_by_side = True

    def __init__(  # noqa: PLR0913 -- all but the first five have defaults
        self,
        train_dataset: object,
        test_dataset: object,
        tokenizer: Tokenizer,
        reward_fn: Rewards,
        conversation_template: str | Messages | None = None,
        *,
        batch_size: int = 8,
        validation_dataset: object = None,
        reward_weights: Sequence[float] | Mapping[str, float] | None = None,
        max_context_length: int | None = None,
        seed: int = 0,
        name: str = "dataset",
        max_output_tokens: int | None = None,
        **settings: Any,
    ) -> None:
        if test_dataset is None:
            raise ConfigError("test_dataset: expected rows to judge the result on, got None")
        names = PromptSettings.model_fields.keys() & settings.keys()
        prompting = PromptSettings(**{name: settings.pop(name) for name in names})
        sources = dict(zip(SPLITS, (train_dataset, validation_dataset, test_dataset), strict=True))
        task = dataset_task(
            seed,
            sources,
            conversation_template,
            as_rewards(reward_fn, reward_weights, style=settings.get("reward_style")),
            name=name,
            max_output_tokens=max_output_tokens or DEFAULT_OUTPUT_TOKENS,
            validation_from_few=True,
            thinking=prompting.thinking,
        )
        task = with_prompting(replace(task, calls=RewardCalls(**settings)), prompting, seed)
        self._set_up(task, tokenizer, batch_size, seed, max_context_length)

    @classmethod
    def from_task(
        cls,
        task: Task,
        tokenizer: Tokenizer,
        batch_size: int = 8,
        seed: int = 0,
        max_context_length: int | None = None,
    ) -> Self:
        """Return the environment of a task; all other arguments are as in the constructor."""
        env = cls.__new__(cls)
        env._set_up(task, tokenizer, batch_size, seed, max_context_length)
        return env

    def _set_up(
        self,
        task: Task,
        tokenizer: Tokenizer,
        batch_size: int,
        seed: int,
        max_context_length: int | None,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size: expected >= 1 prompt per step, got {batch_size!r}")
        self.tokenizer: Any = tokenizer
        self.batch_size = batch_size
        self.seed = seed
        self.max_output_tokens: int | None = task.max_output_tokens
        if task.thinking is not None:
            check_tags(task.thinking, tokenizer)
        #: The task with all its rows, of which `env.too_long: drop` may leave some out.
        self.given = task
        self._limits: tuple[int, int] | None = None
        self._render(task, task.max_output_tokens)
        self._set_aside = scoring.SetAside(task.calls.reward_failures)
        #: Held while a thread uses the process or the counts of groups that are set aside.
        self._shared = Lock()
        self._functions = [reward for reward in task.rewards if not isinstance(reward.fn, Scorer)]
        #: Whether some function is called as TRL calls it, once for each agent.
        self.of_trl = any(reward.style == "trl" for reward in self._functions)
        #: The reward models and judges, in the order of the reward functions.
        self.scorers = [reward.fn for reward in task.rewards if isinstance(reward.fn, Scorer)]
        #: The judges by their position in `scorers`, which names their files in a run folder.
        self.judges = {n: fn for n, fn in enumerate(self.scorers) if isinstance(fn, scorers.Judge)}
        isolated = task.calls.isolate == "process" and bool(self._functions)
        self._process = process.RewardProcess(self._functions, task.calls) if isolated else None
        sentences = ignored_keywords(self.tokenizer.chat_template, task.template.keywords)
        for template in task.templates.values():
            sentences += dropped_sentence(template, task.splits["train"], tokenizer)
        for sentence in sentences:
            warnings.warn(sentence, UserWarning, stacklevel=3)
        if max_context_length is not None:
            self.limit_context(max_context_length)

    def _render(self, task: Task, answer_tokens: int) -> None:
        """Replace the task and drop all rendered prompts, which are rendered again on first use."""
        self.task, self._answer_tokens = task, answer_tokens
        answer = answer_tokens if task.too_long == "truncate_left" else None
        self._by_name = {
            name: RenderedPrompts(task.splits, template, self.tokenizer, answer)
            for name, template in task.templates.items()
        }
        self._rendered = next(iter(self._by_name.values()))

    @property
    def name(self) -> str:
        """Name in messages and records."""
        return self.task.name

    @property
    def weights(self) -> Floats:
        """Weights of the reward functions, (K,) float64."""
        return np.array([reward.weight for reward in self.task.rewards], dtype=np.float64)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of the reward functions, in the order of `weights`."""
        return tuple(reward.name for reward in self.task.rewards)

    @property
    def max_context_length(self) -> int | None:
        """Tokens of prompt and completion together, or None before a limit is set."""
        return self._rendered.max_context_length

    def batch(self, step: int, size: int | None = None) -> list[Prompt]:
        """Return `size` (None: `batch_size`) train prompts of a step; the same at every call.

        Successive steps walk through a seeded permutation of the rows; each epoch has a new one.
        """
        size = self.batch_size if size is None else size
        if step < 0 or size < 1:
            raise ConfigError(f"batch: expected step >= 0, size >= 1, got step {step}, size {size}")
        rows, start, end = len(self.task.splits["train"]), step * size, (step + 1) * size
        epochs = range(start // rows, (end - 1) // rows + 1)
        orders = {epoch: self._order("train", "epoch", epoch) for epoch in epochs}
        prompts = {
            index: self._rendered.get("train", orders[index // rows][index % rows])
            for index in range(start, end)
        }
        if not self.of_trl:
            return list(prompts.values())
        return [replace(prompt, step=index // self.batch_size) for index, prompt in prompts.items()]

    def prompts(self, split: Split, size: int | None = None) -> list[Prompt]:
        """Return a fixed seeded subset of a split, the same at every call.

        `size` is the number of rows; None takes all. A larger subset begins with any smaller one.
        Equal rows count separately.
        """
        if split not in SPLITS or (size is not None and size < 1):
            expected = f"a split of {listed(SPLITS)} and size >= 1 or None"
            raise ConfigError(f"prompts: expected {expected}, got {split!r} and {size}")
        return [
            self._rendered.get(split, index) for index in self._order(split, "subset", 0)[:size]
        ]

    @property
    def prompt_names(self) -> tuple[str, ...]:
        """Names in `env.prompts`; `prompts` and `batch` use the template of the first name."""
        return self.task.prompt_names

    def under(self, name: str, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Render the rows of `prompts` with the template called `name` in `env.prompts`."""
        if name not in self.prompt_names:
            text = unknown_name(name, self.prompt_names, PROMPTS)
            raise ConfigError(f"prompt of an agent: {text}")
        rendered = self._by_name[name]
        if rendered is self._rendered:
            return list(prompts)
        return [replace(rendered.of_row(prompt), step=prompt.step) for prompt in prompts]

    def row(self, split: Split, index: int) -> Prompt:
        """Return the prompt of a row by its position in the split (0-based)."""
        return self._rendered.get(split, index)

    def score(self, groups: Sequence[CompletionGroup]) -> Floats:
        """Score completions of this environment's prompts with every reward function.

        Returns (B, K) float64 rewards without weights, rows in the order of groups, then
        completions; NaN if a function abstains. Raises RewardError if a function raised, or
        returned anything but a finite number or None.
        """
        scored = self._scored(groups)
        if scored.failures:
            raise RewardError(scored.failures[0].text)
        return scored.rewards

    def judge(self, groups: Sequence[CompletionGroup]) -> Judged:
        """Score completions, and set aside each group in which a reward failed.

        Raises RewardError if too many of the latest groups are set aside.
        """
        scored = self._scored(groups)
        failed = {position for failure in scored.failures for position in failure.positions}
        set_aside: list[bool] = []
        end = 0
        for group in groups:
            start, end = end, end + len(group.completions)
            set_aside.append(not failed.isdisjoint(range(start, end)))
            if set_aside[-1]:
                scored.rewards[start:end] = np.nan
        with self._shared:
            self._set_aside.record(set_aside, scored.failures[0].text if scored.failures else "")
        return Judged(scored.rewards, set_aside, scored.logged)

    def begin(
        self, starts: Sequence[Sequence[Prompt]], group_sizes: Sequence[int]
    ) -> SingleTurnPlay:
        """Begin a play of one turn for N agents."""
        return SingleTurnPlay(self, starts, group_sizes)

    def limit_context(self, max_context_length: int, answer_tokens: int | None = None) -> None:
        """Set the model's context; refuse, drop or cut longer prompts, as `env.too_long` says.

        `max_context_length`, >= 2, is the number of tokens of prompt and completion together.
        `answer_tokens` is the number that `too_long: truncate_left` leaves for a completion; None
        leaves the tokens of a usual answer.

        Raises:
            PromptTooLongError: A prompt is too long; the error names the first by its row.
            DataError: `env.too_long: drop` leaves a split without rows.
        """
        answer_tokens = answer_tokens or self._answer_tokens
        limits = max_context_length, answer_tokens
        if self.given.too_long != "error" and self._limits != limits:
            self._limits = limits
            self._render(self.given, answer_tokens)  # undoes an earlier limit
            if self.given.too_long == "drop":
                self._drop(max_context_length - 1)
        for rendered in self._by_name.values():
            rendered.limit(max_context_length)

    def _drop(self, most: int) -> None:
        """Leave out the rows whose prompt has more than `most` tokens."""
        fitting = fitting_rows(list(self._by_name.values()), self.task.splits, most)
        total = sum(map(len, self.task.splits.values()))
        if dropped := total - sum(map(len, fitting.values())):
            warnings.warn(
                f"env.too_long: {dropped} of {total} rows are left out, whose prompts have more "
                f"than {most} tokens",
                UserWarning,
                stacklevel=3,
            )
            self._render(replace(self.task, splits=fitting), self._answer_tokens)

    def close(self) -> None:
        """End the process in which the reward functions run, if there is one."""
        if self._process is not None:
            self._process.close()

    def _samples(self, groups: Sequence[CompletionGroup]) -> scoring.Samples | None:
        """Return the samples that functions in TRL's style get, or None without such functions."""
        if not self.of_trl:
            return None
        messages: list[Any] = []
        for group in groups:
            rendered_prompts = next(
                rendered
                for rendered in self._by_name.values()
                if rendered.of_row(group.prompt).text == group.prompt.text
            )
            messages += [rendered_prompts.messages(group.prompt)] * len(group.completions)
        ids = [completion.token_ids for group in groups for completion in group.completions]
        step = min((group.prompt.step for group in groups), default=0)
        return scoring.Samples(ids, messages, step)

    def _scored(self, groups: Sequence[CompletionGroup]) -> scoring.Scored:
        prompts = [group.prompt for group in groups for _ in group.completions]
        answers = [completion.text for group in groups for completion in group.completions]
        columns = [prompt.columns for prompt in prompts]
        texts = [prompt.text for prompt in prompts]
        if (tags := self.task.thinking) is not None:
            parts = [parted(*pair, tags) for pair in zip(answers, texts, strict=True)]
            answers = [answer for _, answer in parts]
            rows_and_parts = zip(columns, parts, strict=True)
            columns = [{**row, COLUMN: thought} for row, (thought, _) in rows_and_parts]
        places = [place_of(prompt.columns, f"row {prompt.index}") for prompt in prompts]
        batch = scoring.CompletionBatch(answers, columns, texts, places, self._samples(groups))
        if self._process is not None:
            with self._shared:
                scored = self._process.score(batch)
        else:
            scored = scoring.score_batch(self._functions, batch, self.task.calls)
        if len(self._functions) < len(self.task.rewards):
            scored = scoring.with_scorers(self.task.rewards, scored, batch, self.task.calls)
        scoring.warn_of_silence(self.task.rewards, scored)
        return scored

    def _order(self, split: Split, purpose: str, epoch: int) -> list[int]:
        rows = len(self.task.splits[split])
        return generator(self.seed, "prompts", split, purpose, epoch).permutation(rows).tolist()


class Judged(NamedTuple):
    """The rewards of groups of completions, of which some may be set aside.

    Attributes:
        rewards: (B, K) without weights, NaN in groups that are set aside.
        aside: For each group, whether it is set aside.
        logged: Mean of each metric that functions in TRL's style logged, by name.
    """

    rewards: Floats
    aside: list[bool]
    logged: Mapping[str, float]


@final
class SingleTurnPlay:
    """A play of one turn: asks once, and scores the completions of all agents together.

    For each agent, `prompts` has its prompts, and `group_sizes` has G, its completions per prompt.
    """

    def __init__(
        self,
        env: ReasoningGym,
        prompts: Sequence[Sequence[Prompt]],
        group_sizes: Sequence[int],
    ) -> None:
        self._env = env
        self._request = Ask(prompts, group_sizes)
        self._groups: Sequence[Sequence[CompletionGroup]] | None = None

    def ask(self) -> Ask | None:
        """Return the prompts of all agents, or None after `tell`."""
        return self._request if self._groups is None else None

    def tell(self, groups: Sequence[Sequence[CompletionGroup]]) -> None:
        """Keep the completions for `experiences`."""
        self._groups = groups

    def experiences(self) -> list[Experience]:
        """Score the completions of all agents, and return one experience per agent."""
        groups = self._groups or []
        judged = map(self._env.judge, groups) if self._env.of_trl else self._together(groups)
        return [
            Experience(
                tuple(t for group in agent_groups for t in _trajectories(group)),
                scores,
                {
                    "set_aside": float(sum(set_aside)),
                    **scoring.reward_of_each(self._env.reward_names, scores),
                    **{f"{LOGGED}{name}": value for name, value in logged.items()},
                },
            )
            for agent_groups, (scores, set_aside, logged) in zip(groups, judged, strict=True)
        ]

    def _together(self, groups: Sequence[Sequence[CompletionGroup]]) -> list[Judged]:
        """Score the completions of all agents by one call, and return the rewards of each agent."""
        rewards, set_aside, logged = self._env.judge([group for batch in groups for group in batch])
        ends = np.cumsum([sum(len(g.completions) for g in batch) for batch in groups])[:-1]
        flags = iter(set_aside)
        return [
            Judged(scores, [next(flags) for _ in batch], logged)
            for batch, scores in zip(groups, np.split(rewards, ends), strict=True)
        ]


def _trajectories(group: CompletionGroup) -> list[Trajectory]:
    prompt = group.prompt
    answer = right_answer(prompt.columns)
    return [
        Trajectory(
            prompt=prompt.text,
            text=completion.text,
            token_ids=prompt.token_ids + completion.token_ids,
            mask=(False,) * len(prompt.token_ids) + (True,) * len(completion.token_ids),
            logprobs=completion.logprobs,
            ended=completion.ended,
            answer=answer,
            row=prompt.columns,
        )
        for completion in group.completions
    ]


def judge_cost(env: object) -> float:
    """Return the cost of an environment's judges in this process; 0 without a judge."""
    judges = env.judges.values() if isinstance(env, ReasoningGym) else ()
    return sum((judge.spent()["cost"] for judge in judges), 0.0)


def right_answer(columns: Mapping[str, Any]) -> str:
    """Return as text the value of the first of the columns `ANSWERS` that a row has, or ""."""
    answer = next((columns[name] for name in ANSWERS if name in columns), None)
    return str(answer) if isinstance(answer, str | int | float) else ""

"""DatasetEnv: a task of one turn on the user's own rows, without a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from evo_grpo.envs.data.bounded import MAX_GIGABYTES
from evo_grpo.envs.data.dataset import dataset_task, default_template
from evo_grpo.envs.data.tables import read_rows
from evo_grpo.envs.from_config import configured_template
from evo_grpo.envs.loading import REWARD, load_function
from evo_grpo.envs.prompting import with_prompting
from evo_grpo.envs.prompts import Messages
from evo_grpo.envs.rewards.from_settings import made_of
from evo_grpo.envs.rewards.functions import RewardFunction, as_rewards
from evo_grpo.envs.task import SPLITS, DatasetRow, Split, Task
from evo_grpo.settings import EnvConfig
from evo_grpo.settings.keywords import unknown_keyword
from evo_grpo.settings.rewards import JudgeReward, ModelReward

Reward = Callable[..., Any] | RewardFunction | ModelReward | JudgeReward | Mapping[str, Any] | str


@final
class DatasetEnv:
    r"""Your own rows and rewards: a prompt, a completion, a reward.

    It is the task `dataset` of a configuration, with rows and functions in place of their names. It
    has neither a tokenizer nor a seed: the agents that train on it have both. The number of prompts
    per step is their `prompts_per_step`.

    Args:
        train: Rows to learn from: a list of mappings, a pandas frame, a datasets.Dataset, or the
            path of a CSV, TSV, JSON, JSONL or Parquet file.
        reward: One reward function or several: functions, `RewardFunction`s, or names such as
            "my_rewards:score". See `RewardFunction` for their arguments and results.
        validation: Rows that selection uses; types as for `train`. None holds out a tenth of the
            prompts of `train`.
        test: Rows evaluated once, at the end; types and None as for `validation`.
        prompt: A raw template such as "{question}\nA:". Braces name columns.
        conversation: Messages such as [{"role": "user", "content": "Q: {question}"}] for the chat
            template, in place of `prompt`. With neither, the column "prompt" or "question" is the
            message of the user.
        reward_weights: One factor per reward function, or some by name; 1 for all others.
        name: Name in messages and records.
        **settings: Other keys of `env` in YAML, such as `reward_timeout`.

    Attributes:
        settings: The settings of the task as in YAML, without rows and functions.

    Raises:
        DataError: Rows are missing, empty, too few to hold any out, or lack a column.
        ConfigError: A template, a reward function or a setting is malformed.
    """

    def __init__(
        self,
        train: object,
        reward: Reward | Sequence[Reward],
        *,
        validation: object = None,
        test: object = None,
        prompt: str | None = None,
        conversation: Messages | None = None,
        reward_weights: Sequence[float] | Mapping[str, float] | None = None,
        name: str = "dataset",
        **settings: Any,
    ) -> None:
        for keyword in settings:
            if keyword not in _SETTINGS:
                known = dict.fromkeys((*_OWN, *_SETTINGS))
                raise unknown_keyword("DatasetEnv", keyword, known)
        self.name = name
        sources: dict[Split, object] = {"train": train, "validation": validation, "test": test}
        most = settings.get("max_data_gb", MAX_GIGABYTES)
        self._rows: dict[Split, list[DatasetRow]] = {
            split: list(read_rows(sources[split], split, most))
            for split in SPLITS
            if split == "train" or sources[split] is not None
        }
        if prompt is None and conversation is None:
            conversation = default_template(self._rows["train"][0])
        self.settings = EnvConfig(
            kind="dataset",
            prompt=prompt,
            conversation=conversation,  # pyright: ignore[reportArgumentType] -- pydantic reads the mappings
            reward_weights=reward_weights,  # pyright: ignore[reportArgumentType] -- as above
            **settings,
        )
        self._rewards = as_rewards(_functions(reward), reward_weights)
        self.task(0)  # to find errors here, and not when training begins

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(rows)} {split}" for split, rows in self._rows.items())
        rewards = ", ".join(reward.name for reward in self._rewards)
        return f"DatasetEnv({self.name!r}: {counts}; {rewards})"

    def task(self, seed: int) -> Task:
        """Return the task; which rows are held out follows from the seed."""
        task = dataset_task(
            seed, self._rows, configured_template(self.settings), self._rewards, name=self.name
        )
        task = replace(task, calls=self.settings.calls())
        return with_prompting(task, self.settings.prompting(), seed)


_OWN = ("train", "reward", "validation", "test", "prompt", "conversation", "reward_weights", "name")
_SETTINGS = [n for n in EnvConfig.model_fields if n not in (*_OWN, "kind", "args", "max_turns")]


def _functions(
    reward: Reward | Sequence[Reward],
) -> list[Any]:
    several = [reward] if isinstance(reward, str) or not isinstance(reward, Sequence) else reward
    return [load_function(one, REWARD) if isinstance(one, str) else made_of(one) for one in several]

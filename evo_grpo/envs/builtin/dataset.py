"""The kind `dataset`: rows, prompt template and reward functions of the user; and `DatasetEnv`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from evo_grpo.envs.conversations import MESSAGES, holds_messages
from evo_grpo.envs.data.tables import (
    MAX_GIGABYTES,
    SPLITS,
    DatasetRow,
    Split,
    place_of,
    read_rows,
    require_columns,
)
from evo_grpo.envs.family import Family
from evo_grpo.envs.loading import Loader, as_rewards, configured_rewards, load_function
from evo_grpo.envs.messages import listed
from evo_grpo.envs.prompting import configured_template, with_prompting
from evo_grpo.envs.prompts import Messages, Template
from evo_grpo.envs.rewards.functions import RewardFunction, Scorer, required_columns
from evo_grpo.envs.task import Task
from evo_grpo.envs.thinking import COLUMN
from evo_grpo.errors import ConfigError, DataError
from evo_grpo.seeding import generator
from evo_grpo.settings import EnvConfig, algorithm, keywords, objects
from evo_grpo.settings.rewards import JudgeReward, ModelReward

FAMILY = Family(reads=SPLITS)

RewardSettings = ModelReward | JudgeReward | Mapping[str, Any]
OneReward = Callable[..., Any] | RewardFunction | RewardSettings | str
Rewards = OneReward | Sequence[OneReward]

HELD_OUT = 0.1
"""Share of the prompts of train that each missing split takes."""
FEWEST_TO_DIVIDE = 10
"""Fewest different prompts in train of which a tenth can be held out."""

_OF_OTHER_KINDS = {"kind", "args", "max_turns"}


@final
class DatasetEnv:
    r"""A task of one turn on your own rows and reward functions: a prompt, a completion, a reward.

    It is the task `dataset` of a configuration, but takes rows and functions, not only their names.
    The agents that train on it supply the tokenizer, the seed and `prompts_per_step`.

    Args:
        train: Rows to learn from: a list of mappings, a pandas frame, a datasets.Dataset, or the
            path of a CSV, TSV, JSON, JSONL or Parquet file. A datasets.DatasetDict stands for its
            splits train, validation and test.
        reward: One reward function or several: functions, `RewardFunction`s, or names such as
            "my_rewards:score". See `RewardFunction` for their arguments and results.
        validation: Rows that selection uses; types as for `train`. None holds out a tenth of the
            prompts of `train`.
        test: Rows of the final evaluation; types and None as for `validation`.
        prompt: A raw template such as "{question}\nA:". Braces name columns.
        conversation: Messages such as [{"role": "user", "content": "Q: {question}"}] for the chat
            template, in place of `prompt`. With neither, the column "prompt", "question" or
            "messages" holds the user's message, or a conversation.
        reward_weights: One factor per reward function, or factors by name. A function without one
            keeps its own weight, by default 1.
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
        reward: Rewards,
        *,
        validation: object = None,
        test: object = None,
        prompt: str | None = None,
        conversation: Messages | None = None,
        reward_weights: Sequence[float] | Mapping[str, float] | None = None,
        name: str = "dataset",
        **settings: Any,
    ) -> None:
        for keyword in _OF_OTHER_KINDS & settings.keys():
            known = {key: None for key in EnvConfig.model_fields if key not in _OF_OTHER_KINDS}
            raise keywords.unknown_keyword("DatasetEnv", keyword, known)
        self.name = name
        sources = objects.by_splits({"train": train, "validation": validation, "test": test})
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
        self._rewards = as_rewards(reward, reward_weights, style=self.settings.reward_style)
        self.task(0)  # to find errors here, and not when training begins

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(rows)} {split}" for split, rows in self._rows.items())
        rewards = ", ".join(reward.name for reward in self._rewards)
        return f"DatasetEnv({self.name!r}: {counts}; {rewards})"

    def task(self, seed: int) -> Task:
        """Return the task; the seed decides which rows are held out."""
        settings, template = self.settings, configured_template(self.settings)
        task = dataset_task(
            seed, self._rows, template, self._rewards, name=self.name, thinking=settings.thinking
        )
        return with_prompting(replace(task, calls=settings.calls()), settings.prompting(), seed)


def build(name: str, env: EnvConfig, seed: int, load: Loader = load_function) -> Task:
    """Build the task of `env`, with the user's rows, template and reward functions."""
    del name
    rewards = configured_rewards(env, load)
    if not rewards or env.args:
        why = 'reward: kind "dataset" needs a reward function, expected "module:function", got none'
        if rewards:
            why = f'args: kind "dataset" takes none, got {listed(env.args)}'
        raise ConfigError(f"env.{why}")
    sources: dict[Split, Any] = {split: getattr(env, split) for split in SPLITS}
    return dataset_task(
        seed,
        sources,
        configured_template(env),
        rewards,
        thinking=env.thinking,
        gigabytes=env.max_data_gb,
    )


def dataset_task(  # noqa: PLR0913 -- all but the first four have defaults
    seed: int,
    sources: Mapping[Split, Any],
    template: str | Messages | None,
    rewards: Sequence[RewardFunction],
    *,
    name: str = "dataset",
    max_output_tokens: int = algorithm.DEFAULT_OUTPUT_TOKENS,
    validation_from_few: bool = False,
    thinking: object = None,
    gigabytes: float = MAX_GIGABYTES,
) -> Task:
    """Build a task: read its splits, hold out rows for missing splits, and check the columns.

    A missing validation or test split takes a tenth of the prompts of train by a seeded shuffle; no
    prompt is in two splits. With `validation_from_few`, if only the validation split is missing, it
    uses the train rows if these have fewer than ten different prompts. `sources` maps a split to a
    source for `tables.read_rows` or None; train is required. If `template` is None,
    `default_template` makes one from the first row. With `thinking` tags, the parameter `thinking`
    of a reward function needs no column.
    """
    sources = objects.by_splits(sources)
    rows: dict[Split, Sequence[DatasetRow]] = {
        split: read_rows(sources[split], split, gigabytes)
        for split in SPLITS
        if sources.get(split) is not None
    }
    if "train" not in rows:
        raise DataError("env.train: expected a dataset to learn from, got none")
    prompt_template = Template.of(
        default_template(rows["train"][0]) if template is None else template
    )
    texts: dict[Split, list[str]] = {}
    for split, raw_rows in rows.items():
        rows[split], texts[split] = prompt_template.fitted(raw_rows, split)
    prompts = texts["train"]
    needs = required_columns(rewards, thinking)
    for split, fitted_rows in rows.items():
        require_columns(fitted_rows, needs, split)
    thoughts = {} if thinking is None else {COLUMN: ""}
    first_row = rows["train"][0]
    _try_templates(rewards, {**first_row, **thoughts}, place_of(first_row, "train, row 0"))
    missing: list[Split] = [split for split in SPLITS if split not in rows]
    too_few = validation_from_few and len(set(prompts)) < FEWEST_TO_DIVIDE
    if too_few and missing == ["validation"]:
        rows["validation"] = rows["train"]
    elif missing:
        rows |= _hold_out(rows["train"], prompts, missing, seed)
    return Task(
        name=name,
        splits=rows,
        rewards=tuple(rewards),
        templates={None: prompt_template},
        max_output_tokens=max_output_tokens,
    )


def _try_templates(rewards: Sequence[RewardFunction], row: DatasetRow, place: str) -> None:
    """Fill in the templates of judges and reward models with a row, to find errors early."""
    for reward in rewards:
        if isinstance(reward.fn, Scorer):
            try:
                reward.fn.fill({**row, "completion": "", "prompt": ""})
            except DataError as error:
                raise DataError(f"env.reward: {reward.name}: {place}: {error}") from error


def default_template(row: DatasetRow) -> Messages:
    """Return a template of the first of the columns "prompt", "question", "messages" in `row`."""
    for column in ("prompt", "question", MESSAGES):
        if column in row:
            role = MESSAGES if holds_messages(row[column]) else "user"
            return [{"role": role, "content": f"{{{column}}}"}]
    raise DataError(
        'train: no column "prompt", "question" or "messages" to ask with; say what to ask in '
        "env.prompt (conversation_template in Python) with its columns: "
        f"{', '.join(map(str, row))}"
    )


def _hold_out(
    train: Sequence[DatasetRow], texts: Sequence[str], missing: Sequence[Split], seed: int
) -> dict[Split, Sequence[DatasetRow]]:
    different = len(set(texts))
    if different < FEWEST_TO_DIVIDE:
        settings = " and ".join(f"env.{split}" for split in missing)
        raise DataError(
            f"train: {different} different prompts are too few to hold out "
            f"{' and '.join(missing)}: expected at least "
            f"{FEWEST_TO_DIVIDE}; give {settings} (the same file, if nothing is to be held out)"
        )
    held_out = max(1, round(different * HELD_OUT))
    shares = {split: held_out for split in missing} | {"train": different - held_out * len(missing)}
    text_of = dict(zip(map(id, train), texts, strict=True))
    divided = divide(train, shares, lambda row: text_of[id(row)], seed)
    return {split: divided[split] for split in ("train", *missing)}


def divide(
    rows: Sequence[DatasetRow],
    shares: Mapping[str, int],
    key: Callable[[DatasetRow], str],
    seed: int,
) -> dict[str, list[DatasetRow]]:
    """Divide rows among splits by a seeded shuffle; rows with the same key stay together.

    If all keys differ and the shares add up to the number of rows, every split gets exactly its
    share. Otherwise shares are proportions, >= 0, and a split with a share above 0 gets at least
    one key. Splits take the shuffled keys in the order of the shares.
    """
    rows_by_key: dict[str, list[DatasetRow]] = {}
    for row in rows:
        rows_by_key.setdefault(key(row), []).append(row)
    keys = list(rows_by_key)
    nonempty_splits = [name for name, share in shares.items() if share]
    if len(keys) < len(nonempty_splits):
        raise DataError(
            f"{len(rows)} rows with {len(keys)} different prompts cannot be divided into "
            f"{listed(nonempty_splits)}: "
            "a prompt must not be in two splits; add rows, or give every split its own file"
        )
    order = generator(seed, "divide").permutation(len(keys))
    divided: dict[str, list[DatasetRow]] = {}
    start, total = 0, sum(shares.values())
    for position, (name, share) in enumerate(shares.items()):
        splits_after = sum(1 for later in list(shares.values())[position + 1 :] if later)
        if splits_after == 0:
            count = len(keys) - start if share else 0
        else:
            count = round(len(keys) * share / total)
            count = min(max(count, 1 if share else 0), len(keys) - start - splits_after)
        key_indices = order[start : start + count]
        divided[name] = [row for index in key_indices for row in rows_by_key[keys[index]]]
        start += count
    return divided

"""The kind `dataset`: rows, prompt template and reward functions of the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evo_grpo.envs.conversations import MESSAGES, holds_messages
from evo_grpo.envs.data.rows import place_of
from evo_grpo.envs.data.tables import divide, read_rows, require_columns
from evo_grpo.envs.from_config import configured_rewards, configured_template
from evo_grpo.envs.loading import Loader, load_function
from evo_grpo.envs.messages import listed
from evo_grpo.envs.prompts import Messages, Template
from evo_grpo.envs.rewards.functions import RewardFunction
from evo_grpo.envs.rewards.scorer import Scorer
from evo_grpo.envs.task import SPLITS, DatasetRow, Split, Task
from evo_grpo.envs.thinking import COLUMN
from evo_grpo.errors import ConfigError, DataError
from evo_grpo.settings.algorithm import DEFAULT_OUTPUT_TOKENS

if TYPE_CHECKING:
    from evo_grpo.settings import EnvConfig

HELD_OUT = 0.1
"""Share of the prompts of train that each missing split takes."""
FEWEST_TO_DIVIDE = 10
"""Fewest different prompts in train of which a tenth can be held out."""


def build(name: str, env: EnvConfig, seed: int, load: Loader = load_function) -> Task:
    """Build the task of a configuration with the user's rows, template and reward functions."""
    del name
    rewards = configured_rewards(env, load)
    if not rewards:
        raise ConfigError(
            'env.reward: kind "dataset" needs a reward function, expected "module:function", got '
            "none"
        )
    if env.args:
        raise ConfigError(f'env.args: kind "dataset" takes none, got {listed(env.args)}')
    sources: dict[Split, Any] = {
        split: read_rows(source, split, env.max_data_gb)
        for split in SPLITS
        if (source := getattr(env, split)) is not None
    }
    provided = (COLUMN,) if env.thinking is not None else ()
    return dataset_task(seed, sources, configured_template(env), rewards, provided=provided)


def dataset_task(
    seed: int,
    sources: Mapping[Split, Any],
    template: str | Messages | None,
    rewards: Sequence[RewardFunction],
    *,
    name: str = "dataset",
    max_output_tokens: int = DEFAULT_OUTPUT_TOKENS,
    validation_from_few: bool = False,
    provided: Sequence[str] = (),
) -> Task:
    """Read the splits, hold out missing ones, and check the columns.

    A missing validation or test split takes a tenth of the prompts of train, by a seeded shuffle.
    No prompt is in two splits.

    Args:
        seed: Seed of the shuffle.
        sources: Split -> a source of `tables.read_rows`, or None; train is required.
        template: A raw template or messages; None takes the column "prompt" or else "question" as
            the user's message.
        rewards: The reward functions.
        name: The task's name.
        max_output_tokens: See `Task`.
        validation_from_few: Whether a missing validation split uses the train rows if there are too
            few prompts to hold any out.
        provided: Parameters of reward functions that are no columns.
    """
    rows: dict[Split, Sequence[DatasetRow]] = {
        split: read_rows(sources[split], split)
        for split in SPLITS
        if sources.get(split) is not None
    }
    if "train" not in rows:
        raise DataError("env.train: expected a dataset to learn from, got none")
    made = Template.of(default_template(rows["train"][0]) if template is None else template)
    texts: dict[Split, list[str]] = {}
    for split, own in rows.items():
        rows[split], texts[split] = made.fitted(own, split)
    prompts = texts["train"]
    needs = dict[str, str]()
    for reward in rewards:
        needs |= reward.required_columns()
    needs = {name: who for name, who in needs.items() if name not in provided}
    for split, its_rows in rows.items():
        require_columns(its_rows, needs, split)
    _try_templates(rewards, rows["train"][0])
    missing: list[Split] = [split for split in SPLITS if split not in rows]
    few = validation_from_few and len(set(prompts)) < FEWEST_TO_DIVIDE
    if few and missing == ["validation"]:
        rows["validation"] = rows["train"]
    elif missing:
        rows |= _hold_out(rows["train"], prompts, missing, seed)
    return Task(
        name=name,
        splits=rows,
        rewards=tuple(rewards),
        prompt=made.text,
        conversation=made.conversation,
        max_output_tokens=max_output_tokens,
    )


def _try_templates(rewards: Sequence[RewardFunction], row: DatasetRow) -> None:
    """Fill in the templates of judges and reward models with the first row, before any training."""
    for reward in rewards:
        if isinstance(reward.fn, Scorer):
            try:
                reward.fn.fill({**row, "completion": "", "prompt": ""})
            except DataError as error:
                place = place_of(row, "train, row 0")
                raise DataError(f"env.reward: {reward.name}: {place}: {error}") from error


def default_template(row: DatasetRow) -> Messages:
    """Return the template for a dataset without one.

    The column "prompt", "question" or "messages" is the message of the user, or the conversation.
    """
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
        named = " and ".join(f"env.{split}" for split in missing)
        raise DataError(
            f"train: {different} different prompts are too few to hold out "
            f"{' and '.join(missing)}: expected at least "
            f"{FEWEST_TO_DIVIDE}; give {named} (the same file, if nothing is to be held out)"
        )
    held_out = max(1, round(different * HELD_OUT))
    shares = {split: held_out for split in missing} | {"train": different - held_out * len(missing)}
    text_of = dict(zip(map(id, train), texts, strict=True))
    divided = divide(train, shares, lambda row: text_of[id(row)], seed)
    return {split: divided[split] for split in ("train", *missing)}

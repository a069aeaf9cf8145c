"""The group `env`: the task, its prompts and its rewards."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from typing import Any, ClassVar

from evo_grpo.schema.group import Group, OptionalStrings, PlainMapping, setting


class Message(Group):
    """One message of a conversation."""

    role: str = setting(meaning="`system`, `user` or `assistant`.", min_length=1)
    content: str = setting(meaning="A template; `{column}` takes the value of the row.")


class EnvConfig(Group):
    """The task: prompts and rewards. A plain string is its kind: `env: sums`."""

    shorthand: ClassVar[str | None] = "kind"

    kind: str = setting(
        meaning="`sums`, `foods`, `dataset` (your own rows and reward), `reasoning_gym:<name>`, or "
        "an environment of several turns: `gem:<id>`, `textarena:<id>`, `verifiers:<id>`, "
        "`trl:<module:class>`, `python:<module:function>`.",
        min_length=1,
    )
    args: PlainMapping = setting(
        factory=dict[str, Any],
        meaning="Keyword arguments of the task, for instance `{min_terms: 2, max_terms: 2}`.",
    )
    train: str | None = setting(
        None,
        "Rows to learn from: a CSV, JSON, JSONL or Parquet file. Kind `dataset` needs it, the "
        "others bring their own rows.",
        min_length=1,
    )
    validation: str | None = setting(
        None, "Rows for selection; null holds out a part of `train`.", min_length=1
    )
    test: str | None = setting(
        None, "Rows judged once, at the end; null holds out a part of `train`.", min_length=1
    )
    prompt: str | None = setting(
        None,
        'A raw template such as `"{question}\\nA:"`; null takes the task\'s own.',
        min_length=1,
    )
    conversation: list[Message] | None = setting(
        None,
        "Messages `{role, content}` that go through the tokenizer's chat template, instead of "
        "`prompt`.",
        min_length=1,
    )
    reward: OptionalStrings = setting(
        None,
        "Reward function `module:function`, or a list of them. Kind `dataset` needs it; null takes "
        "the task's own.",
    )
    reward_weights: list[float] | None = setting(
        None, "One weight per reward function; null weighs all 1."
    )
    max_turns: int = setting(
        16,
        "Completions after which an episode is over, in environments of several turns; tasks of "
        "one turn refuse any but the default.",
        ge=1,
    )

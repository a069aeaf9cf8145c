"""The group `env`: the task, its prompts and its rewards."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from typing import Any, ClassVar, Literal

from evo_grpo.schema.group import Group, OptionalStrings, PlainMapping, same_as, setting


class Message(Group):
    """One message of a conversation."""

    role: str = setting(meaning="`system`, `user` or `assistant`.", min_length=1)
    content: str = setting(meaning="A template; `{column}` takes the value of the row.")


class RewardCalls(Group):
    """How reward functions are called, and how many of their failures a run survives."""

    reward_timeout: float | None = setting(
        60.0,
        "Seconds that one call of a reward function or an environment may take, async too; a "
        "longer one ends the run with its name, row and prompt. null waits for ever.",
        gt=0,
        le=1e6,
    )
    reward_failures: float = setting(
        0.1,
        "A reward that is NaN, infinite or beyond 1e15 sets its group aside, for nothing is "
        "learned from it. The run ends when more than this share of the latest 100 groups was set "
        "aside; 0 ends it at the first.",
        ge=0,
        le=1,
    )
    reward_errors: Literal["stop", "set_aside"] = setting(
        "stop",
        "What an exception of a reward function, or a result that is no number, does: `stop` ends "
        "the run, `set_aside` counts as `reward_failures` says.",
    )
    isolate: Literal["process"] | None = setting(
        None,
        "`process` calls reward functions in a process of their own, which is stopped where one "
        "hangs, and which may exit or fork without harm; they must be importable by name.",
    )


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
    reward_timeout: float | None = same_as(RewardCalls, "reward_timeout")
    reward_failures: float = same_as(RewardCalls, "reward_failures")
    reward_errors: Literal["stop", "set_aside"] = same_as(RewardCalls, "reward_errors")
    isolate: Literal["process"] | None = same_as(RewardCalls, "isolate")

    def calls(self) -> RewardCalls:
        """Return how reward functions are called."""
        return RewardCalls(**{name: getattr(self, name) for name in RewardCalls.model_fields})

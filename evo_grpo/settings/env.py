"""The group `env`: the environment, its rewards and its prompts."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BeforeValidator, model_validator

from evo_grpo.schema.group import Group, PlainMapping, only, plain, recorded, same_as, setting
from evo_grpo.schema.problems import Problem, Problems, unknown_name
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.schema.validation import is_number, is_whole
from evo_grpo.settings.objects import PythonObject, Source, by_splits
from evo_grpo.settings.rewards import Message, ModelReward, Reward, Rewards


def _are_examples(value: object) -> bool:
    """Return whether a value of `few_shot.rows` is a number of rows, or the rows themselves."""
    if isinstance(value, list):
        rows = cast("list[object]", value)
        return bool(rows) and all(isinstance(row, Mapping) for row in rows)
    return is_whole(value) and cast("int", value) >= 1


Examples = Annotated[
    int | list[dict[str, Any]],
    BeforeValidator(lambda value: recorded(plain(value))),
    only(_are_examples, "an integer >= 1, or a list of rows, each a mapping of column to value"),
]


class FewShot(Group):
    """Solved examples in front of each question."""

    rows: Examples = setting(
        meaning="Number of rows of `train` that become examples and are no longer trained on; or "
        "the rows themselves, each with the columns of the question and of `answer`."
    )
    answer: str = setting(
        meaning="Template of the answer to an example, for instance `{answer}`.", min_length=1
    )
    separator: str = setting(
        "\n\n", "Text after each example of a raw `prompt`; messages need none."
    )


def without_rows(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which the few-shot rows are replaced by their number and digest."""
    env = settings.get("env")
    shots = cast("Mapping[str, Any]", env).get("few_shot") if isinstance(env, Mapping) else None
    rows = cast("Mapping[str, Any]", shots).get("rows") if isinstance(shots, Mapping) else None
    if not isinstance(rows, list):
        return dict(settings)
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
    summary = f"{len(cast('list[object]', rows))} rows, sha256 {digest[:8]}"
    few_shot = {**cast("dict[str, Any]", shots), "rows": summary}
    return {**settings, "env": {**cast("dict[str, Any]", env), "few_shot": few_shot}}


class ThinkingTags(Group):
    """The tags around what a model writes before its answer. `{}` takes the defaults."""

    start: str = setting("<think>", "Text that begins the thinking part.", min_length=1)
    end: str = setting("</think>", "Text that ends the thinking part.", min_length=1)


class NamedPrompt(Group):
    """One of several prompts of a task. A plain string is its system prompt; `{}` adds nothing."""

    shorthand: ClassVar[str | None] = "system_prompt"

    system_prompt: str | None = setting(
        None, "A system message in front of the messages, as `env.system_prompt`.", min_length=1
    )
    prompt: str | None = setting(None, "A raw template in place of the task's.", min_length=1)
    conversation: list[Message] | None = setting(
        None, "Messages `{role, content}` in place of the task's.", min_length=1
    )

    @model_validator(mode="after")
    def _one_template(self) -> Self:
        if self.prompt is not None and self.conversation is not None:
            raise Problems.one("expected prompt or conversation, got both; remove one")
        return self


TooLong = Literal["error", "drop", "truncate_left"]
PROMPTS = "env.prompts"
"""The setting that has the prompts by name."""


def prompt_problems(space: HyperparameterConfig, known: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each searched prompt not in `known`; paths begin at the ranges."""
    searched = space["prompt"].choices or () if "prompt" in space.names() else ()
    for name in searched:
        if name not in known:
            yield Problem(("prompt", "choices"), unknown_name(str(name), known, PROMPTS))


Prompts = Annotated[
    dict[str, NamedPrompt] | None,
    only(
        lambda value: value is None or (isinstance(value, Mapping) and value and all(value)),
        'a mapping of at least one name to a prompt, such as {short: "Be brief."}',
    ),
]


class PromptSettings(Group):
    """What surrounds a question, and which part of a completion is the answer."""

    prompts: Prompts = setting(
        None,
        "Prompts by name, of which `evolve.hyperparameters.prompt` searches the best: each is a "
        "system prompt, or a mapping with `prompt`, `conversation` or `system_prompt` as in `env`. "
        "The first one is that of all agents where none is searched, and of the base model.",
    )

    system_prompt: str | None = setting(
        None,
        "A system message in front of the messages of the task; a template like `conversation`.",
        min_length=1,
    )
    few_shot: FewShot | None = setting(
        None, "Solved examples in front of each question; null has none."
    )
    chat_template_kwargs: PlainMapping = setting(
        factory=dict[str, Any],
        meaning="Keyword arguments of the tokenizer's chat template, for instance "
        "`{enable_thinking: false}` for Qwen3.",
    )
    too_long: TooLong = setting(
        "error",
        "What happens to a row whose prompt leaves no room for a completion in the context. "
        "`error` refuses it by its line; `drop` leaves it out; `truncate_left` keeps the last "
        "tokens of the prompt, so that `max_output_tokens` fit behind them.",
    )
    thinking: ThinkingTags | None = setting(
        None,
        "Tags that part a completion into thinking and answer: reward functions get the answer as "
        "`completion` and the rest as `thinking`. null: all of it is the answer.",
    )


def _weights(value: object) -> object:
    """Accept a list of numbers that are not all 0, or a mapping of names to numbers."""
    if isinstance(value, list | tuple):
        numbers = cast("list[Any]", list(value))
        if any(numbers) and all(map(is_number, numbers)):
            return [float(number) for number in numbers]
    if isinstance(value, Mapping):
        weights = cast("Mapping[Any, Any]", value)
        if weights and all(isinstance(name, str) and is_number(weights[name]) for name in weights):
            return {name: float(number) for name, number in weights.items()}
    if value is None:
        return None
    raise ValueError(
        "one number per reward function, not all of them 0, or a mapping of the names of reward "
        "functions to numbers"
    )


RewardWeights = Annotated[list[float] | dict[str, float] | None, BeforeValidator(_weights)]


class RewardCalls(Group):
    """How reward functions are called, and how many of their failures a run tolerates."""

    reward_timeout: float | None = setting(
        60.0,
        "Most seconds of one call of a reward function or an environment, also if it is async; a "
        "longer call ends the run with an error that names it, the row and the prompt. null waits "
        "forever.",
        gt=0,
        le=1e6,
    )
    reward_failures: float = setting(
        0.1,
        "Largest share of the latest 100 groups that may be set aside; the run ends when it is "
        "exceeded, and 0 ends it at the first. A group is set aside, and not learned from, when "
        "one of its rewards is NaN, infinite or beyond 1e15.",
        ge=0,
        le=1,
    )
    reward_errors: Literal["stop", "set_aside"] = setting(
        "stop",
        "Effect of an exception in a reward function, or of a result that is not a number: `stop` "
        "ends the run, `set_aside` sets the group aside; see `reward_failures`.",
    )
    reward_style: Literal["trl"] | None = setting(
        None,
        "`trl` calls reward functions as TRL's GRPOTrainer does, once for each agent: with "
        "`prompts` and `completions` (messages, where the model gets a conversation), "
        "`completion_ids`, all columns, `trainer_state`, `log_metric` and `log_extra`.",
    )
    isolate: Literal["process"] | None = setting(
        None,
        "`process` calls reward functions in a separate process, which is stopped if one hangs and "
        "may exit or fork without harming the run; the functions must be importable by name.",
    )


class EnvConfig(Group):
    """The task: prompts and rewards. A plain string is its kind: `env: sums`."""

    shorthand: ClassVar[str | None] = "kind"

    kind: str = setting(
        meaning="`sums`, `foods`, `dataset` (your own rows and reward), `python:<module:function>` "
        "(your own environment of several turns), or `<library>:<name>`, a task or game of a "
        "library such as `reasoning_gym:chain_sum`; the page Environments lists the libraries.",
        min_length=1,
    )
    args: PlainMapping = setting(
        factory=dict[str, Any],
        meaning="Keyword arguments of the task, for instance `{min_terms: 2, max_terms: 2}`.",
    )
    train: Source = setting(
        None,
        "Training rows: a CSV, JSON, JSONL or Parquet file, or a dataset of the Hugging Face Hub, "
        "such as `openai/gsm8k`; in Python also a list of mappings, a pandas frame or a "
        "`datasets.Dataset`, or a `DatasetDict`, which stands for its splits. Required for kind "
        "`dataset`; other kinds have their own rows.",
    )
    validation: Source = setting(
        None, "Rows that selection uses, as for `train`; null holds out a part of `train`."
    )
    test: Source = setting(
        None, "Rows evaluated once, at the end, as for `train`; null holds out a part of `train`."
    )
    max_data_gb: float = setting(
        1.0,
        "Most memory, in GB by an estimate, that the rows of a file or of a dataset of the Hub may "
        "take; a larger one is refused.",
        gt=0,
    )
    prompt: str | None = setting(
        None,
        'A raw template such as `"{question}\\nA:"`; null takes that of the task.',
        min_length=1,
    )
    conversation: list[Message] | None = setting(
        None,
        "Messages `{role, content}` for the tokenizer's chat template, instead of `prompt`.",
        min_length=1,
    )
    prompts: Prompts = same_as(PromptSettings, "prompts")
    system_prompt: str | None = same_as(PromptSettings, "system_prompt")
    few_shot: FewShot | None = same_as(PromptSettings, "few_shot")
    chat_template_kwargs: PlainMapping = same_as(PromptSettings, "chat_template_kwargs")
    too_long: TooLong = same_as(PromptSettings, "too_long")
    thinking: ThinkingTags | None = same_as(PromptSettings, "thinking")
    reward: Rewards = setting(
        None,
        "Reward function `module:function`, a reward model (`kind: model`), a judge (`kind: "
        "judge`), or a list of them; in Python also the functions themselves. Required for kind "
        "`dataset`; null takes that of the task.",
    )
    reward_weights: RewardWeights = setting(
        None,
        "One weight per reward function, or a mapping of their names to weights, for instance "
        "`{format: 0.2}`, also of those of the task; the functions that it leaves out, and all "
        "with null, have a weight of 1.",
    )
    max_turns: int = setting(
        16,
        "Most completions of an episode in a multi-turn environment; a single-turn task accepts "
        "only the default.",
        ge=1,
    )
    reward_timeout: float | None = same_as(RewardCalls, "reward_timeout")
    reward_failures: float = same_as(RewardCalls, "reward_failures")
    reward_errors: Literal["stop", "set_aside"] = same_as(RewardCalls, "reward_errors")
    reward_style: Literal["trl"] | None = same_as(RewardCalls, "reward_style")
    isolate: Literal["process"] | None = same_as(RewardCalls, "isolate")

    @model_validator(mode="before")
    @classmethod
    def _splits(cls, values: object) -> object:
        """Replace a `DatasetDict` under `train` by its splits."""
        return by_splits(cast("dict[str, Any]", values)) if isinstance(values, dict) else values

    @property
    def rewards(self) -> list[Reward]:
        """The entries of `reward`, as a list; empty if `reward` is null."""
        if self.reward is None:
            return []
        return list(self.reward) if isinstance(self.reward, list) else [self.reward]

    @property
    def reward_models(self) -> list[ModelReward]:
        """The reward models among the entries of `reward`."""
        return [reward for reward in self.rewards if isinstance(reward, ModelReward)]

    def calls(self) -> RewardCalls:
        """Return the settings of calls of reward functions."""
        return RewardCalls(**{name: getattr(self, name) for name in RewardCalls.model_fields})

    def prompting(self) -> PromptSettings:
        """Return the settings of prompts and answers."""
        return PromptSettings(**{name: getattr(self, name) for name in PromptSettings.model_fields})

    def objects(self) -> list[str]:
        """Return the settings given as Python objects, each with a description of its object."""
        return [
            f"env.{name} ({value.description})"
            for name, field in self
            for value in (field if isinstance(field, list) else [field])
            if isinstance(value, PythonObject)
        ]

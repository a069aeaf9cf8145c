"""Settings of `env` about what surrounds a question, and the parts of a completion."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BeforeValidator, model_validator

from evo_grpo.schema.group import Group, PlainMapping, plain, recorded, setting
from evo_grpo.schema.problems import Problem, Problems, unknown_name
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.schema.validation import is_whole
from evo_grpo.settings.rewards import Message


def _examples(value: object) -> object:
    """Accept a number of rows, or the rows themselves."""
    if is_whole(value) and cast("int", value) >= 1:
        return value
    rows = cast("list[object]", value) if isinstance(value, list) else []
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError("an integer >= 1, or a list of rows, each a mapping of column to value")
    return recorded(plain(value))


class FewShot(Group):
    """Solved examples in front of each question."""

    rows: Annotated[int | list[dict[str, Any]], BeforeValidator(_examples)] = setting(
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
    """Return settings with the number and the digest of rows in place of the user's rows."""
    env = settings.get("env")
    shots = cast("Mapping[str, Any]", env).get("few_shot") if isinstance(env, Mapping) else None
    rows = cast("Mapping[str, Any]", shots).get("rows") if isinstance(shots, Mapping) else None
    if not isinstance(rows, list):
        return dict(settings)
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
    told = f"{len(cast('list[object]', rows))} rows, sha256 {digest[:8]}"
    few_shot = {**cast("dict[str, Any]", shots), "rows": told}
    return {**settings, "env": {**cast("dict[str, Any]", env), "few_shot": few_shot}}


class ThinkingTags(Group):
    """The tags around what a model writes before its answer. `{}` has the defaults."""

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
    """Yield the prompts that are searched and not known, with paths below the ranges."""
    searched = space["prompt"].choices or () if "prompt" in space.names() else ()
    for one in searched:
        if one not in known:
            yield Problem(("prompt", "choices"), unknown_name(str(one), known, PROMPTS))


def _prompts(value: object) -> object:
    names = list(cast("Mapping[object, object]", value)) if isinstance(value, Mapping) else []
    if value is None or (names and all(names)):
        return value
    raise ValueError('a mapping of at least one name to a prompt, such as {short: "Be brief."}')


class PromptSettings(Group):
    """What surrounds a question, and which part of a completion is its answer."""

    prompts: Annotated[dict[str, NamedPrompt] | None, BeforeValidator(_prompts)] = setting(
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

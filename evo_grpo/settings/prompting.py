"""Settings of `env` about what surrounds a question, and the parts of a completion."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BeforeValidator

from evo_grpo.schema.group import Group, PlainMapping, plain, recorded, setting
from evo_grpo.schema.validation import is_whole


def _examples(value: object) -> object:
    """Accept a number of rows, or the rows themselves."""
    if is_whole(value) and cast("int", value) >= 1:
        return value
    rows = cast("list[object]", value) if isinstance(value, list) else []
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError("an integer >= 1, or a list of rows, each a mapping of column to value")
    return recorded(plain(value))


#: Keywords that a prompt gives the template itself, and those of tokenization.
_OWN_KEYWORDS = (
    *("messages", "conversation", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)


def _keywords(value: object) -> object:
    for name in cast("Mapping[str, object]", value) if isinstance(value, Mapping) else ():
        if name in _OWN_KEYWORDS:
            raise ValueError(
                "keywords that the template itself reads, such as enable_thinking, and not "
                f"{name}, which evo-grpo sets"
            )
    return value


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


class ThinkingTags(Group):
    """The tags around what a model writes before its answer. `{}` has the defaults."""

    start: str = setting("<think>", "Text that begins the thinking part.", min_length=1)
    end: str = setting("</think>", "Text that ends the thinking part.", min_length=1)


class PromptSettings(Group):
    """What surrounds a question, and which part of a completion is its answer."""

    system_prompt: str | None = setting(
        None,
        "A system message in front of the messages of the task; a template like `conversation`.",
        min_length=1,
    )
    few_shot: FewShot | None = setting(
        None, "Solved examples in front of each question; null has none."
    )
    chat_template_kwargs: Annotated[PlainMapping, AfterValidator(_keywords)] = setting(
        factory=dict[str, Any],
        meaning="Keyword arguments of the tokenizer's chat template, for instance "
        "`{enable_thinking: false}` for Qwen3.",
    )
    thinking: ThinkingTags | None = setting(
        None,
        "Tags that part a completion into thinking and answer: reward functions get the answer as "
        "`completion` and the rest as `thinking`. null: all of it is the answer.",
    )

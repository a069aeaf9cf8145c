"""Split a completion into its thinking part and its answer."""

from typing import Any

from evo_grpo.envs.prompts import Tokenizer
from evo_grpo.errors import ConfigError
from evo_grpo.settings.env import ThinkingTags

COLUMN = "thinking"
"""Parameter with which a reward function gets the thinking part."""


def parted(completion: str, prompt: str, tags: ThinkingTags) -> tuple[str, str]:
    """Return the thinking part and the answer of a completion, without white space around them.

    The thinking part reaches up to the first end tag. Without an end tag, a completion has no
    answer if it begins with the start tag, or if its prompt ends with the start tag: it was cut
    while thinking. Any other completion without an end tag is all answer.
    """
    thought, end, answer = completion.partition(tags.end)
    if not end:
        is_thinking = prompt.rstrip().endswith(tags.start) or thought.lstrip().startswith(
            tags.start
        )
        thought, answer = (thought, "") if is_thinking else ("", thought)
    return thought.strip().removeprefix(tags.start).strip(), answer.strip()


def check_tags(tags: ThinkingTags, tokenizer: Tokenizer) -> None:
    """Refuse tags that are special tokens, because the text of a completion leaves those out."""
    special: Any = tokenizer.all_special_tokens
    for name in ("start", "end"):
        tag = getattr(tags, name)
        if tag in special:
            raise ConfigError(
                f"env.thinking.{name}: expected a text that completions contain, got {tag!r}, a "
                "special token of the tokenizer, which the text of a completion leaves out; take a "
                "tokenizer in which it is an ordinary token"
            )

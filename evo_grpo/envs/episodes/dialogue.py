"""Turn the messages of an environment into token ids: the first prompt, then each new message.

The policy's tokens are never decoded and encoded again, because that could change them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from evo_grpo.envs.messages import excerpt
from evo_grpo.envs.prompts import Messages, Template, Tokenizer
from evo_grpo.errors import ConfigError
from evo_grpo.escaping import shorten

#: The column of an opening template: the environment's first message.
OBSERVATION = "observation"
#: Placeholder for a completion, while the template is rendered to find what follows it.
_COMPLETION = "@@completion@@"


def opening(system_prompt: str | None = None) -> list[Mapping[str, str]]:
    """Return the messages of a first prompt: a system prompt, if any, and the first observation."""
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": f"{{{OBSERVATION}}}"}]


class Dialogue:
    """Turns the texts of an environment into the token ids before and between completions.

    `messages`, the first prompt, is a list for the chat template (which gets `keywords`) or a raw
    text, and contains {observation}. If None, it is one user message.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: str | Messages | None = None,
        keywords: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        template = Template.of(opening() if messages is None else messages)
        self._template = replace(template, keywords=dict(keywords or {}))
        unknown = sorted(set(self._template.columns()) - {OBSERVATION})
        if unknown:
            raise ConfigError(
                f"opening template: expected {{{OBSERVATION}}} as its only column, got {unknown}; "
                "a brace that is no column is doubled"
            )
        if not self.raw:
            self._between("x")  # refuses a chat template that is missing or takes no turns

    @property
    def raw(self) -> bool:
        """Whether texts are joined without a chat template."""
        return self._template.conversation is None

    def open(self, observation: str) -> tuple[str, list[int]]:
        """Return the text and the token ids of the first prompt."""
        text, ids = self._template.render({OBSERVATION: observation}, self.tokenizer)
        return text, list(ids)

    def reply(self, observation: str, closed: int | None) -> list[int]:
        """Return the ids between two completions: end of turn, observation, start of the next turn.

        `closed` is the end token of the completion, None if a limit cut the completion.
        """
        text = observation if self.raw else self._between(observation)
        ids = [
            int(i)
            for i in self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ]
        return ids[1:] if not self.raw and ids[:1] == [closed] else ids

    def _between(self, observation: str) -> str:
        """Return the text that the template puts between a completion and the next completion."""
        # Imported here: it comes with transformers, and is only needed once a tokenizer exists.
        from jinja2 import TemplateError

        messages = [
            {"role": m["role"], "content": m["content"].replace(f"{{{OBSERVATION}}}", ".")}
            for m in self._template.conversation or ()
        ]
        if messages[-1]["role"] == "assistant":
            messages[-1]["content"] += _COMPLETION
        else:
            messages.append({"role": "assistant", "content": _COMPLETION})
        messages.append({"role": "user", "content": observation})
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._template.keywords
            )
            before, mark, after = str(text).partition(_COMPLETION)
            if not mark:
                raise ValueError(f"it leaves out the completion: {excerpt(before)}")
        except (TemplateError, ValueError) as error:  # also a tokenizer without a chat template
            raise ConfigError(
                "multi-turn environment: the tokenizer has no chat template that renders a "
                f"conversation of several turns ({shorten(str(error))}); set "
                "tokenizer.chat_template, or choose raw text with apply_chat_template=False"
            ) from error
        return after

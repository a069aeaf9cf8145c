"""Finds keywords and roles that a chat template ignores; renders it without transformers."""

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

from evo_grpo.envs.data.tables import DatasetRow
from evo_grpo.envs.messages import listed
from evo_grpo.envs.prompts import Template, Tokenizer, chat
from evo_grpo.errors import ConfigError

ROWS_SEARCHED = 1000
"""Number of rows that are searched for the conversation with the most roles."""


def ignored_keywords(chat_template: object, keywords: Collection[str]) -> list[str]:
    """Return a list: a sentence on keywords that the chat template does not read, or nothing."""
    if chat_template is None or not keywords:
        return []
    texts = chat_template.values() if isinstance(chat_template, Mapping) else [chat_template]
    variables = {name for text in texts if isinstance(text, str) for name in _variables(text)}
    if not (ignored := [name for name in keywords if name not in variables]):
        return []
    return [
        f"env.chat_template_kwargs: the model's chat template does not read {listed(ignored)}, so "
        "that the prompts are the same without; check the spelling, or remove it"
    ]


def dropped_sentence(
    template: Template, rows: Sequence[DatasetRow], tokenizer: Tokenizer
) -> list[str]:
    """Return a list: a sentence on message roles that the chat template leaves out, or nothing."""
    if template.conversation is None:
        return []
    sample = rows[:ROWS_SEARCHED] if template.conversations else rows[:1]
    messages = max(map(template.messages, sample), key=lambda one: len({m["role"] for m in one}))
    marked = [{**message, "content": f"@{n}@"} for n, message in enumerate(messages)]
    try:
        text = chat(marked, tokenizer, template.keywords)
    except ConfigError:  # rendering the first prompt reports it
        return []
    if not (lost := [m["role"] for m in marked if m["content"] not in text]):
        return []
    return [
        f"the model's chat template leaves out messages of the role {listed(set(lost))}, which the "
        "model will not see; say it in a message of the user, or take a model whose template has it"
    ]


def rendered_chat(
    template: str, messages: Sequence[Mapping[str, Any]], keywords: Mapping[str, Any]
) -> str:
    """Render messages to text by `template`, a chat template, in the same way as transformers."""
    mark = "@@continued@@ "
    arguments = dict(keywords)
    if continued := arguments.pop("continue_final_message", False):
        messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + mark}]
    text = _compiled(template).render(messages=messages, **arguments)
    if not continued:
        return text
    before, at, after = text.rpartition(mark.strip())
    if not at:
        raise ValueError("it leaves out the message of the assistant that is to be continued")
    # A template that trims the message trims the space of the mark.
    return before if after.startswith(" ") else before.rstrip()


def _variables(template: str) -> set[str]:
    # Imported here: it comes with transformers, and only keywords need it.
    from jinja2 import TemplateSyntaxError, meta

    try:
        return meta.find_undeclared_variables(_environment().parse(template))
    except (TemplateSyntaxError, RecursionError):  # rendering the first prompt reports it
        return set()


@lru_cache
def _compiled(template: str) -> Any:  # noqa: ANN401 -- of jinja2
    return _environment().from_string(template)


@cache
def _environment() -> Any:  # noqa: ANN401 -- jinja2 is imported here
    """Return a Jinja environment like the one in which transformers compiles chat templates."""
    # Imported here: it comes with transformers, and loads slowly.
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The Jinja tag `generation` of transformers, which marks the assistant's tokens."""

        tags = {"generation"}  # noqa: RUF012 -- as the base class declares it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def dumped(value: object, ensure_ascii: bool = False, **form: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **form)

    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = dumped
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment

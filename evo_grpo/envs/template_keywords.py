"""Keyword arguments of a chat template, and those that the template never reads."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from evo_grpo.envs.messages import listed

SETTING = "env.chat_template_kwargs"


def ignored_keywords(chat_template: object, keywords: Iterable[str]) -> list[str]:
    """Return the keywords that no chat template of a tokenizer reads.

    Args:
        chat_template: A template in Jinja, or several by name. Anything else reads nothing.
        keywords: Names of keyword arguments.
    """
    named = list(keywords)
    if not named:
        return []
    texts = chat_template.values() if isinstance(chat_template, Mapping) else [chat_template]
    read = {name for text in texts if isinstance(text, str) for name in _variables(text)}
    return [name for name in named if name not in read]


def warn_of_ignored(chat_template: object, keywords: Iterable[str]) -> None:
    """Warn of keywords that the chat template ignores; see `ignored_keywords`."""
    if found := ignored_keywords(chat_template, keywords):
        warnings.warn(sentence_of_ignored(found), UserWarning, stacklevel=2)


def sentence_of_ignored(names: Iterable[str]) -> str:
    """Return a sentence about keywords that a chat template ignores."""
    return (
        f"{SETTING}: the model's chat template does not read {listed(names)}, so that the prompts "
        "are the same without; check the spelling, or remove it"
    )


def _variables(template: str) -> set[str]:
    """Return the variables that a template reads from its keyword arguments."""
    # Imported here: it comes with transformers, and only keywords need it.
    from jinja2 import Environment, TemplateSyntaxError, meta, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        """The tag `generation` of transformers, which marks the assistant's tokens."""

        tags = {"generation"}  # noqa: RUF012 -- as the base class declares it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment: Any = Environment(extensions=["jinja2.ext.loopcontrols", Generation])
    try:
        return meta.find_undeclared_variables(environment.parse(template))
    except TemplateSyntaxError:  # rendering the first prompt reports it
        return set()

"""The values of the Python code in a model card; the code runs without this package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evo_grpo.envs.asking import asking
from evo_grpo.envs.conversations import MESSAGES
from evo_grpo.envs.prompts import Template
from evo_grpo.errors import EvoGrpoError
from evo_grpo.schema.hparams import Hparams
from evo_grpo.settings.algorithm import DEFAULT_OUTPUT_TOKENS
from evo_grpo.settings.env import EnvConfig

if TYPE_CHECKING:
    from evo_grpo.after.export.contents import BaseModel, Contents

PLACEHOLDER = "..."
"""Placeholder for a value that the user has to fill in."""
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for max_lora_rank."""


@dataclass(frozen=True)
class Use:
    """The values of the code that uses an export.

    Attributes:
        base: The base model.
        contents: The files of the export.
        template: The template of a prompt.
        row: An example row, which fills the columns of the template.
        tokens: The greatest number of tokens of an answer in the run.
        temperature: The temperature of the run's evaluations.
        pushed: The repository on the Hub, None if the export is not pushed.
        hidden: Number of the user's rows in the template that "..." stands for.
        stop: Strings that end an answer beside its end token.
        stop_ids: Tokens that do.
    """

    base: BaseModel
    contents: Contents
    template: Template
    row: Mapping[str, Any]
    tokens: int
    temperature: float
    pushed: str | None = None
    hidden: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        base: BaseModel,
        contents: Contents,
        config: Mapping[str, Any],
        pushed: str | None = None,
        own: Hparams | None = None,
    ) -> Use:
        """Return the values from the settings of the run, with defaults for missing ones.

        `own` are the hyperparameters of the agent, which may have a prompt of `env.prompts` and a
        longest completion of its own.
        """
        own = own or Hparams()
        template, example = Template.of("{prompt}"), dict[str, Any]()
        tokens: int | None = None
        hidden = 0
        try:
            env, seed = EnvConfig.model_validate(config.get("env")), int(config.get("seed", 0))
            found = asking(env, seed, own.prompt, show_rows=False)
            template, example, tokens = found.template, dict(found.example), found.max_output_tokens
            hidden = found.hidden
        # The task does not exist any more, or was a Python object.
        except (EvoGrpoError, ValueError, TypeError):
            pass
        said = own.max_output_tokens or _setting(config, "algorithm", "max_output_tokens")
        temperature = _setting(config, "evolve", "fitness", "temperature")
        stop: Any = _setting(config, "algorithm", "stop") or ()
        return cls(
            base,
            contents,
            template,
            {name: example.get(name, PLACEHOLDER) for name in template.columns()},
            said if isinstance(said, int) else tokens or DEFAULT_OUTPUT_TOKENS,
            temperature if isinstance(temperature, int | float) else 1.0,
            pushed,
            hidden,
            tuple(one for one in stop if isinstance(one, str)),
            tuple(one for one in stop if isinstance(one, int)),
        )

    @property
    def merged(self) -> bool:
        """Whether the export is one model, without an adapter."""
        return self.contents.dtype is not None

    @property
    def continues(self) -> bool:
        """Whether the model continues an answer that has begun."""
        conversation = self.template.conversation
        return conversation is not None and conversation[-1]["role"] == "assistant"

    @property
    def lora_rank(self) -> int:
        """The value of vLLM's max_lora_rank."""
        rank = self.contents.rank
        return next((one for one in VLLM_RANKS if one >= rank), rank)

    def keywords(self) -> str:
        """Return the keyword arguments of the chat template; it reads no names but these."""
        named = self.template.keywords.items()
        return "".join(f", {name}={value!r}" for name, value in named if name.isidentifier())

    def question(self) -> list[str]:
        """Return lines of code with the row and the prompt, or the messages, that it becomes."""
        row = ", ".join(f"{literal(name)}: {literal(value)}" for name, value in _row(self).items())
        lines = [f"row = {{{row}}}"] if row else []
        if self.template.conversation is None:
            return [*lines, f"prompt = {_filled(self.template.text or '')}"]
        messages = ", ".join(map(_message, self.template.conversation))
        return [*lines, f"messages = [{messages}]"]


def literal(value: object) -> str:
    """Return a value as a Python literal, a string in double quotes if possible."""
    written = repr(value)
    plain = isinstance(value, str) and written[0] == "'" and '"' not in written
    return f'"{written[1:-1]}"' if plain else written


def _message(message: Mapping[str, str]) -> str:
    role, content = message["role"], message["content"]
    if role == MESSAGES:
        return f"*row[{literal(content[1:-1])}]"
    return f'{{"role": {literal(role)}, "content": {_filled(content)}}}'


def _filled(text: str) -> str:
    if Template(text=text).columns():
        return f"{literal(text)}.format(**row)"
    return literal(text.replace("{{", "{").replace("}}", "}"))


def _row(use: Use) -> dict[str, Any]:
    """Return values with which the template can be filled, plain ones that Python can print."""
    row: dict[str, Any] = {}
    chats = use.template.conversations
    for name, value in use.row.items():
        fits = type(value) in (str, int, float, bool)
        asked = [{"role": "user", "content": PLACEHOLDER}]
        row[name] = asked if name in chats else value if fits else PLACEHOLDER
    try:
        use.template.plain(row)
    except EvoGrpoError:  # a format such as {answer:03d}, which takes a number
        row = {name: 0 if value == PLACEHOLDER else value for name, value in row.items()}
    return row


def _setting(config: Mapping[str, Any], *path: str) -> object:
    value: object = config
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None  # pyright: ignore[reportUnknownMemberType] -- parsed JSON
    return value

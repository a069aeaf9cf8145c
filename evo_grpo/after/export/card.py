"""The model card of an export: the agent, its scores, its schedule, and code that uses it.

The code runs without this package.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evo_grpo.envs.asking import Asking, asking
from evo_grpo.envs.conversations import MESSAGES
from evo_grpo.envs.prompts import Template
from evo_grpo.errors import EvoGrpoError
from evo_grpo.printable import printable
from evo_grpo.record.arms import arm_label
from evo_grpo.record.replay import read_replay
from evo_grpo.record.story import rivals_text
from evo_grpo.record.wording import count, with_error
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import plain_choice
from evo_grpo.settings.algorithm import DEFAULT_OUTPUT_TOKENS

if TYPE_CHECKING:
    from evo_grpo.after.export.contents import BaseModel, Contents
    from evo_grpo.record.choice import ChosenAgent
    from evo_grpo.schema.hparams import Value
    from evo_grpo.settings import RunConfig
    from evo_grpo.types import Mutation, Score

_TEMPLATE = Path(__file__).with_name("card.md.jinja")
_MARKUP = re.compile(r"[\\`*<>\[\]|&~#$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
"""Characters with a meaning in the middle of a line of Markdown; not the one in group_size."""
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
        config: RunConfig,
        pushed: str | None = None,
        own: Hparams | None = None,
    ) -> Use:
        """Return the values from the settings of the run.

        `own` are the hyperparameters of the agent, which may have a prompt of `env.prompts` and a
        longest completion of its own.
        """
        own = own or Hparams()
        try:
            found = asking(config.env, config.seed, own.prompt, show_rows=False)
        except EvoGrpoError:  # the task does not exist any more, or was a Python object
            found = Asking(Template.of("{prompt}"), DEFAULT_OUTPUT_TOKENS, {})
        said = own.max_output_tokens or config.algorithm.max_output_tokens
        stop = config.algorithm.stop
        return cls(
            base,
            contents,
            found.template,
            {name: found.example.get(name, PLACEHOLDER) for name in found.template.columns()},
            said or found.max_output_tokens,
            config.evolve.fitness.temperature,
            pushed,
            found.hidden,
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


def card(choice: ChosenAgent, config: RunConfig, use: Use, digest: str) -> str:
    """Return the README.md of an export; rounds count from 1 in it.

    `config` has the run's settings, `digest` is the recorded SHA-256 of the adapter's tensors.
    """
    # Imported here: it takes a second.
    from huggingface_hub import ModelCard, ModelCardData

    data = ModelCardData(
        base_model=use.base.hub_id,  # none without an id on the Hub, which refuses other names
        library_name="transformers" if use.merged else "peft",
        tags=["grpo", *([] if use.merged else ["lora"]), "evo-grpo"],
    )
    text = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        choice=choice,
        use=use,
        digest=digest,
        replay=read_replay(choice.run),
        run=choice.run.resolve().name,
        task=config.env.kind,
        score=_score,
        made=_made,
        number=_number,
        rivals_text=rivals_text,
        with_error=with_error,
        arm_label=arm_label,
        count=count,
        literal=literal,
        plain=_plain,
        code=_code,
    )
    return str(text)


def _made(mutation: Mutation) -> str:
    changed = mutation.changes.items()
    changes = ", ".join(f"{_plain(name)} {_number(a)} → {_number(b)}" for name, (a, b) in changed)
    return _plain(mutation.op) + (f" ({changes})" if changes else "")


def _number(value: Value | tuple[float, ...]) -> str:
    """Return the value of a hyperparameter, or of both bounds, in three digits."""
    if isinstance(value, tuple):
        return ":".join(map(_number, value))
    named = isinstance(value, str | bool)
    return _plain(plain_choice(value)) if named else f"{value:.3g}"


def _score(score: Score) -> str:
    """Return a mean reward with its standard error; "none" where it is not finite."""
    return "none" if math.isnan(score.mean) else with_error(score.mean, score.se, 4)


def _plain(text: str) -> str:
    """Return a string from outside as Markdown that shows it literally."""
    return _MARKUP.sub(r"\\\g<0>", printable(text))


def _code(text: str) -> str:
    """Return a string from outside as a code span, also if it contains backticks."""
    text = printable(text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " if longest or not text else ""
    return f"{fence}{space}{text}{space}{fence}"

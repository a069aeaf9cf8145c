"""The model card of an export: the agent, its scores, its schedule, and code that uses it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evo_grpo.after.export.snippet import Use, literal
from evo_grpo.printable import printable
from evo_grpo.record.arms import arm_label
from evo_grpo.record.replay import read_replay
from evo_grpo.record.story import rivals_text
from evo_grpo.record.wording import count, with_error
from evo_grpo.schema.search_space import plain_choice

if TYPE_CHECKING:
    from evo_grpo.record.choice import ChosenAgent
    from evo_grpo.schema.hparams import Value
    from evo_grpo.types import Mutation, Score

_TEMPLATE = Path(__file__).with_name("card.md.jinja")
_MARKUP = re.compile(r"[\\`*<>\[\]|&~#$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
"""Characters with a meaning in the middle of a line of Markdown; not the one in group_size."""


def card(choice: ChosenAgent, config: Mapping[str, Any], use: Use, digest: str) -> str:
    """Return the README.md of an export; rounds count from 1 in it.

    `config` has the run's settings, `digest` is the recorded SHA-256 of the adapter's tensors.
    """
    # Imported here: it takes a second.
    from huggingface_hub import ModelCard, ModelCardData

    env = config.get("env")
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
        task=str(env.get("kind") if isinstance(env, dict) else env),
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

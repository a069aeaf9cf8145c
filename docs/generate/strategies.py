"""Generate the tables of docs/strategies.md: selections and explorations, from their classes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import evo_grpo
from evo_grpo.evolve.kinds import Exploration, Selection

PAGE = Path(__file__).resolve().parents[2] / "docs" / "strategies.md"
HEADINGS = {"## Selections": Selection, "## Explorations": Exploration}
MARK = "<!-- The table is written by docs/generate from the classes. -->"


def page() -> str:
    """Return docs/strategies.md with a table of all kinds below each of the two headings."""
    text = PAGE.read_text(encoding="utf-8")
    for heading, kinds in HEADINGS.items():
        table = "\n".join(
            [MARK, "", "| kind | class | what it does |", "|---|---|---|", *_rows(kinds)]
        )
        pattern = rf"(?<=^{heading}\n\n){re.escape(MARK)}\n\n(?:\|[^\n]*\n)+"
        text, count = re.subn(pattern, lambda _, table=table: f"{table}\n", text, flags=re.M)
        if count != 1:
            raise SystemExit(f"{PAGE.name}: expected a table marked {MARK} below {heading}")
    return text


def _rows(kinds: object) -> Iterator[str]:
    for entry in get_args(get_args(kinds)[0]):
        kind = get_args(entry)[0]
        if hasattr(kind, "tag"):  # a class of the user
            continue
        name = (
            kind.__name__
            if hasattr(evo_grpo, kind.__name__)
            else f"{kind.__module__}.{kind.__name__}"
        )
        summary = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
        yield f"| `{kind.model_fields['kind'].default}` | `{name}` | {summary} |"

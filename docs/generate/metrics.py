"""Generate the table of docs/metrics.md from `evo_grpo.record.vocabulary`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from evo_grpo.record.vocabulary import VOCABULARY

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
HEADER = "| metric | meaning | unit | one for each | in a round |\n|---|---|---|---|---|\n"
PER = {"step": "step and agent", "round": "round and agent", "population": "round"}


def page() -> str:
    """Return docs/metrics.md with a row for each metric."""
    text, count = re.subn(
        rf"{re.escape(HEADER)}(?:\|[^\n]*\n)+",
        lambda _: HEADER + "".join(_rows()),
        PAGE.read_text(encoding="utf-8"),
    )
    if count != 1:
        raise SystemExit(f"{PAGE.name}: expected one table with the header {HEADER}")
    return text


def _rows() -> Iterator[str]:
    for m in VOCABULARY:
        over = "" if m.over == "none" else m.over
        yield f"| `{m.name}` | {m.meaning} | {m.unit} | {PER[m.per]} | {over} |\n"

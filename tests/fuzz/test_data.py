"""Any file as rows, any text as a template: rows and prompts, or an error."""

import json
from functools import partial
from pathlib import Path

import pytest
from fuzzing import fuzz, told_or
from hypothesis import example
from hypothesis import strategies as st

from evo_grpo.envs.data.tables import read_rows
from evo_grpo.envs.prompts import WIDEST, Template
from evo_grpo.errors import ConfigError, DataError

ENDINGS = ("csv", "tsv", "json", "jsonl", "parquet")
JSON_PARTS = st.sampled_from([
    '{"a": ', '{"a": 1}', "[", "]", "{", "}", ",", ":", "\n", '"', '"\\ud800"',
    '"\\ud83d\\ude00"', "1" * 30, "1" * 5000, "NaN", "Infinity", "null", "true", "1e999",
    "\ufeff", "\0", "[" * 300, "\\",
])  # fmt: skip
CSV_PARTS = st.sampled_from([
    "a,b\n", "a\tb\n", "1,2\n", '"', '""', ",", "\t", "\n", "\r", "\r\n", "\0", "\ufeff", "é",
    "x" * 200_000,
])  # fmt: skip


def read(content: bytes, ending: str) -> list[dict[str, object]] | None:
    path = Path(f"rows.{ending}")
    path.write_bytes(content)
    rows = told_or(partial(read_rows, path, "train"), DataError)
    assert rows is None or (rows and all(isinstance(row, dict) for row in rows))
    return rows


@fuzz(content=st.binary(max_size=200), ending=st.sampled_from(ENDINGS))
@example(content="q\n1\n".encode("utf-16"), ending="csv")
def test_any_bytes_are_rows_or_refused(content: bytes, ending: str):
    read(content, ending)


@fuzz(parts=st.lists(JSON_PARTS, max_size=12), ending=st.sampled_from(("json", "jsonl")))
@example(parts=["[" * 300] * 300, ending="jsonl")
@example(parts=['{"a": ', "1" * 5000, "}"], ending="jsonl")
def test_any_json_is_rows_or_refused(parts: list[str], ending: str):
    read("".join(parts).encode(), ending)


@fuzz(parts=st.lists(CSV_PARTS, max_size=12), ending=st.sampled_from(("csv", "tsv")))
def test_any_csv_is_rows_or_refused(parts: list[str], ending: str):
    read("".join(parts).encode(), ending)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
ROWS = st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=3), min_size=1, max_size=4)


@pytest.mark.slow
@fuzz(rows=ROWS)
def test_rows_that_json_can_write_are_read_as_they_were(rows: list[dict[str, object]]):
    text = json.dumps(rows)
    # NaN is not itself, and the text of it is.
    assert json.dumps(read(text.encode(), "json")) == text
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    assert json.dumps(read(lines.encode(), "jsonl")) == text


# --- templates -----------------------------------------------------------------------------------

PARTS = (
    "{ } {{ }} {q} {n} : ! !r !s !x q n [0] .a >9 99999 999999999999 0 d c e f % , _ x # + s "
    "{q:>5} {n:05d} {n:%Y} __class__ {q:{n}} {n!a:>9} {q:.3} \uff19\uff19\uff19\uff19"
)
TEMPLATES = st.lists(st.sampled_from(PARTS.split()), max_size=8).map("".join)


@fuzz(
    template=TEMPLATES | st.text(max_size=20),
    row=st.fixed_dictionaries(
        {"q": JSON, "n": JSON | st.dates() | st.decimals() | st.binary(max_size=3)}
    ),
)
@example(template="{q:>9999999999}", row={"q": "a", "n": 1})
@example(template="{q:{n}}", row={"q": "a", "n": 9999999999})
@example(template="{n:c}", row={"q": "a", "n": 10**9})
def test_any_template_is_filled_or_refused(template: str, row: dict[str, object]):
    made = told_or(partial(Template.of, template), ConfigError)
    if made is None:
        return
    text = told_or(partial(made.plain, row), DataError)
    if text is not None:
        values = sum(len(str(value)) * 10 for value in row.values())
        assert len(text) <= (values + 2 * WIDEST) * (template.count("{") + 1) + len(template)

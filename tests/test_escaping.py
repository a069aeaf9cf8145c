"""Strings from outside on one line of a screen."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_grpo.errors import (
    CheckpointError,
    ConfigError,
    EngineUnavailable,
    EvoGrpoError,
    RunDirError,
)
from evo_grpo.escaping import MESSAGE_CHARACTERS, error_text, printable, printable_lines, shorten
from evo_grpo.schema.problems import Problem, Problems
from evo_grpo.schema.validation import shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x00\x07\x08\x7f", r"\x00\x07\x08\x7f"),
        ("\x9b31m\x85", r"\x9b31m\x85"),  # C1: an escape sequence of one byte less
        ("\u202eabc\u202c \u2066x\u2069", r"\u202eabc\u202c \u2066x\u2069"),
        ("a\u200bb\u200dc\ufeff\u2028", r"a\u200bb\u200dc\ufeff\u2028"),
        ("\U000e0041", r"\U000e0041"),
        ("\udcff", r"\udcff"),
        ("é 漢字 🙂 ± → \u3000 \u00a0", "é 漢字 🙂 ± → \u3000 \u00a0"),
        ("[red]:smile:\\x1b", "[red]:smile:\\x1b"),
        ("", ""),
    ],
)
def test_what_a_screen_obeys_or_hides_is_written_as_python_writes_it(text, expected):
    assert printable(text) == expected


@given(st.text(st.characters()))
def test_nothing_is_left_that_a_screen_obeys_and_a_second_time_changes_nothing(text):
    once = printable(text)
    categories = {unicodedata.category(one) for one in once}
    assert not categories & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert printable(once) == once
    assert once.splitlines() in ([once], [])
    once.encode()  # a lone surrogate could not be


def test_the_message_of_an_exception_is_one_line_of_bounded_length():
    assert error_text(ValueError("bad\n\x1b[2J")) == r"ValueError: bad\n\x1b[2J"
    assert len(error_text(ValueError("a" * 10_000))) == MESSAGE_CHARACTERS
    assert len(error_text(ValueError("\x1b" * 10**7))) <= 4 * MESSAGE_CHARACTERS
    assert shorten("abc", 3) == "abc"


def test_a_value_in_a_message_is_escaped_whatever_its_repr():
    class Rude:
        def __repr__(self):
            return "rude\x1b[2J\u202e"

    assert shown(Rude()) == r"rude\x1b[2J\u202e"


def test_several_problems_have_a_line_each_and_no_more():
    found = Problems(
        Problem(("a\nb",), "unknown\x1b"), Problem(("c",), "missing"), source="x\u202e.yaml"
    )
    assert str(found).split("\n") == [
        r"x\u202e.yaml: 2 problems",
        r"  a\nb: unknown\x1b",
        "  c: missing",
    ]
    assert str(Problems(Problem(("a",), "b\nc"))) == r"a: b\nc"
    assert printable_lines("a\x1b\n\tb\n") == "a\\x1b\n\\tb\n"
    for kind in (EvoGrpoError, ConfigError, RunDirError, CheckpointError, EngineUnavailable):
        assert str(kind("here\x1b[31m: no\nerror: well")) == r"here\x1b[31m: no\nerror: well"

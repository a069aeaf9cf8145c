"""Short strings that all displays share."""

import math

import pytest

from evo_grpo.terminal.formatting import (
    changes_text,
    count,
    direction,
    number,
    setting,
    shown_names,
)


@pytest.mark.parametrize(
    ("amount", "text"), [(0, "0 rounds"), (1, "1 round"), (2, "2 rounds"), (1200, "1,200 rounds")]
)
def test_nouns_agree_with_their_amount(amount: int, text: str):
    assert count(amount, "round") == text


def test_missing_numbers_are_a_dash():
    assert (number(None), number(math.nan), number(0.12345, 2)) == ("-", "-", "0.12")


def test_settings_are_short():
    assert (setting(1.23456e-4), setting((0.8, 1.28)), setting(None)) == (
        "0.000123",
        "0.8:1.28",
        "-",
    )


def test_bounds_of_a_clip_range_share_the_column_of_clip_coef():
    names = shown_names(["clip_high", "temperature", "lr"])
    assert names == ["lr", "beta", "clip_coef", "group_size", "temperature"]
    moved = {"clip_high": (1.2, 1.3)}
    assert direction(moved, "clip_coef") == "up"
    assert direction(moved, "lr") == ""
    assert changes_text({"clip_coef": (0.2, 0.16)}) == "clip 0.2 -> 0.16"

"""Short strings that all displays share."""

import math
from dataclasses import replace

import pytest
from shown_run import two_rounds

from evo_grpo.readers.terminal.plain import (
    direction,
    evolution,
    shown_names,
)
from evo_grpo.record import columns
from evo_grpo.record.wording import changes_text, count, number
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.problems import shown_value
from evo_grpo.types import Decision, Member, Mutation


@pytest.mark.parametrize(
    ("amount", "text"), [(0, "0 rounds"), (1, "1 round"), (2, "2 rounds"), (1200, "1,200 rounds")]
)
def test_nouns_agree_with_their_amount(amount: int, text: str):
    assert count(amount, "round") == text


def test_missing_numbers_are_a_dash():
    assert (number(None), number(math.nan), number(0.12345, 2)) == ("-", "-", "0.12")


def test_settings_are_short():
    assert (shown_value(1.23456e-4), shown_value((0.8, 1.28)), shown_value(None)) == (
        "1.23e-4",
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


@pytest.mark.parametrize(
    ("beta", "kl", "text"),
    [(0.0, 0.0123, "0.0123"), (0.1, 0.0, "0.0000"), (0.0, None, "-")],
)
def test_a_kl_that_was_not_computed_is_a_dash(beta: float, kl: float | None, text: str):
    one = two_rounds()[0].agents[0]
    metrics = {} if kl is None else {"kl": kl}
    agent = replace(one, hparams=Hparams(beta=beta), metrics=metrics)
    assert number(columns.kl(agent), 4) == text


def test_what_a_decision_tells_is_not_told_again():
    record = two_rounds()[0]
    assert evolution(record) == {"copied": "0 -> 1", "mutated": "1: lr 1e-3 -> 1.2e-3"}
    copied = Decision("copied", 1, 0, 0.25, 0.05, 64, "agent 1 took agent 0's weights at lr 0.0012")
    assert evolution(replace(record, decisions=(copied,))) == {}
    kept = replace(copied, kind="kept", sentence="agent 1 kept its weights")
    assert "mutated" in evolution(replace(record, decisions=(kept,)))
    moved = Mutation("mutate", {"lr": (1e-3, 1.2e-3), "beta": (0.1, 0.2)})
    members = (record.members[0], Member(2, 1, parent=0, born=1, mutation=moved))
    both = replace(record, members=members, decisions=(copied,))
    assert evolution(both) == {"mutated": "1: beta 0.1 -> 0.2"}

"""The rewards of `two_goals.py`: longer answers can earn more of the first, and cost the second."""

from __future__ import annotations

LETTERS = 12
"""Different letters that earn the whole reward; the foods of the base have at most eight."""
LONGEST = 16
"""Tokens of the longest answer of the task, its end token included; a token is a letter."""


def variety(completion: str) -> float:
    """Return how many different letters an answer has, as a share of `LETTERS`, at most 1."""
    return min(1.0, len({one for one in completion if one.isalpha()}) / LETTERS)


def brevity(completion: str) -> float:
    """Return the share of the longest answer that a completion leaves free."""
    return 1.0 - min(1.0, len(completion) / LONGEST)
